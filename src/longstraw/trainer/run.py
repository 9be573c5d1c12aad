"""From a configuration to a finished run."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from longstraw.config.train import TrainConfig
from longstraw.parallel.processes import Processes, joined
from longstraw.trainer.build import build_trainer
from longstraw.trainer.interrupts import StopRequested
from longstraw.trainer.loggers import check_packages, reported_to
from longstraw.trainer.report import Reporter, evaluated_names
from longstraw.trainer.rng import seed_everything
from longstraw.trainer.run_dir import RunDir
from longstraw.trainer.written import WriteError


@dataclass
class RunResult:
    """How a run ended.

    Attributes:
        path: the run directory.
        step: optimizer steps done.
        before, after: mean reward by held-out set, of the first and the last evaluation.
        is_first: whether this process is the one that wrote the directory.
    """

    path: Path
    step: int
    before: dict[str, float | None]
    after: dict[str, float | None]
    is_first: bool = True


def train(config: TrainConfig, *, resume: bool = False, console: Console | None = None) -> RunResult:
    """Train as configured, in a fresh run directory or on from the last checkpoint of one.

    Under torchrun every process calls it: each takes its share of every step's prompts, the first one writes.

    Raises:
        ConfigError, ValueError: something cannot be used; the message names the option and the remedy.
        RewardError, StepRefused: a step failed; a checkpoint of the last complete step is saved.
        StopRequested: Ctrl-C or SIGTERM; the same. Notes on the exception say how to go on.
    """
    with joined() as processes:
        return _train(config, resume, console or Console(), processes)


def _train(config: TrainConfig, resume: bool, console: Console, processes: Processes) -> RunResult:
    reporter = Reporter(console if processes.is_first else Console(quiet=True), config.logging_steps)
    run = _open(config, resume, processes)
    config = config.model_copy(update={"output_dir": str(run.path)} | ({} if run.writes else {"report_to": []}))
    try:
        check_packages(config.report_to)
        seed_everything(config.seed)
        trainer = build_trainer(config, run, reporter, processes)
        run.begin(config, resume)
    except BaseException:
        if run.writes:
            run.abandon()
        raise
    if resume:
        step = trainer.resume()
        from_the_start = f"{run.path} has no sound checkpoint: from the start."
        reporter.say(f"Resuming {run.path} after step {step}." if step else from_the_start)
    begin = time.perf_counter()
    try:
        run.write_summary(status="running", step=trainer.progress.step)
        with reported_to(config, run.metrics, run.path, trainer.progress.step):
            trainer.train()
    except BaseException as error:
        ending = {"status": "failed", "step": trainer.saved_step, "num_steps": trainer.num_steps}
        if isinstance(error, StopRequested):
            ending |= {"status": "interrupted"}
        else:
            ending |= {"error": f"{type(error).__name__}: {error}"}
        with suppress(WriteError):  # what went wrong first is what matters
            run.write_summary(**ending)
        error.add_note(
            f"The state after step {trainer.saved_step} is saved. Go on with: longstraw train {run.path} --resume"
        )
        raise
    evaluations = [row for row in trainer.history if evaluated_names(row)]
    if evaluations:
        reporter.before_and_after(evaluations[0], evaluations[-1])
    first, last = (evaluations[0], evaluations[-1]) if evaluations else ({}, {})
    before, after = ({name: row[f"eval/{name}/reward"] for name in evaluated_names(row)} for row in (first, last))
    step, seconds = trainer.progress.step, time.perf_counter() - begin
    run.write_summary(
        status="finished", step=step, num_steps=trainer.num_steps, seconds=seconds, before=before, after=after
    )
    return RunResult(run.path, step, before, after, run.writes)


def _open(config: TrainConfig, resume: bool, processes: Processes) -> RunDir:
    """The run directory: the first process opens it, the others use the same and write nothing."""
    opened: list[RunDir] = []

    def path() -> Path | None:
        if not processes.is_first:
            return None
        opened.append(RunDir.open(config, resume))
        return opened[0].path

    found = processes.together(path)[0]
    assert found is not None
    return opened[0] if opened else RunDir(found, writes=False)
