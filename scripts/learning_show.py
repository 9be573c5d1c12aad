"""Tables and figure of the learning study: as text, in `docs/learning.md` between its markers, as SVG and JSON."""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from learning_runs import (
    CLIPS,
    GROUP,
    PROMPTS_A_STEP,
    TRAIN_SEEDS,
    TUNE_STEPS,
    Run,
    Study,
    accuracies,
    chosen,
    final,
    late_reward,
    steps_of,
    tuning,
    tuning_study,
)
from rich.table import Table

from longstraw.trainer.environment import collect_receipt

PARTS = ("grad_norm/response", "grad_norm/prompt", "grad_cosine")


@dataclass
class Grid:
    """A table of text."""

    title: str
    header: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def rich(self) -> Table:
        table = Table(*self.header, title=self.title)
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        rows = [self.header, ["---"] * len(self.header), *self.rows]
        return f"{self.title}:\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def spread(values: Iterable[float]) -> str:
    """Mean and, in brackets, least to most."""
    numbers = list(values)
    return f"{statistics.fmean(numbers):.2f} ({min(numbers):.2f} to {max(numbers):.2f})"


def by_mode(study: Study, runs: Path) -> dict[str | int, list[Run]]:
    return {mode: [run for run in final(study, runs) if run.mode == mode] for mode in study.modes}


def tuning_grid(study: Study, runs: Path) -> Grid:
    header = [f"{rate:g}, {f'clip {clip:g}' if clip else 'no clip'}" for rate, clip in product(study.rates, CLIPS)]
    grid = Grid(
        f"{study.task} at {study.tokens:,}, tuning: mean reward of steps {TUNE_STEPS // 2 + 1} to {TUNE_STEPS}",
        ["prompt_grad", *header],
    )
    for mode in study.modes:
        rewards = [f"{late_reward(run, runs):.3f}" for run in tuning(study) if run.mode == mode]
        grid.rows.append([str(mode), *rewards])
    return grid


def grids(study: Study, runs: Path) -> Iterator[Grid]:
    """What the final runs gave: rewards, accuracy over length, the gradient's sides."""
    best = chosen(study, runs)
    summary = Grid(
        f"{study.task} at {study.tokens:,}: {study.steps} steps, {len(TRAIN_SEEDS)} seeds, mean (least to most)",
        ["prompt_grad", "learning rate", "clipping", "reward, all steps", "last quarter", "held out at that length"],
    )
    lengths = Grid(f"{study.task} trained at {study.tokens:,}: held-out accuracy by length of prompt", ["prompt_grad"])
    for mode, trained in by_mode(study, runs).items():
        rewards = [[row["reward"] for row in steps_of(run, runs)] for run in trained]
        after = [accuracies(run, runs) for run in trained]
        settings = best[mode]
        summary.rows.append(
            [
                str(mode),
                f"{settings.learning_rate:g}",
                f"{settings.clip:g}" if settings.clip else "off",
                spread(statistics.fmean(values) for values in rewards),
                spread(statistics.fmean(values[-len(values) // 4 :]) for values in rewards),
                spread(values[study.tokens] for values in after),
            ]
        )
        if not lengths.rows:
            lengths.header += [f"{length:,}" for length in after[0]]
            (start,) = (run for run in trained if run.before)
            lengths.rows.append(["before", *(f"{x:.2f}" for x in accuracies(start, runs, before=True).values())])
        means = [statistics.fmean(values[length] for values in after) for length in after[0]]
        lengths.rows.append([str(mode), *(f"{mean:.2f}" for mean in means)])
    yield summary
    yield lengths
    yield _sides(study, runs)


def _sides(study: Study, runs: Path) -> Grid:
    """Of the steps that had a gradient on both sides."""
    grid = Grid(
        f"{study.task} at {study.tokens:,}: norms of the gradient's sides and their cosine, medians over steps, seeds",
        ["prompt_grad", "steps", "response side", "prompt side", "absolute cosine"],
    )
    for mode, trained in by_mode(study, runs).items():
        steps = [row for run in trained for row in steps_of(run, runs) if row.get("grad_cosine") is not None]
        for first, last in ((0, study.steps // 4), (study.steps - study.steps // 4, study.steps)):
            if rows := [row for row in steps if first < row["step"] <= last]:
                response, prompt, cosine = (statistics.median(abs(row[key]) for row in rows) for key in PARTS)
                numbers = (f"{response:.2f}", f"{prompt:.2f}", f"{cosine:.4f}")
                grid.rows.append([str(mode), f"{first + 1} to {last}", *numbers])
    return grid


def write_markdown(path: Path, name: str, shown: Sequence[Grid]) -> None:
    """Puts tables between the markers of that name; the text around them stays.

    Raises:
        ValueError: the file has no such markers.
    """
    begin, end = f"<!-- {name}: written by scripts/learning.py show -->", f"<!-- end of {name} -->"
    text = path.read_text()
    body = "\n".join(grid.markdown() for grid in shown)
    place = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    text, found = place.subn(lambda _: f"{begin}\n\n{body}\n{end}", text)
    if not found:
        raise ValueError(f"{path} has no place for the tables of {name}: add the lines {begin} and {end}")
    path.write_text(text)


def draw(studies: Sequence[Study], runs: Path, path: Path) -> None:
    """Reward against steps, and accuracy against length: a row of two panels a study."""
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure, grid = pyplot.subplots(
        len(studies), 2, figsize=(10, 3.2 * len(studies)), layout="constrained", squeeze=False
    )
    windows = ("#d98c3f", "#5b8fb9")
    for (left, right), study in zip(grid, studies, strict=True):
        colours = {"none": "#b23a48", "full": "#1f3a5f", **dict(zip(study.windows, windows))}
        for mode, trained in by_mode(study, runs).items():
            label = f"last {mode:,}" if isinstance(mode, int) else mode
            smooth = [_smooth([row["reward"] for row in steps_of(run, runs)]) for run in trained]
            columns = list(zip(*smooth, strict=True))
            steps = range(1, len(columns) + 1)
            left.plot(steps, [statistics.fmean(column) for column in columns], color=colours[mode], label=label)
            left.fill_between(steps, *zip(*((min(c), max(c)) for c in columns)), color=colours[mode], alpha=0.15, lw=0)
            after = [accuracies(run, runs) for run in trained]
            columns = [[values[length] for values in after] for length in after[0]]
            right.plot(list(after[0]), [statistics.fmean(c) for c in columns], color=colours[mode], marker="o", ms=3)
            right.fill_between(
                list(after[0]), *zip(*((min(c), max(c)) for c in columns)), color=colours[mode], alpha=0.15, lw=0
            )
            if mode == "none":
                start = next(run for run in trained if run.before)
                before = accuracies(start, runs, before=True)
                right.plot(list(before), list(before.values()), color="grey", ls="--", label="before")
        left.set(
            title=f"{study.task} at {study.tokens:,} tokens",
            xlabel="step",
            ylabel="training reward, mean of 10 steps",
            ylim=(0, 1),
        )
        left.legend(frameon=False, fontsize=8, title="prompt_grad", title_fontsize=8)
        right.axvline(study.tokens, color="grey", lw=0.8, ls=":")
        right.set(title="held out, after training", xlabel="prompt tokens", ylabel="accuracy", ylim=(0, 1.02))
        right.set_xscale("log", base=2)
        right.xaxis.set_major_locator(FixedLocator(list(after[0])))
        right.xaxis.set_minor_locator(NullLocator())
        right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{int(value):,}"))
        right.tick_params(axis="x", labelsize=7)
        right.legend(frameon=False, fontsize=8)
    figure.savefig(path)
    pyplot.close(figure)


def _smooth(values: Sequence[float], width: int = 10) -> list[float]:
    return [statistics.fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def write_receipt(path: Path, studies: Sequence[Study], runs: Path) -> None:
    receipt = {"date": time.strftime("%Y-%m-%d"), **collect_receipt(), "prompts_a_step": PROMPTS_A_STEP, "group": GROUP}
    receipt["studies"] = {study.name: _of_study(study, runs) for study in studies}
    path.write_text(json.dumps(receipt, indent=1) + "\n")


def _of_study(study: Study, runs: Path) -> dict[str, Any]:
    trained = final(study, runs)
    (start,) = (run for run in trained if run.before)
    return {
        "tuning": {
            f"{run.mode} {run.settings}": round(late_reward(run, runs), 4) for run in tuning(tuning_study(study))
        },
        "held_out_rows": study.held_out,
        "accuracy_before": accuracies(start, runs, before=True),
        "runs": [
            {
                "prompt_grad": run.mode,
                "learning_rate": run.settings.learning_rate,
                "max_grad_norm": run.settings.clip,
                "seed": run.seed,
                "reward": [round(row["reward"], 4) for row in steps_of(run, runs)],
                "accuracy": accuracies(run, runs),
                "seconds": round(sum(row["step_time"] for row in steps_of(run, runs))),
                **_where(run, runs),
            }
            for run in trained
        ],
    }


def _where(run: Run, runs: Path) -> dict[str, Any]:
    """Threads and commit of the run's last start."""
    start = json.loads((run.directory(runs) / "environment.json").read_text())["starts"][-1]
    return {"cpu_threads": start["cpu_threads"], "git": start.get("git")}
