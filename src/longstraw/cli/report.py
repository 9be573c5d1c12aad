"""`longstraw report`: one HTML page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longstraw.cli.errors import reported_errors


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory, finished or not.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where to write; default: RUN_DIR/report.html.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Make one self-contained HTML page of a run: rewards, lengths, KL, clipping, time, memory, samples, and gaps."""
    with reported_errors(debug):
        from longstraw.audit.page import write_report

        typer.echo(f"The report is in {write_report(run_dir, out)}; it opens in any browser, without a network.")
