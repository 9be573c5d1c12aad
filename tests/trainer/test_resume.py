"""A run that is stopped, fails or is killed, and resumed, ends bit-identical to one that never was."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from tiny_runs import assert_same_run, completions, metrics, run

from longstraw.config.messages import ConfigError
from longstraw.rollout.rewards import RewardError
from longstraw.trainer.interrupts import Interrupts, StopRequested

COMMON: dict[str, Any] = {
    "reward_funcs": "test_resume:noisy", "max_steps": 4, "prompts_per_step": 2, "lr_scheduler_type": "cosine",
    "warmup_steps": 2, "weight_decay": 0.1,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "iterations": {"num_iterations": 2},
    "lora with reference": {"lora": {"r": 2}, "beta": 0.1, "num_iterations": 2},
    "frozen copy": {"beta": 0.1},
    "accumulated": {"gradient_accumulation_steps": 2, "dynamic_sampling": True},
}
fault: dict[str, Any] = {"step": None, "how": None}


def noisy(completion_ids: list[list[int]], target: list[int], trainer_state: Any, **_: Any) -> list[float]:
    """Draws on the process's random state, which a resumed run has to find as it was; fails where a test says so."""
    noise = np.random.rand(len(completion_ids))
    if trainer_state.global_step + 1 == fault["step"]:
        if fault["how"] == "raise":
            raise ArithmeticError("the judge is away")
        os.kill(os.getpid(), fault["how"])
    return [
        base + 0.1 * float(extra) for base, extra in zip(tiny.closeness(completion_ids, target), noise, strict=True)
    ]


@pytest.fixture(autouse=True)
def no_fault() -> None:
    fault.update(step=None, how=None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a variant's uninterrupted run, made once."""
    made: dict[str, Path] = {}

    def directory(variant: str) -> Path:
        if variant not in made:
            made[variant] = tmp_path_factory.mktemp("whole") / "run"
            run(made[variant], **COMMON | VARIANTS[variant])
        return made[variant]

    return directory


@pytest.mark.parametrize("variant", VARIANTS)
def test_stopped_by_ctrl_c(tmp_path: Path, variant: str, whole: Callable[[str], Path]) -> None:
    changes = COMMON | VARIANTS[variant]
    uninterrupted = whole(variant)
    fault.update(step=3, how=signal.SIGINT)
    with pytest.raises(StopRequested) as stopped:
        run(tmp_path, **changes)
    assert f"longstraw train {tmp_path} --resume" in stopped.value.__notes__[0]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "interrupted" and summary["step"] == 2
    fault.update(step=None)
    run(tmp_path, resume=True, **changes)
    assert_same_run(uninterrupted, tmp_path)


@pytest.mark.parametrize(
    ("variant", "save_steps", "die_at"),
    [("plain", 2, 4), ("plain", 500, 3), ("lora with reference", 1, 3), ("iterations", 1, 3)],
)
def test_killed(tmp_path: Path, variant: str, save_steps: int, die_at: int, whole: Callable[[str], Path]) -> None:
    changes = COMMON | VARIANTS[variant] | {"save_steps": save_steps}
    uninterrupted = whole(variant)
    fault.update(step=die_at, how=signal.SIGKILL)
    child = os.fork()
    if child == 0:
        run(tmp_path, **changes)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    fault.update(step=None)
    run(tmp_path, resume=True, **changes)
    assert_same_run(uninterrupted, tmp_path)


def test_resumed_between_two_iterations(tmp_path: Path) -> None:
    changes = COMMON | {"num_iterations": 3, "lr_scheduler_type": "constant_with_warmup"}
    run(tmp_path / "long", **changes)
    run(tmp_path / "cut", **changes | {"max_steps": 2})
    state = json.loads((tmp_path / "cut/checkpoints/checkpoint-000002/state.json").read_text())
    assert state["iteration"] == 2 and len(state["batch"]["groups"]) == 2
    run(tmp_path / "cut", resume=True, **changes)
    assert_same_run(tmp_path / "long", tmp_path / "cut")


def test_a_reward_that_raises_stops_the_run_with_everything_saved(tmp_path: Path, whole: Callable[[str], Path]) -> None:
    uninterrupted = whole("plain")
    fault.update(step=3, how="raise")
    with pytest.raises(
        RewardError, match="'noisy' raised ArithmeticError at step 3 on sample 0: the judge is away"
    ) as error:
        run(tmp_path, **COMMON)
    assert "The state after step 2 is saved" in error.value.__notes__[0]
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2]
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
    fault.update(step=None)
    run(tmp_path, resume=True, **COMMON)
    assert_same_run(uninterrupted, tmp_path)


def test_a_damaged_checkpoint_costs_steps_but_not_exactness(
    tmp_path: Path, whole: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    uninterrupted = whole("plain")
    changes = COMMON | {"save_steps": 2}
    fault.update(step=4, how=signal.SIGINT)
    with pytest.raises(StopRequested):
        run(tmp_path, **changes)
    fault.update(step=None)
    (tmp_path / "checkpoints/checkpoint-000003/optimizer.safetensors").write_bytes(b"")
    run(tmp_path, resume=True, **changes)
    assert "checkpoint-000003 is damaged" in caplog.text
    assert_same_run(uninterrupted, tmp_path)


def test_a_finished_run_can_go_on(tmp_path: Path) -> None:
    changes = COMMON | {"lr_scheduler_type": "constant"}
    run(tmp_path / "long", **changes)
    run(tmp_path / "cut", **changes | {"max_steps": 2})
    assert len(completions(tmp_path / "cut")) == 2
    run(tmp_path / "cut", resume=True, **changes)
    assert_same_run(tmp_path / "long", tmp_path / "cut")
    run(tmp_path / "cut", resume=True, **changes)  # nothing is left to do
    assert_same_run(tmp_path / "long", tmp_path / "cut")


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    changes = COMMON | {"max_steps": 2}
    run(tmp_path / "run", **changes)
    with pytest.raises(ConfigError, match=r"exists and is not empty\. Resume it with `longstraw train"):
        run(tmp_path / "run", **changes)
    with pytest.raises(ConfigError, match="is no run directory"):
        run(tmp_path / "absent", resume=True, **changes)
    with pytest.raises(ValueError, match="'dataset': the prompts are not those that the checkpoint was made with"):
        run(tmp_path / "run", resume=True, **changes | {"dataset": {"source": "tiny:rows", "args": {"seed": 9}}})
    with pytest.raises(ValueError, match="the checkpoint's trained parameters are not this model's"):
        run(tmp_path / "run", resume=True, **changes | {"lora": {"r": 2}})


def test_a_request_to_stop_waits_for_a_critical_section() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    interrupts, reached = Interrupts(), []
    with pytest.raises(StopRequested), interrupts.active():
        with interrupts.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append("inside")
        reached.append("after")
    assert reached == ["inside"]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
