"""`longstraw config`: the options of a training configuration, with help and defaults."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from longstraw.cli.errors import BAD_CONFIG
from longstraw.config.listing import list_options


def config(
    word: Annotated[str | None, typer.Argument(help="Only options whose name or help has this word.")] = None,
) -> None:
    """List every option of a training configuration: name, type, default, meaning."""
    console = Console()
    found = [option for option in list_options() if not word or word.lower() in f"{option[0]} {option[-1]}".lower()]
    for key, kind, default, text in found:
        console.print(
            f"[bold]{escape(key)}[/bold]  [dim]{escape(kind)}, default {escape(default)}[/dim]", highlight=False
        )
        console.print(f"    {escape(text)}", highlight=False)
    if not found:
        typer.echo(f"No option speaks of '{word}'. `longstraw config` lists them all.", err=True)
        raise typer.Exit(BAD_CONFIG)
