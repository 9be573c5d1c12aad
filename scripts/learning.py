"""Does it learn, and what does dropping the prompt's gradient cost? Two embedded tasks, four gradients, equal data.

    python scripts/learning.py tune       # learning rates and clipping, by task and gradient, on a seed of their own
    python scripts/learning.py train      # three other seeds with what did best
    python scripts/learning.py show       # the tables and the figure of docs/learning.md
    python scripts/learning.py rerun      # a run again from nothing, beside what it gave before

Every run is a `longstraw train` of its own with one thread, in a directory of its own under `--runs`; those that are
complete are not run again, and those that were cut short are resumed. `--jobs` of them run side by side.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from learning_runs import (
    STUDIES,
    TRAIN_SEEDS,
    Study,
    accuracies,
    complete,
    execute,
    execute_all,
    final,
    tuning,
    tuning_study,
)
from learning_show import draw, grids, spread, tuning_grid, write_markdown, write_receipt
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent


def _studies(names: str) -> list[Study]:
    known = {study.name: study for study in STUDIES}
    unknown = [name for name in names.split(",") if name and name not in known]
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: choose among {', '.join(known)}", param_hint="--studies")
    return [known[name] for name in names.split(",") if name] or list(STUDIES)


app = typer.Typer(help=__doc__, add_completion=False, rich_markup_mode=None)
Studies = Annotated[str, typer.Option("--studies", help="Comma-separated, as recall-2048; all without it.")]
Runs = Annotated[Path, typer.Option("--runs", help="Where the runs' directories are.")]
Jobs = Annotated[int, typer.Option("--jobs", help="Runs side by side, one thread each.", min=1)]
RUNS = ROOT / "runs" / "learning"
NUM_JOBS = os.cpu_count() or 1


@app.command()
def tune(studies: Studies = "", runs: Runs = RUNS, jobs: Jobs = NUM_JOBS) -> None:
    """Every gradient with every learning rate, clipped and not."""
    wanted = [study for study in _studies(studies) if study.tokens == study.tuned_at]
    execute_all([run for study in wanted for run in tuning(study)], runs, jobs)
    console = Console(width=130)
    for study in wanted:
        console.print(tuning_grid(study, runs).rich())


@app.command()
def train(studies: Studies = "", runs: Runs = RUNS, jobs: Jobs = NUM_JOBS) -> None:
    """The final runs: three seeds of every gradient with its best settings."""
    for study in _studies(studies):
        execute_all(final(study, runs), runs, jobs)


@app.command()
def show(
    runs: Runs = RUNS,
    docs: Annotated[Path, typer.Option(help="Where learning.md and figures/ are.")] = ROOT / "docs",
) -> None:
    """Tables of what is complete; once all is, also into DOCS/learning.md, figure and receipt into DOCS/figures."""
    console = Console(width=150)
    tuned = [s for s in STUDIES if all(complete(run, runs) for run in tuning(tuning_study(s)))]
    ready = [study for study in tuned if all(complete(run, runs) for run in final(study, runs))]
    shown = {}
    for study in ready:
        own_tuning = [tuning_grid(study, runs)] if study == tuning_study(study) else []
        shown[study.name] = [*own_tuning, *grids(study, runs)]
        for grid in shown[study.name]:
            console.print(grid.rich())
    if missing := [study.name for study in STUDIES if study not in ready]:
        console.print(f"not complete, so nothing is written: {', '.join(missing)}")
        return
    for name, tables in shown.items():
        write_markdown(docs / "learning.md", name, tables)
    draw(ready, runs, docs / "figures" / "learning.svg")
    write_receipt(docs / "figures" / "learning.json", ready, runs)
    console.print(f"written: {docs}/learning.md, figures/learning.svg, figures/learning.json")


@app.command()
def rerun(
    study: Annotated[str, typer.Option(help="As recall-2048.")] = STUDIES[0].name,
    mode: Annotated[str, typer.Option(help="prompt_grad")] = "full",
    seed: Annotated[int, typer.Option(help="One of the final runs' seeds.")] = TRAIN_SEEDS[0],
    runs: Runs = RUNS,
) -> None:
    """A final run again, from nothing, and whether it lands inside the spread of its seeds."""
    (found,) = _studies(study)
    trained = [run for run in final(found, runs) if str(run.mode) == mode]
    same = [run for run in trained if run.seed == seed]
    if not same or not all(complete(run, runs) for run in trained):
        raise ValueError(f"{study} has no complete runs with prompt_grad {mode}, among them one of seed {seed}")
    before = [accuracies(run, runs)[found.tokens] for run in trained]
    with tempfile.TemporaryDirectory() as folder:
        execute(same[0], Path(folder))
        again = accuracies(same[0], Path(folder))[found.tokens]
    inside = min(before) <= again <= max(before)
    print(
        f"held out at {found.tokens:,} tokens: {again:.3f}, in {study}'s runs with prompt_grad {mode} {spread(before)}"
    )
    print("inside the spread" if inside else "OUTSIDE the spread")
    raise typer.Exit(0 if inside else 1)


def main() -> None:
    try:
        app()
    except (RuntimeError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
