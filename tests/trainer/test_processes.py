"""Several processes take a step together: the step of one process, its metrics, its files; failures and resuming."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml
from tiny_runs import assert_same_run, completions, metrics, run, weights

import longstraw
from longstraw.parallel.processes import ProcessError, Processes, joined
from longstraw.rollout.rewards import RewardError

COMMON: dict[str, Any] = {
    "prompts_per_step": 3, "max_steps": 2, "lr_scheduler_type": "constant", "max_grad_norm": 0.05,
    "learning_rate": 1e-3, "adam_epsilon": 1e-3,
    "eval": {"held": {"source": "tiny:rows", "args": {"seed": 5}, "num_samples": 3}},
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"scale_rewards": "batch", "weight_decay": 0.1},
    "iterations, reference, stale states": {
        "num_iterations": 2, "max_steps": 4, "beta": 0.1, "refresh": {"drift": 1e9}, "prompts_per_step": 2,
    },
    "replaced and accumulated": {
        "reward_funcs": "test_processes:half_flat", "dynamic_sampling": True, "shuffle_dataset": False,
        "prompts_per_step": 1, "gradient_accumulation_steps": 3, "log_gradient_parts": True,
    },
    "most open tokens": {"top_entropy_quantile": 0.4, "num_iterations": 2, "gradient_accumulation_steps": 2},
    "narrow gradients, all of them the second's": {
        "reward_funcs": "test_processes:half_flat", "shuffle_dataset": False, "prompts_per_step": 2, "max_steps": 1,
        "model": {"path": "tiny:llama", "dtype": "bfloat16"}, "prompt_grad": "none", "log_gradient_parts": True,
    },
    "one prompt for two": {"prompts_per_step": 1, "lora": {"r": 2}, "log_gradient_parts": True},
}  # fmt: skip
RESUMED = {"reward_funcs": "test_processes:noisy", "num_iterations": 2, "max_steps": 6}


def half_flat(prompts: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(ids[0]) if len(prompt) % 2 else 0.0 for prompt, ids in zip(prompts, completion_ids, strict=True)]


def noisy(completion_ids: list[list[int]], target: list[int], log_metric: Any, **_: Any) -> list[float]:
    """Draws on the process's random state, which a resumed run has to find as it was."""
    log_metric("rank", dist.get_rank())
    noise = np.random.rand(len(completion_ids))
    return [
        base + 0.1 * float(extra) for base, extra in zip(tiny.closeness(completion_ids, target), noise, strict=True)
    ]


def fails_elsewhere(completion_ids: list[list[int]], target: list[int], trainer_state: Any, **_: Any) -> list[float]:
    if trainer_state.global_step == 1 and dist.get_rank() == 1:
        raise ArithmeticError("the judge is away")
    return tiny.closeness(completion_ids, target)


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:2]]
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    for name, changes in VARIANTS.items():
        run(Path(folder) / "two" / name, **COMMON | changes)
    whole, cut = Path(folder) / "whole", Path(folder) / "cut"
    run(whole, **COMMON | RESUMED)
    run(cut, **COMMON | RESUMED | {"max_steps": 3})
    run(cut, resume=True, **COMMON | RESUMED)
    fail(rank, Path(folder))
    gc.collect()  # the failure's traceback holds the process group, whose threads may not outlive the interpreter
    dist.destroy_process_group()


def fail(rank: int, folder: Path) -> None:
    with pytest.raises(RewardError if rank else ProcessError) as failed:
        run(folder / "failed", **COMMON | {"reward_funcs": "test_processes:fails_elsewhere"})
    (folder / f"error-{rank}").write_text(str(failed.value))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes left behind."""
    path = tmp_path_factory.mktemp("processes")
    mp.spawn(worker, (str(path),), nprocs=2)
    return path


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_processes_take_the_steps_of_one(folder: Path, tmp_path: Path, variant: str) -> None:
    two = folder / "two" / variant
    run(tmp_path, **COMMON | VARIANTS[variant])
    assert completions(tmp_path) == completions(two)  # the same ids, rewards and advantages, in the same order
    start = tiny.llama().state_dict()
    ours = weights(tmp_path)
    for name, tensor in weights(two).items():
        torch.testing.assert_close(
            tensor, ours[name], rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert "lora" in VARIANTS[variant] or any(not torch.equal(start[name], ours[name]) for name in ours)
    rows, twins = metrics(two), metrics(tmp_path)
    assert len(rows) == len(twins) == (COMMON | VARIANTS[variant])["max_steps"]
    for row, twin in zip(rows, twins, strict=True):
        own = ("time/", "memory/")  # of the first process, which may have had nothing to do
        assert {key for key in row if not key.startswith(own)} == {key for key in twin if not key.startswith(own)}
        for key, value in twin.items():
            if key.startswith((*own, "sampling/")) or key in (
                "step_time", "tokens_per_second", "peak_memory_bytes"
            ):  # fmt: skip
                continue
            wanted = None if value is None else pytest.approx(value, rel=1e-4, abs=1e-6)
            assert row[key] == wanted, key
    evaluated = [
        [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines() if "eval/" in line]
        for path in (two, tmp_path)
    ]
    for row, twin in zip(*evaluated, strict=True):
        assert {k: v for k, v in row.items() if "time" not in k} == {k: v for k, v in twin.items() if "time" not in k}


def test_a_resumed_run_of_two_is_the_same_run(folder: Path) -> None:
    assert_same_run(folder / "whole", folder / "cut")
    assert metrics(folder / "whole")[0]["rank"] == 0.5


def test_a_failure_in_one_process_stops_all_with_everything_saved(folder: Path, tmp_path: Path) -> None:
    failed = folder / "failed"
    assert "'fails_elsewhere' raised ArithmeticError at step 2 on sample 0" in (folder / "error-1").read_text()
    assert "process 1 of 2 failed: RewardError: reward function 'fails_elsewhere'" in (folder / "error-0").read_text()
    assert json.loads((failed / "summary.json").read_text())["step"] == 1
    assert [path.name for path in (failed / "checkpoints").iterdir()] == ["checkpoint-000001"]
    run(failed, resume=True, **COMMON)
    run(tmp_path, **COMMON)
    for name, tensor in weights(tmp_path).items():
        torch.testing.assert_close(weights(failed)[name], tensor, rtol=1e-5, atol=1e-6)


def test_alone_there_is_nobody_to_tell() -> None:
    with joined() as processes:
        assert processes.is_alone and processes.is_first and processes.mesh is None
        assert processes.together(lambda: processes) == [processes]  # nothing travels
        with pytest.raises(KeyError):
            processes.together(lambda: {}["absent"])
    assert [place for place in range(5) if Processes(1, 2).owns(place)] == [1, 3]


def test_torchrun(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny.options(**COMMON | {"output_dir": "run", "eval": {}})))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "longstraw.cli",
    ]
    searched = [str(Path(__file__).parents[1]), str(Path(longstraw.__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(searched), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "train", "run.yaml"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("The run is in run") == 1 and done.stdout.count("step 2/2") == 1
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]
    assert sorted(path.name for path in (tmp_path / "run").iterdir())[-1] == "summary.json"
