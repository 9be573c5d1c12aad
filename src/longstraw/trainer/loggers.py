"""TensorBoard and Weights & Biases, when asked for: every row of metrics goes there too, by TRL's names."""

from __future__ import annotations

import importlib.util
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from longstraw.config.load import config_to_yaml
from longstraw.config.locate import install_command
from longstraw.config.messages import ConfigError
from longstraw.config.train import TrainConfig
from longstraw.trainer.metrics import MetricsLog, Row, to_plain

STEP = "train/global_step"


def check_packages(report_to: Sequence[str]) -> None:
    """Make sure that what `report_to` names is installed.

    Raises:
        ConfigError: it is not; the message has the command that installs it.
    """
    for name in report_to:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"'report_to' names {name}, which is not installed. Install it: {install_command(name)}. Or leave it "
                "out: metrics.jsonl is written in any case."
            )


@contextmanager
def reported_to(config: TrainConfig, metrics: MetricsLog, run_path: Path, step: int) -> Iterator[None]:
    """Inside, rows that are appended to `metrics` also go where `report_to` says.

    Args:
        step: optimizer steps done. What TensorBoard has of later ones, from before a resumption, is hidden.
    Raises:
        RuntimeError: Weights & Biases cannot be reached or knows no key.
    """
    with ExitStack() as stack:
        for name in config.report_to:
            opened = _tensorboard if name == "tensorboard" else _wandb
            metrics.listeners.append(stack.enter_context(opened(config, run_path, step)))
        try:
            yield
        finally:
            metrics.listeners.clear()


def scalars(row: Row) -> dict[str, float]:
    """The row's numbers under `train/` or `eval/`; without the step, and without what is not finite."""
    plain = to_plain({key: value for key, value in row.items() if key != "step"})
    return {
        key if key.startswith("eval/") else f"train/{key}": float(value)
        for key, value in plain.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


@contextmanager
def _tensorboard(config: TrainConfig, run_path: Path, step: int) -> Iterator[Callable[[Row], None]]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(log_dir=str(run_path / "tensorboard"), purge_step=step + 1) as writer:
        indented = "".join(f"    {line}\n" for line in config_to_yaml(config).splitlines())
        writer.add_text("configuration", indented, step)

        def write(row: Row) -> None:
            for name, value in scalars(row).items():
                writer.add_scalar(name, value, int(row["step"]))
            writer.flush()

        yield write


@contextmanager
def _wandb(config: TrainConfig, run_path: Path, step: int) -> Iterator[Callable[[Row], None]]:
    import wandb

    try:
        run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "longstraw"),
            name=os.environ.get("WANDB_NAME", run_path.resolve().name),
            id=_wandb_id(run_path / "wandb" / "run-id"),
            resume="allow",
            dir=str(run_path),
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(console="off"),  # it would take the progress bars apart
        )
    except wandb.errors.Error as error:
        reason = str(error).rstrip(". ")
        raise RuntimeError(
            f"'report_to': Weights & Biases did not start: {reason}. Run `wandb login`, set WANDB_MODE=offline to keep "
            "the data here, or leave wandb out of report_to."
        ) from error
    run.define_metric(STEP)
    run.define_metric("*", step_metric=STEP)
    with run:
        yield lambda row: run.log({**scalars(row), STEP: int(row["step"])})


def _wandb_id(file: Path) -> str:
    """The id that the run goes by there, the same after every resumption."""
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(uuid.uuid4().hex[:12])
    return file.read_text()
