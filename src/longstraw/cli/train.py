"""`longstraw train`: run a training configuration, or the embedded task when there is none."""

from __future__ import annotations

import importlib.resources
import sys
from pathlib import Path
from typing import Annotated

import typer

from longstraw.cli.errors import INTERRUPTED, reported_errors
from longstraw.config.load import config_to_yaml, load_config
from longstraw.config.messages import ConfigError
from longstraw.config.train import TrainConfig

DEFAULT_CONFIG = "default.yaml"


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.yaml | RUN_DIR] [KEY=VALUE]...",
            help="A configuration and changes to it.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest sound checkpoint of RUN_DIR.")
    ] = False,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the resolved configuration and stop.")
    ] = False,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Leave out rows that cannot be used; short for skip_bad_rows=true.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Train a policy with GRPO. Without a configuration: the embedded task, in a few minutes on two CPU cores.

    `longstraw config` lists the options.
    """
    with reported_errors(debug):
        path, overrides = _split(arguments or [])
        overrides += ["skip_bad_rows=true"] if skip_bad_rows else []
        config, embedded = _load(path, overrides, resume)
        if show_config:
            typer.echo(config_to_yaml(config), nl=False)
            return
        _make_importable(path)
        _run(config, resume, embedded)


def _split(arguments: list[str]) -> tuple[Path | None, list[str]]:
    if not arguments or ("=" in arguments[0] and not Path(arguments[0]).exists()):
        return None, arguments
    return Path(arguments[0]), arguments[1:]


def _load(path: Path | None, overrides: list[str], resume: bool) -> tuple[TrainConfig, bool]:
    """The configuration, and whether it is the embedded one."""
    if path is not None and path.is_dir():
        if not resume:
            raise ConfigError(f"{path} is a directory. Give a YAML file, or add --resume to go on with a run.")
        if not (path / "config.yaml").is_file():
            raise ConfigError(f"{path} is no run directory: it has no config.yaml.")
        return load_config(path / "config.yaml", [*overrides, f"output_dir={path}"]), False
    if path is not None and resume and not path.exists():
        raise ConfigError(f"There is no run directory {path}. Give the one that `longstraw train` printed.")
    if path is not None:
        return load_config(path, overrides), False
    if resume and not any(word.startswith("output_dir=") for word in overrides):
        raise ConfigError("--resume needs to know the run. Run `longstraw train RUN_DIR --resume`.")
    with importlib.resources.as_file(importlib.resources.files("longstraw.tasks") / DEFAULT_CONFIG) as default:
        return load_config(default, overrides), True


def _make_importable(path: Path | None) -> None:
    """Modules beside the configuration and in the working directory can be named in it."""
    folders = [str(Path.cwd())] + ([str(path.parent.resolve())] if path is not None and path.is_file() else [])
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]


def _run(config: TrainConfig, resume: bool, embedded: bool) -> None:
    from longstraw.trainer.interrupts import StopRequested
    from longstraw.trainer.report import quiet_transformers

    quiet_transformers()  # before the libraries are imported: some speak up when they are
    from longstraw.trainer.run import train as run_training

    try:
        result = run_training(config, resume=resume)
    except StopRequested as stop:
        typer.echo("\nStopped. " + " ".join(getattr(stop, "__notes__", [])), err=True)
        raise typer.Exit(INTERRUPTED) from None
    if not result.is_first:
        return
    typer.echo(
        f"The run is in {result.path}: metrics.jsonl, completions/, checkpoints/, and the trained model in final/."
    )
    if embedded:
        typer.echo(
            "Next, try:\n"
            "  longstraw train prompt_grad=none           # the same without the prompt's gradient\n"
            "  longstraw train --show-config > mine.yaml  # a configuration to change\n"
            "  longstraw config                           # every option"
        )
