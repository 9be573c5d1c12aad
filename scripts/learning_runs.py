"""The runs of the learning study: what is trained on what, where it lies, and what it gave."""

from __future__ import annotations

import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from rich.progress import Progress

from longstraw.config.train import TrainConfig

TUNE_SEED, TRAIN_SEEDS = 100, (1, 2, 3)
CLIPS = (1.0, 0.0)  # 0 is off
TUNE_STEPS = 60
PROMPTS_A_STEP, GROUP = 8, 16
# Rows by length: as many as keep the reading of all lengths shorter than the training.
EVALUATED = {128: 64, 256: 64, 512: 64, 1024: 64, 2048: 64, 4096: 32, 8192: 16, 16384: 8}
HELD_OUT_ROWS = 128  # at the length of training


@dataclass(frozen=True)
class Study:
    """One task at one length of prompts.

    Attributes:
        task: a module of `longstraw.tasks`.
        tokens: of every training prompt.
        windows: what `prompt_grad` takes beside "none" and "full"; of the length it was tuned at the same shares.
        steps: optimizer steps of the final runs.
        tuned_at: the length whose tuning this study goes by.
        rates: learning rates to try.
    """

    task: str
    tokens: int
    windows: tuple[int, ...]
    steps: int
    tuned_at: int
    rates: tuple[float, ...] = (2e-4, 4e-4, 8e-4, 1.6e-3)

    @property
    def name(self) -> str:
        return f"{self.task}-{self.tokens}"

    @property
    def held_out(self) -> dict[int, int]:
        """Held-out rows by length of prompt."""
        return dict(sorted((EVALUATED | {self.tokens: HELD_OUT_ROWS}).items()))

    @property
    def modes(self) -> tuple[str | int, ...]:
        return ("none", *self.windows, "full")


STUDIES = (
    Study("marked", 1024, (128, 512), 80, 1024, rates=(2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3)),
    Study("recall", 2048, (256, 1024), 80, 2048),
    Study("recall", 4096, (), 40, 2048),
)


@dataclass(frozen=True)
class Settings:
    """What is tuned. `clip` 0 is off."""

    learning_rate: float
    clip: float

    def __str__(self) -> str:
        return f"lr{self.learning_rate:g}-clip{self.clip:g}"


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        mode: `prompt_grad`.
        seed: of prompts, their order and samples.
        evaluates: held-out accuracy at the end.
        before: held-out accuracy of the untrained model too.
    """

    study: Study
    mode: str | int
    settings: Settings
    seed: int
    steps: int
    evaluates: bool = False
    before: bool = False

    def directory(self, runs: Path) -> Path:
        kind = "train" if self.evaluates else "tune"
        return runs / kind / self.study.name / str(self.mode) / str(self.settings) / f"seed{self.seed}"

    def configuration(self) -> dict[str, Any]:
        source = f"longstraw.tasks.{self.study.task}"

        def prompts(rows: int, tokens: int, seed: int) -> dict[str, Any]:
            arguments = {"num_rows": rows, "prompt_tokens": tokens, "seed": seed}
            return {"source": f"{source}:prompts", "args": arguments}

        held_out = {
            f"at_{tokens}": {**prompts(rows, tokens, 0), "num_samples": rows}
            for tokens, rows in self.study.held_out.items()
        }
        return {
            "model": "package:longstraw.tasks/assets/recall",
            "dataset": prompts(self.steps * PROMPTS_A_STEP, self.study.tokens, self.seed),
            "reward_funcs": f"{source}:reward",
            "eval": held_out if self.evaluates else {},
            "eval_on_start": self.before,
            "prompt_grad": self.mode,
            "segment_tokens": 1024,
            "prompts_per_step": PROMPTS_A_STEP,
            "num_generations": GROUP,
            "max_completion_length": 1,
            "loss_type": "grpo",
            "learning_rate": self.settings.learning_rate,
            "lr_scheduler_type": "constant",
            "max_grad_norm": self.settings.clip,
            "max_steps": self.steps,
            "save_steps": 20,
            "save_total_limit": 1,
            "log_completions": False,
            "log_gradient_parts": self.evaluates,
            "seed": self.seed,
        }


def tuning(study: Study) -> list[Run]:
    grid = product(study.modes, study.rates, CLIPS)
    return [Run(study, mode, Settings(rate, clip), TUNE_SEED, TUNE_STEPS) for mode, rate, clip in grid]


def tuning_study(study: Study) -> Study:
    return next(other for other in STUDIES if (other.task, other.tokens) == (study.task, study.tuned_at))


def final(study: Study, runs: Path) -> list[Run]:
    best = chosen(study, runs)
    return [
        Run(study, mode, best[mode], seed, study.steps, True, before=(mode, seed) == ("none", TRAIN_SEEDS[0]))
        for seed, mode in product(TRAIN_SEEDS, study.modes)
    ]


@cache
def chosen(study: Study, runs: Path) -> dict[str | int, Settings]:
    """For each gradient the settings with the highest mean reward over the second half of the tuning's steps."""
    tuned = tuning_study(study)
    best: dict[str | int, Settings] = {}
    for mode in study.modes:
        tuned_mode = mode * tuned.tokens // study.tokens if isinstance(mode, int) else mode
        tried = [run for run in tuning(tuned) if run.mode == tuned_mode]
        missing = [run for run in tried if not complete(run, runs)]
        if missing:
            raise ValueError(f"{len(missing)} runs of {tuned.name} are not tuned yet: run `tune` first")
        best[mode] = max(tried, key=lambda run: late_reward(run, runs)).settings
    return best


def late_reward(run: Run, runs: Path) -> float:
    rewards = [row["reward"] for row in steps_of(run, runs)]
    return statistics.fmean(rewards[len(rewards) // 2 :])


def rows_of(run: Run, runs: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.directory(runs) / "metrics.jsonl").read_text().splitlines()]


def steps_of(run: Run, runs: Path) -> list[dict[str, Any]]:
    return [row for row in rows_of(run, runs) if "reward" in row]


def accuracies(run: Run, runs: Path, before: bool = False) -> dict[int, float]:
    """Held-out accuracy by length of prompt, after training or before."""
    (row,) = [row for row in rows_of(run, runs) if row["step"] == (0 if before else run.steps) and "reward" not in row]
    found = {int(key.split("/")[1][3:]): value for key, value in row.items() if key.endswith("/reward")}
    return dict(sorted(found.items()))


def complete(run: Run, runs: Path) -> bool:
    """Whether the run has ended. Raises ValueError where its directory is of another run, or damaged."""
    directory = run.directory(runs)
    if not (directory / "config.yaml").exists():
        return False
    found = TrainConfig.model_validate(yaml.safe_load((directory / "config.yaml").read_text()))
    if found != TrainConfig.model_validate(run.configuration() | {"output_dir": found.output_dir}):
        raise ValueError(f"{directory} is a run of another configuration: remove it, or choose other --runs")
    if not (directory / "final").exists():
        return False
    if [row["step"] for row in steps_of(run, runs)] != list(range(1, run.steps + 1)):
        raise ValueError(f"{directory}/metrics.jsonl does not have every step once: remove the directory")
    return True


def execute(run: Run, runs: Path, lock: int | None = None) -> None:
    """Trains; raises RuntimeError with what it printed where it fails. The child holds the lock as long as it lives."""
    directory = run.directory(runs)
    command = [sys.executable, "-m", "longstraw.cli", "train"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        if (directory / "config.yaml").exists():
            command += [str(directory), "--resume"]
        else:
            file = Path(folder, "run.yaml")
            file.write_text(yaml.safe_dump(run.configuration() | {"output_dir": str(directory)}, sort_keys=False))
            command.append(str(file))
        held = () if lock is None else (lock,)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, pass_fds=held)
    if done.returncode:
        raise RuntimeError(f"{directory} failed:\n{(done.stdout + done.stderr)[-2000:]}")


@contextmanager
def only_one(runs: Path) -> Iterator[int]:
    """A lock on the runs' folder that outlives this process in the trainings it has started."""
    runs.mkdir(parents=True, exist_ok=True)
    with (runs / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"another study, or a training it has left behind, is at work in {runs}") from None
        yield file.fileno()


def execute_all(wanted: Sequence[Run], runs: Path, jobs: int) -> None:
    """Trains what is not complete, several at a time; the first failure ends it."""
    left = [run for run in wanted if not complete(run, runs)]
    if not left:
        return
    with only_one(runs) as lock, Progress() as progress, ThreadPoolExecutor(jobs) as pool:
        bar = progress.add_task(f"{len(wanted) - len(left)} of {len(wanted)} runs were there", total=len(left))

        def one(run: Run) -> None:
            begin = time.perf_counter()
            execute(run, runs, lock)
            progress.advance(bar)
            progress.console.print(f"{run.directory(runs).relative_to(runs)}: {time.perf_counter() - begin:.0f} s")

        futures = [pool.submit(one, run) for run in left]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
