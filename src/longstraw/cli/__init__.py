"""The command line: `longstraw COMMAND`. One file a command; this one gathers them."""

from __future__ import annotations

import typer

from longstraw.cli.config import config
from longstraw.cli.report import report
from longstraw.cli.train import train

app = typer.Typer(
    name="longstraw",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Exact GRPO on very long prompts: capture a prompt once, train on its responses in a bounded graph.",
)
app.command()(train)
app.command()(config)
app.command()(report)


def main() -> None:
    """Entry point of the `longstraw` program."""
    app()
