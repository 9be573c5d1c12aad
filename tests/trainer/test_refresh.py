"""Prompt states kept over optimizer steps: when they are captured again, what the metrics say, and exact resuming."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import assert_same_run, metrics, run

from longstraw.engine.engine import Engine
from longstraw.trainer.interrupts import StopRequested

COMMON: dict[str, Any] = {"num_iterations": 4, "max_steps": 8, "learning_rate": 3e-3, "lr_scheduler_type": "constant"}


def column(out: Path, name: str) -> list[Any]:
    return [row.get(f"staleness/{name}") for row in metrics(out)]


def counted_captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    captured: list[int] = []
    original = Engine.capture

    def capture(self: Engine, prompt_ids: Any) -> Any:
        captured.append(len(prompt_ids))
        return original(self, prompt_ids)

    monkeypatch.setattr(Engine, "capture", capture)
    return captured


@pytest.mark.parametrize(
    ("every", "ages", "num_captures"), [(1, [0, 0, 0, 0] * 2, 16), (2, [0, 1] * 4, 8), (9, [0, 1, 2, 3] * 2, 4)]
)
def test_every_so_many_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, ages: list[int], num_captures: int
) -> None:
    captured = counted_captures(monkeypatch)
    run(tmp_path, refresh={"every": every}, prompts_per_step=2, **COMMON)
    assert column(tmp_path, "steps") == ages and column(tmp_path, "drift") == [None] * 8
    assert sum(column(tmp_path, "recaptured")) == len(captured) - 4 == num_captures - 4


def test_one_step_is_always_and_another_bound_is_not(tmp_path: Path) -> None:
    run(tmp_path / "always", **COMMON)
    assert column(tmp_path / "always", "steps") == [0] * 8
    assert column(tmp_path / "always", "recaptured") == [0, 1, 1, 1] * 2
    run(tmp_path / "one", refresh={"every": 1}, **COMMON)
    assert_same_run(tmp_path / "always", tmp_path / "one")
    run(tmp_path / "two", refresh={"every": 2}, **COMMON)
    fresh, stale = metrics(tmp_path / "always"), metrics(tmp_path / "two")
    assert [fresh[0]["loss"], fresh[0]["grad_norm"]] == [stale[0]["loss"], stale[0]["grad_norm"]]
    assert fresh[1]["grad_norm"] != stale[1]["grad_norm"]


@pytest.mark.parametrize("prompt_grad", ["full", "none", 7])
def test_drift_captures_again_when_and_only_when_the_tolerance_is_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt_grad: Any
) -> None:
    run(tmp_path / "loose", refresh={"drift": 1e9}, prompt_grad=prompt_grad, **COMMON)
    drifts = column(tmp_path / "loose", "drift")
    assert (
        column(tmp_path / "loose", "recaptured") == [0] * 8 and column(tmp_path / "loose", "steps") == [0, 1, 2, 3] * 2
    )
    assert drifts[0] is drifts[4] is None and 0 < drifts[1] < drifts[2] < drifts[3]

    tolerance = (drifts[1] + drifts[2]) / 2
    captured = counted_captures(monkeypatch)
    run(tmp_path / "run", refresh={"drift": tolerance}, prompt_grad=prompt_grad, **COMMON)
    found, again = column(tmp_path / "run", "drift"), column(tmp_path / "run", "recaptured")
    assert again == [int(drift is not None and drift > tolerance) for drift in found]
    assert again[:3] == [0, 0, 1] and len(captured) == 2 + sum(again)
    assert [age == 0 for age in column(tmp_path / "run", "steps")] == [
        step % 4 == 0 or bool(recaptured) for step, recaptured in enumerate(again)
    ]
    assert all(("time/probe" in row) == (row["step"] % 4 != 1) for row in metrics(tmp_path / "run"))


def test_a_kept_state_does_not_depend_on_kept_graphs(tmp_path: Path) -> None:
    run(tmp_path / "plain", refresh={"every": 4}, **COMMON)
    run(tmp_path / "graphs", refresh={"every": 4}, retain_graph_bytes=1 << 24, **COMMON)
    assert_same_run(tmp_path / "plain", tmp_path / "graphs")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_resumed_in_the_middle_of_the_iterations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: int) -> None:
    changes = COMMON | {"refresh": {"drift": 0.5}, "prompts_per_step": 2, "save_steps": 3, "max_steps": 10}
    run(tmp_path / "whole", **changes)
    recaptured = column(tmp_path / "whole", "recaptured")
    assert 0 < sum(recaptured) < 14

    original = Engine.drift

    def dies_at_step_7(self: Engine, *arguments: Any, **keywords: Any) -> float:
        if len(metrics(tmp_path / "cut")) == 6:
            os.kill(os.getpid(), how)
        return original(self, *arguments, **keywords)

    monkeypatch.setattr(Engine, "drift", dies_at_step_7)
    if how == signal.SIGKILL:
        child = os.fork()
        if child == 0:
            run(tmp_path / "cut", **changes)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    else:
        with pytest.raises(StopRequested) as stopped:
            run(tmp_path / "cut", **changes)
        assert "The state after step 4 is saved" in stopped.value.__notes__[0]
    monkeypatch.undo()
    assert len(metrics(tmp_path / "cut")) == 6
    names = sorted(path.name for path in (tmp_path / "cut/checkpoints").iterdir())
    assert names == ["checkpoint-000000", "checkpoint-000004"]
    run(tmp_path / "cut", resume=True, **changes)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    for name in ("steps", "drift", "recaptured"):
        assert column(tmp_path / "cut", name) == column(tmp_path / "whole", name)
