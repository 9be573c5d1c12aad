"""The run directory: everything that a run reads, writes and leaves behind.

config.yaml        the resolved configuration
environment.json   versions, machine and command of every start
metrics.jsonl      one row a step, and one an evaluation
completions/       what was sampled, step by step
checkpoints/       to resume from
tensorboard/       events, with report_to: tensorboard
final/             the trained model, or the adapter in PEFT form
summary.json       how the run ended
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from longstraw.config.load import config_to_yaml
from longstraw.config.messages import ConfigError
from longstraw.config.train import TrainConfig
from longstraw.trainer.environment import collect_receipt
from longstraw.trainer.metrics import MetricsLog, to_plain
from longstraw.trainer.published import Published
from longstraw.trainer.written import written


class RunDir:
    """Paths and files of one run.

    Args:
        path: the directory.
        writes: False where another process writes it.
    """

    def __init__(self, path: Path, writes: bool = True) -> None:
        self.path = path
        self.writes = writes
        self.config_file = path / "config.yaml"
        self.checkpoints = path / "checkpoints"
        self.completions = path / "completions"
        self.final = path / "final"
        self.metrics = MetricsLog(path / "metrics.jsonl", writes)

    @classmethod
    def open(cls, config: TrainConfig, resume: bool) -> RunDir:
        """The directory of a run to start or to resume. Writes nothing yet; one without a name is made, to be its own.

        Raises:
            ConfigError: a new run would write into one that is there, or there is nothing to resume.
        """
        if resume:
            if config.output_dir is None:
                raise ConfigError(
                    "There is nothing to resume without a run directory. Run `longstraw train RUN_DIR --resume`."
                )
            run = cls(Path(config.output_dir))
            if not run.config_file.is_file():
                raise ConfigError(
                    f"'output_dir': {run.path} is no run directory: it has no config.yaml. Start it without --resume."
                )
            return run
        if config.output_dir is None:
            return cls(_fresh(Path("runs")))
        path = Path(config.output_dir)
        if path.exists() and not path.is_dir():
            raise ConfigError(f"'output_dir': {path} is a file. Choose another name.")
        if path.exists() and any(not entry.name.startswith(".") for entry in path.iterdir()):
            raise ConfigError(
                f"'output_dir': {path} exists and is not empty. Resume it with `longstraw train {path} --resume`, or "
                "choose another output_dir."
            )
        return cls(path)

    def begin(self, config: TrainConfig, resume: bool = False) -> None:
        """Create the directory, write the configuration and the receipt of this start.

        Raises:
            ConfigError: another run that was started at the same time has taken the directory.
            WriteError: the file system refuses.
        """
        if not self.writes:
            return
        with written(self.path):
            self._begin(config, resume)

    def _begin(self, config: TrainConfig, resume: bool) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        if not resume:
            try:
                self.config_file.touch(exist_ok=False)  # whoever comes first has the directory
            except FileExistsError:
                raise ConfigError(
                    f"'output_dir': another run has just begun in {self.path}. Choose another output_dir."
                ) from None
        _replace(self.config_file, config_to_yaml(config))  # first: with it the run can be resumed
        for folder in (self.completions, self.checkpoints):
            folder.mkdir(exist_ok=True)
        receipts = self.path / "environment.json"
        starts = json.loads(receipts.read_text())["starts"] if receipts.exists() else []
        started = {"time": datetime.now().astimezone().isoformat(timespec="seconds"), **collect_receipt()}
        _replace(receipts, json.dumps({"starts": [*starts, started]}, indent=1))

    def abandon(self) -> None:
        """Remove a directory that nothing was written to, as of a run that could not begin."""
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def write_completions(self, step: int, rows: Iterable[dict[str, Any]]) -> None:
        """Completions of one step as JSON lines; replaces those of an earlier try at the step."""
        if not self.writes:
            return
        lines = (json.dumps(to_plain(row), ensure_ascii=False) + "\n" for row in rows)
        _replace(self.completions / f"step-{step:06d}.jsonl", "".join(lines))

    def drop_after(self, step: int) -> None:
        """Forget metrics and completions of later steps, which will be run again."""
        if not self.writes:
            return
        self.metrics.drop_after(step)
        for path in self.completions.glob("step-*.jsonl"):
            if int(path.stem.removeprefix("step-")) > step:
                path.unlink()

    def write_summary(self, **summary: Any) -> None:
        if self.writes:
            _replace(self.path / "summary.json", json.dumps(to_plain(summary), indent=1))

    def save_final(self, model: Any, tokenizer: Any | None, published: Published | None = None) -> None:
        """The model in save_pretrained form; only the trained adapter, in PEFT form, where there is one.

        Args:
            published: the class that an adapter is saved for, where it is another than the model's.
        """
        if not self.writes:
            return
        writing = self.path / ".writing-final"
        shutil.rmtree(writing, ignore_errors=True)
        with written(self.final):
            try:
                if hasattr(model, "peft_config"):
                    model.save_pretrained(writing, selected_adapters=["default"], save_embedding_layers=False)
                    if published is not None:
                        published.save(writing, model)
                else:
                    model.save_pretrained(writing)
                if tokenizer is not None:
                    tokenizer.save_pretrained(writing)
            except BaseException:
                shutil.rmtree(writing, ignore_errors=True)
                raise
            shutil.rmtree(self.final, ignore_errors=True)
            writing.rename(self.final)


def _fresh(parent: Path) -> Path:
    """A directory named by the time, made here: of runs that start together, each gets its own."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path, number = parent / stamp, 1
    with written(parent):
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                path.mkdir()
                return path
            except FileExistsError:
                number += 1
                path = parent / f"{stamp}-{number}"


def _replace(path: Path, text: str) -> None:
    """Write a file so that it is whole or as before."""
    temporary = path.with_name(f".{path.name}.writing")
    with written(path):
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
