"""Does it learn, and what does dropping the prompt's gradient cost? Two embedded tasks, four gradients, equal data.

    python scripts/learning.py tune       # learning rates and clipping, by task and gradient, on a seed of their own
    python scripts/learning.py train      # three other seeds with what did best
    python scripts/learning.py show       # the tables and the figure of docs/learning.md
    python scripts/learning.py rerun      # a run again from nothing, beside what it gave before

Every run is a `longstraw train` of its own with one thread, in a directory of its own under `--runs`; those that are
complete are not run again, and those that were cut short are resumed. `--jobs` of them run side by side.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from longstraw.training.environment import collect_receipt

ROOT = Path(__file__).resolve().parent.parent
TUNE_SEED, TRAIN_SEEDS = 100, (1, 2, 3)
LEARNING_RATES = (2e-4, 4e-4, 8e-4, 1.6e-3)
CLIPS = (1.0, 0.0)  # 0 is off
TUNE_STEPS = 60
PROMPTS_A_STEP, GROUP = 8, 16
# Rows by length: as many as keep the reading of all lengths shorter than the training.
EVALUATED = {128: 64, 256: 64, 512: 64, 1024: 64, 2048: 64, 4096: 32, 8192: 16, 16384: 8}
HELD_OUT_ROWS = 128  # at the length of training


@dataclass(frozen=True)
class Study:
    """One task at one length of prompts.

    Attributes:
        task: a module of `longstraw.tasks`.
        tokens: of every training prompt.
        windows: what `prompt_grad` takes beside "none" and "full"; of the length it was tuned at the same shares.
        steps: optimizer steps of the final runs.
        tuned_at: the length whose tuning this study goes by.
    """

    task: str
    tokens: int
    windows: tuple[int, ...]
    steps: int
    tuned_at: int

    @property
    def name(self) -> str:
        return f"{self.task}-{self.tokens}"

    @property
    def modes(self) -> tuple[str | int, ...]:
        return ("none", *self.windows, "full")


STUDIES = (
    Study("marked", 1024, (128, 512), 80, 1024),
    Study("recall", 2048, (256, 1024), 80, 2048),
    Study("recall", 4096, (), 40, 2048),
)


@dataclass(frozen=True)
class Settings:
    """What is tuned. `clip` 0 is off."""

    learning_rate: float
    clip: float

    def __str__(self) -> str:
        return f"lr{self.learning_rate:g}-clip{self.clip:g}"


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        mode: `prompt_grad`.
        seed: of prompts, their order and samples.
        evaluates: held-out accuracy at the end.
        before: held-out accuracy of the untrained model too.
    """

    study: Study
    mode: str | int
    settings: Settings
    seed: int
    steps: int
    evaluates: bool = False
    before: bool = False

    def directory(self, runs: Path) -> Path:
        kind = "train" if self.evaluates else "tune"
        return runs / kind / self.study.name / str(self.mode) / str(self.settings) / f"seed{self.seed}"

    def configuration(self) -> dict[str, Any]:
        source = f"longstraw.tasks.{self.study.task}"

        def prompts(rows: int, tokens: int, seed: int) -> dict[str, Any]:
            arguments = {"num_rows": rows, "prompt_tokens": tokens, "seed": seed}
            return {"source": f"{source}:prompts", "args": arguments}

        held_out = {
            f"at_{tokens}": {**prompts(rows, tokens, 0), "num_samples": rows}
            for tokens, rows in (EVALUATED | {self.study.tokens: HELD_OUT_ROWS}).items()
        }
        return {
            "model": "package:longstraw.tasks/assets/recall",
            "dataset": prompts(self.steps * PROMPTS_A_STEP, self.study.tokens, self.seed),
            "reward_funcs": f"{source}:reward",
            "eval": dict(sorted(held_out.items(), key=lambda item: int(item[0][3:]))) if self.evaluates else {},
            "eval_on_start": self.before,
            "prompt_grad": self.mode,
            "segment_tokens": 1024,
            "prompts_per_step": PROMPTS_A_STEP,
            "num_generations": GROUP,
            "max_completion_length": 1,
            "loss_type": "grpo",
            "learning_rate": self.settings.learning_rate,
            "lr_scheduler_type": "constant",
            "max_grad_norm": self.settings.clip,
            "max_steps": self.steps,
            "save_steps": 20,
            "save_total_limit": 1,
            "log_completions": False,
            "seed": self.seed,
        } | ({"log_gradient_parts": True} if self.evaluates else {})


def tuning(study: Study) -> list[Run]:
    grid = product(study.modes, LEARNING_RATES, CLIPS)
    return [Run(study, mode, Settings(rate, clip), TUNE_SEED, TUNE_STEPS) for mode, rate, clip in grid]


def tuning_study(study: Study) -> Study:
    return next(other for other in STUDIES if (other.task, other.tokens) == (study.task, study.tuned_at))


def final(study: Study, runs: Path) -> list[Run]:
    best = chosen(study, runs)
    return [
        Run(study, mode, best[mode], seed, study.steps, True, before=(mode, seed) == ("none", TRAIN_SEEDS[0]))
        for seed, mode in product(TRAIN_SEEDS, study.modes)
    ]


def chosen(study: Study, runs: Path) -> dict[str | int, Settings]:
    """For each gradient the settings with the highest mean reward over the second half of the tuning's steps."""
    tuned = tuning_study(study)
    best: dict[str | int, Settings] = {}
    for mode in study.modes:
        tuned_mode = mode * tuned.tokens // study.tokens if isinstance(mode, int) else mode
        tried = [run for run in tuning(tuned) if run.mode == tuned_mode]
        missing = [run for run in tried if not complete(run, runs)]
        if missing:
            raise SystemExit(f"error: {len(missing)} runs of {tuned.name} are not tuned yet. Run `tune` first.")
        best[mode] = max(tried, key=lambda run: late_reward(run, runs)).settings
    return best


def late_reward(run: Run, runs: Path) -> float:
    rewards = [row["reward"] for row in steps_of(run, runs)]
    return statistics.fmean(rewards[len(rewards) // 2 :])


def rows_of(run: Run, runs: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.directory(runs) / "metrics.jsonl").read_text().splitlines()]


def steps_of(run: Run, runs: Path) -> list[dict[str, Any]]:
    return [row for row in rows_of(run, runs) if "reward" in row]


def accuracies(run: Run, runs: Path, before: bool = False) -> dict[int, float]:
    """Held-out accuracy by length of prompt, after training or before."""
    (row,) = [row for row in rows_of(run, runs) if row["step"] == (0 if before else run.steps) and "reward" not in row]
    found = {int(key.split("/")[1][3:]): value for key, value in row.items() if key.endswith("/reward")}
    return dict(sorted(found.items()))


def complete(run: Run, runs: Path) -> bool:
    return (run.directory(runs) / "final").exists()


def execute(run: Run, runs: Path) -> None:
    """Trains; raises RuntimeError with what it printed where it fails."""
    directory = run.directory(runs)
    command = [sys.executable, "-m", "longstraw.cli", "train"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        if (directory / "config.yaml").exists():
            command += [str(directory), "--resume"]
        else:
            file = Path(folder, "run.yaml")
            file.write_text(yaml.safe_dump(run.configuration() | {"output_dir": str(directory)}, sort_keys=False))
            command.append(str(file))
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{directory} failed:\n{(done.stdout + done.stderr)[-2000:]}")


def execute_all(wanted: Sequence[Run], runs: Path, jobs: int) -> None:
    left = [run for run in wanted if not complete(run, runs)]
    with Progress() as progress, ThreadPoolExecutor(jobs) as pool:
        bar = progress.add_task(f"{len(wanted) - len(left)} of {len(wanted)} runs were there", total=len(left))

        def one(run: Run) -> None:
            begin = time.perf_counter()
            execute(run, runs)
            progress.advance(bar)
            progress.console.print(f"{run.directory(runs).relative_to(runs)}: {time.perf_counter() - begin:.0f} s")

        for future in [pool.submit(one, run) for run in left]:
            future.result()


def spread(values: Iterable[float]) -> str:
    """Mean and, in brackets, least to most."""
    numbers = list(values)
    return f"{statistics.fmean(numbers):.2f} ({min(numbers):.2f} to {max(numbers):.2f})"


def by_mode(study: Study, runs: Path) -> dict[str | int, list[Run]]:
    return {mode: [run for run in final(study, runs) if run.mode == mode] for mode in study.modes}


def tables(study: Study, runs: Path) -> Iterator[Table]:
    best = chosen(study, runs)
    summary = Table(title=f"{study.task}, {study.tokens:,} tokens, {study.steps} steps, {len(TRAIN_SEEDS)} seeds")
    for column in ("prompt_grad", "learning rate", "clipping", "reward, all steps", "last quarter", "held out"):
        summary.add_column(column)
    lengths = Table(title=f"{study.task}, trained at {study.tokens:,}: held-out accuracy by length of prompt")
    lengths.add_column("prompt_grad")
    for mode, trained in by_mode(study, runs).items():
        rewards = [[row["reward"] for row in steps_of(run, runs)] for run in trained]
        after = [accuracies(run, runs) for run in trained]
        clip = best[mode].clip
        summary.add_row(
            str(mode),
            f"{best[mode].learning_rate:g}",
            f"{clip:g}" if clip else "off",
            spread(statistics.fmean(values) for values in rewards),
            spread(statistics.fmean(values[-len(values) // 4 :]) for values in rewards),
            spread(values[study.tokens] for values in after),
        )
        if len(lengths.columns) == 1:
            for length in after[0]:
                lengths.add_column(f"{length:,}", justify="right")
            start = next(run for run in trained if run.before)
            lengths.add_row("before", *(f"{value:.2f}" for value in accuracies(start, runs, before=True).values()))
        pooled = [statistics.fmean(values[length] for values in after) for length in after[0]]
        lengths.add_row(str(mode), *(f"{value:.2f}" for value in pooled))
    yield summary
    yield lengths
    yield _gradient_table(study, runs)


def _gradient_table(study: Study, runs: Path) -> Table:
    table = Table(title=f"{study.task}, {study.tokens:,}: gradient norms by side, medians over steps with a gradient")
    for column in ("prompt_grad", "steps", "response side", "prompt side", "cosine"):
        table.add_column(column)
    for mode, trained in by_mode(study, runs).items():
        parts = gradient_parts(trained, runs)
        for first, last in ((0, study.steps // 4), (study.steps - study.steps // 4, study.steps)):
            rows = [row for row in parts if first < row["step"] <= last]
            if mode == "none" or not rows:
                continue
            middle = [statistics.median(row[key] for row in rows) for key in PARTS]
            table.add_row(str(mode), f"{first + 1} to {last}", *(f"{value:.2f}" for value in middle))
    return table


PARTS = ("grad_norm/response", "grad_norm/prompt", "grad_cosine")


def gradient_parts(trained: Sequence[Run], runs: Path) -> list[dict[str, Any]]:
    """Rows of the steps that had a gradient on both sides."""
    rows = [row for run in trained for row in steps_of(run, runs)]
    return [row for row in rows if row.get("grad_cosine") is not None]


def draw(studies: Sequence[Study], runs: Path, path: Path) -> None:
    """Reward against steps, and accuracy against length: a row of two panels a study."""
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure, grid = pyplot.subplots(
        len(studies), 2, figsize=(10, 3.2 * len(studies)), layout="constrained", squeeze=False
    )
    colours = dict(zip(range(4), ("#b23a48", "#d98c3f", "#5b8fb9", "#1f3a5f")))
    for (left, right), study in zip(grid, studies, strict=True):
        for place, (mode, trained) in enumerate(by_mode(study, runs).items()):
            label = f"last {mode:,}" if isinstance(mode, int) else mode
            smooth = [_smooth([row["reward"] for row in steps_of(run, runs)]) for run in trained]
            columns = list(zip(*smooth, strict=True))
            steps = range(1, len(columns) + 1)
            left.plot(steps, [statistics.fmean(column) for column in columns], color=colours[place], label=label)
            left.fill_between(steps, *zip(*((min(c), max(c)) for c in columns)), color=colours[place], alpha=0.15, lw=0)
            after = [accuracies(run, runs) for run in trained]
            columns = [[values[length] for values in after] for length in after[0]]
            right.plot(list(after[0]), [statistics.fmean(c) for c in columns], color=colours[place], marker="o", ms=3)
            right.fill_between(
                list(after[0]), *zip(*((min(c), max(c)) for c in columns)), color=colours[place], alpha=0.15, lw=0
            )
            if place == 0:
                start = next(run for run in trained if run.before)
                before = accuracies(start, runs, before=True)
                right.plot(list(before), list(before.values()), color="grey", ls="--", label="before")
        left.set(title=f"{study.task} at {study.tokens:,} tokens", xlabel="step", ylabel="training reward", ylim=(0, 1))
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


def receipt(studies: Sequence[Study], runs: Path) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        **collect_receipt(),
        "prompts_a_step": PROMPTS_A_STEP,
        "group": GROUP,
        "held_out_rows": EVALUATED,
        "studies": {
            study.name: {
                "tuning": {
                    f"{run.mode} {run.settings}": round(late_reward(run, runs), 4)
                    for run in tuning(tuning_study(study))
                },
                "runs": [
                    {
                        "prompt_grad": run.mode,
                        "learning_rate": run.settings.learning_rate,
                        "max_grad_norm": run.settings.clip,
                        "seed": run.seed,
                        "reward": [round(row["reward"], 4) for row in steps_of(run, runs)],
                        "accuracy": accuracies(run, runs),
                        "seconds": round(sum(row["step_time"] for row in steps_of(run, runs))),
                    }
                    for run in final(study, runs)
                ],
            }
            for study in studies
        },
    }


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
    console = Console()
    for study in wanted:
        table = Table(title=f"{study.name}: mean reward of steps {TUNE_STEPS // 2 + 1} to {TUNE_STEPS}")
        table.add_column("prompt_grad")
        for rate, clip in product(LEARNING_RATES, CLIPS):
            table.add_column(f"{rate:g}, {'clipped at ' + format(clip, 'g') if clip else 'not clipped'}")
        for mode in study.modes:
            rewards = [f"{late_reward(run, runs):.3f}" for run in tuning(study) if run.mode == mode]
            table.add_row(str(mode), *rewards)
        console.print(table)


@app.command()
def train(studies: Studies = "", runs: Runs = RUNS, jobs: Jobs = NUM_JOBS) -> None:
    """The final runs: three seeds of every gradient with its best settings."""
    for study in _studies(studies):
        execute_all(final(study, runs), runs, jobs)
    show(studies, runs)


@app.command()
def show(
    studies: Studies = "",
    runs: Runs = RUNS,
    out: Annotated[Path, typer.Option(help="OUT.svg and OUT.json.")] = ROOT / "docs" / "figures" / "learning",
) -> None:
    """Tables of the runs that are complete; with all of them, the figure and the receipt."""
    console = Console(width=130)
    tuned = [s for s in _studies(studies) if all(complete(run, runs) for run in tuning(tuning_study(s)))]
    ready = [study for study in tuned if all(complete(run, runs) for run in final(study, runs))]
    for study in ready:
        for table in tables(study, runs):
            console.print(table)
    if ready:
        draw(ready, runs, out.with_suffix(".svg"))
        out.with_suffix(".json").write_text(json.dumps(receipt(ready, runs), indent=1) + "\n")
        console.print(f"written: {out}.svg, {out}.json")


@app.command()
def rerun(
    study: Annotated[str, typer.Option(help="As recall-2048.")] = STUDIES[0].name,
    mode: Annotated[str, typer.Option(help="prompt_grad")] = "full",
    seed: Annotated[int, typer.Option(help="One of the final runs' seeds.")] = TRAIN_SEEDS[0],
    runs: Runs = RUNS,
) -> None:
    """A final run again, from nothing, and whether it lands inside the spread of its three seeds."""
    (found,) = _studies(study)
    trained = by_mode(found, runs)[int(mode) if mode.isdecimal() else mode]
    (run,) = [run for run in trained if run.seed == seed]
    with tempfile.TemporaryDirectory() as folder:
        execute(run, Path(folder))
        again, value = accuracies(run, Path(folder)), late_reward(run, Path(folder))
    before = accuracies(run, runs)
    print(f"held out at {found.tokens:,}: {again[found.tokens]:.3f}, was {before[found.tokens]:.3f}")
    print(f"seeds: {spread(accuracies(run, runs)[found.tokens] for run in trained)}")
    print(f"mean reward of the second half: {value:.4f}, was {late_reward(run, runs):.4f}")


if __name__ == "__main__":
    app()
