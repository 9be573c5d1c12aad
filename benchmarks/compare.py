"""Side by side: shared-prefix and conventional training, TRL, and the engine, over prompt lengths and group sizes.

    python -m benchmarks.compare                       # the whole grid: hours; Ctrl-C and go on later
    python -m benchmarks.compare --prompts 2048 --groups 2,8
    python -m benchmarks.compare --list                # what is still to be measured, with an estimate
    python -m benchmarks.compare --budget 30           # start nothing more after 30 minutes
    python -m benchmarks.compare --again full          # measure one contestant anew

Every measurement is a fresh process; rows are kept under `runs/compare` and found again. Each gradient is compared with
conventional autograd's at full size. A row whose gradient is wrong shows no speed, nothing is written to `docs`, and
the exit code is 1. Table and plot go to `docs/benchmarks.md` and `docs/figures`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import receipt
from benchmarks.gate import ALLOWED
from benchmarks.grid import PIECES, Contestant, Grid, contestants, wrong
from benchmarks.measure import ROOT
from benchmarks.options import numbers
from benchmarks.workload import Workload


def main(
    prompts: Annotated[str, typer.Option(help="Prompt lengths, comma-separated.")] = "2048,4096,8192,16384,32768",
    groups: Annotated[str, typer.Option(help="Group sizes, comma-separated.")] = "2,4,8,16",
    response: Annotated[int, typer.Option(help="Tokens of a response.")] = 256,
    only: Annotated[str, typer.Option(help="Contestants, comma-separated; all by default.")] = "",
    again: Annotated[list[str] | None, typer.Option(help="Measure this contestant anew.")] = None,
    budget: Annotated[float | None, typer.Option(help="Minutes after which nothing new is started.")] = None,
    cache: Annotated[Path, typer.Option(help="Where rows are kept.")] = ROOT / "runs" / "compare",
    docs: Annotated[Path, typer.Option(help="Where table and plot are written.")] = ROOT / "docs",
    list_only: Annotated[bool, typer.Option("--list", help="Show what is missing and stop.")] = False,
) -> None:
    """Seconds and peak memory of one gradient step, method by method, after a correctness gate."""
    console = Console()
    columns = _chosen(only)
    unknown = set(again or ()) - {column.name for column in columns}
    if unknown:
        raise typer.BadParameter(f"unknown contestant {', '.join(sorted(unknown))}", param_hint="--again")
    lengths, sizes = numbers("--prompts", prompts), numbers("--groups", groups)
    points = [Workload(prompt=p, group=g, response=response) for p in lengths for g in sizes]
    grid = Grid(cache, points, columns)
    if list_only:
        _list(grid, console)
        return
    for point in points:
        for column in columns:
            if column.name in (again or ()):
                column.path(cache, point).unlink(missing_ok=True)
    failures = _run(grid, console, None if budget is None else time.monotonic() + 60 * budget)
    _report(grid, console, docs, failures)


def _run(grid: Grid, console: Console, deadline: float | None) -> dict[str, str]:
    failures: dict[str, str] = {}
    for point in grid.points:
        for column in grid.missing(point):
            label = f"{column.name}, prompt {point.prompt}, group {point.group}"
            if deadline is not None and time.monotonic() > deadline:
                console.print("The budget is spent; run the command again to go on.")
                return failures
            if column.reference in failures and column.name != column.reference:
                continue
            try:
                row = grid.fill(column, point)
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[-1]
                failures[column.name] = reason
                console.print(f"{label}: failed: {reason}", style="red", markup=False)
                continue
            distance = row.get("relative_l2_error")
            verdict = "reference" if distance is None else f"error {distance:.1e}{' WRONG' if wrong(row) else ''}"
            console.print(f"{label}: {verdict}", highlight=False)
    return failures


def _report(grid: Grid, console: Console, docs: Path, failures: dict[str, str]) -> None:
    from benchmarks import figures

    table = {(c.name, p.prompt, p.group): grid.row(c, p) for c in grid.columns for p in grid.points}
    rows = {key: row for key, row in table.items() if row is not None}
    bad = [key for key, row in rows.items() if wrong(row)]
    shown = {key: row for key, row in rows.items() if key not in bad}
    for name, prompt, group in bad:
        console.print(f"{name}, prompt {prompt}, group {group}: WRONG gradient, no speed shown", style="bold red")
    titles = {column.name: column.title for column in grid.columns}
    console.print(figures.markdown(titles, shown), markup=False, highlight=False)
    if bad:
        raise typer.Exit(1)
    if shown:
        report = {
            "benchmark": "compare",
            "config": {"response": grid.points[0].response, "dtype": "float32", "engine": PIECES, "model": "llama"},
            "allowed_relative_l2_error": ALLOWED,
            "rows": [
                {"contestant": name, "prompt": prompt, "group": group, **row}
                for (name, prompt, group), row in shown.items()
            ],
        }
        receipt.write(docs / "figures" / "comparison.json", report)
        figures.write(docs, titles, shown)
        console.print(f"written: {docs / 'benchmarks.md'}, {docs / 'figures'}")
    for name, reason in failures.items():
        console.print(f"not measured: {name}: {reason}", style="yellow", markup=False)
    if failures:
        raise typer.Exit(1)


def _list(grid: Grid, console: Console) -> None:
    total = 0.0
    for point in grid.points:
        missing = grid.missing(point)
        seconds = sum(column.estimate(point) for column in missing)
        total += seconds
        if missing:
            names = ", ".join(column.name for column in missing)
            label = f"prompt {point.prompt}, group {point.group}"
            console.print(f"{label}: about {seconds:.0f} s: {names}", highlight=False)
    console.print(f"in all about {total / 60:.0f} minutes on two cores", highlight=False)


def _chosen(only: str) -> list[Contestant]:
    columns = contestants()
    if not only:
        return columns
    names = [name.strip() for name in only.split(",")]
    unknown = set(names) - {column.name for column in columns}
    if unknown:
        known = ", ".join(column.name for column in columns)
        raise typer.BadParameter(f"unknown {', '.join(sorted(unknown))}; there are {known}", param_hint="--only")
    return [column for column in columns if column.name in names or column.name == "conventional"]


if __name__ == "__main__":
    typer.run(main)
