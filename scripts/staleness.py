"""How stale does a captured prompt get? A table for your model, and the cheap probe beside the oracle.

    python scripts/staleness.py [CONFIG.yaml] [KEY=VALUE ...] [--steps 8] [--prompts 4] [--rounds 1] [--out staleness]

Takes a training configuration (without one, the embedded task). A round samples responses to `--prompts` prompts, then
takes `--steps` optimizer steps on them, each with the exact gradient on fresh captures, and keeps the first captures
aside. After every step it compares, prompt by prompt, the kept state with a fresh one under the same parameters: GRPO
loss and mean absolute log-probability difference (the oracle), and what `Engine.drift` says at a fraction of the price
(the probe). The learning rate is the configuration's, constant, without warm-up: what its steps at the peak do.

It writes OUT.csv (a row a prompt and step), OUT.json (the table, rank correlations, what it was measured with) and,
where matplotlib is installed, OUT.svg (probe against oracle).
"""

import argparse
import csv
import importlib.resources
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from longstraw.config.load import config_to_yaml, load_config
from longstraw.config.train import TrainConfig
from longstraw.studies.staleness import Measurement, study
from longstraw.trainer.build import build_trainer
from longstraw.trainer.environment import collect_receipt
from longstraw.trainer.report import Reporter, quiet_transformers
from longstraw.trainer.rng import seed_everything
from longstraw.trainer.run_dir import RunDir

PAPER_STEPS = (1, 2, 4, 8)
TABLE_COLUMNS = {
    "steps": ("steps since capture", "{:d}"),
    "loss_difference_percent": ("loss difference, %", "{:.3g}"),
    "loss_difference": ("absolute", "{:.2e}"),
    "logp_difference": ("mean abs log-prob difference", "{:.3g}"),
    "probe": ("probe", "{:.3g}"),
    "probe_cost_percent": ("its cost, % of a capture", "{:.0f}"),
}

CUTS = {
    "same_prompt": ("over the ages of one prompt (mean)", lambda m: (m.round, m.row)),
    "same_age": ("between prompts of one age (mean)", lambda m: (m.round, m.steps)),
}


def table(measurements: Sequence[Measurement], steps_shown: Sequence[int] = PAPER_STEPS) -> list[dict[str, float]]:
    """The paper's table: a row a number of steps, losses summed over a round's prompts, all else a mean."""
    rows = []
    for steps in sorted({m.steps for m in measurements} & set(steps_shown)):
        chosen = [m for m in measurements if m.steps == steps]
        rounds = [[m for m in chosen if m.round == number] for number in sorted({m.round for m in chosen})]
        kept, fresh = (
            np.array([sum(getattr(m, name) for m in entries) for entries in rounds])
            for name in ("loss_kept", "loss_fresh")
        )
        rows.append(
            {
                "steps": steps,
                "loss_difference_percent": float(100 * np.mean(np.abs(kept - fresh) / np.abs(fresh))),
                "loss_difference": float(np.mean(np.abs(kept - fresh))),
                "logp_difference": float(np.mean([m.logp_difference for m in chosen])),
                "probe": float(np.mean([m.probe for m in chosen])),
                "probe_cost_percent": 100
                * sum(m.probe_seconds for m in chosen)
                / sum(m.capture_seconds for m in chosen),
            }
        )
    return rows


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's: Pearson's of the ranks, ties sharing theirs. None where a side does not vary."""
    ranks = [_ranks(np.asarray(values, dtype=float)) for values in (one, other)]
    if len(one) < 2 or any(np.ptp(side) == 0 for side in ranks):
        return None
    return float(np.corrcoef(*ranks)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def correlations(measurements: Sequence[Measurement]) -> dict[str, float | None]:
    """Probe against the log-probability difference: over everything; and means over cuts of it, by `CUTS`."""

    def of(chosen: Sequence[Measurement]) -> float | None:
        return rank_correlation([m.probe for m in chosen], [m.logp_difference for m in chosen])

    found = {"all": of(measurements)}
    for name, (_, key) in CUTS.items():
        cuts: dict[Any, list[Measurement]] = {}
        for measurement in measurements:
            cuts.setdefault(key(measurement), []).append(measurement)
        known = [value for value in map(of, cuts.values()) if value is not None]
        found[name] = sum(known) / len(known) if known else None
    return found


def plot(path: Path, measurements: Sequence[Measurement], correlation: float | None) -> None:
    """Probe against oracle, one dot a prompt and step, coloured by age."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(6, 4.2), layout="constrained")
    dots = axes.scatter(
        [m.probe for m in measurements],
        [m.logp_difference for m in measurements],
        c=[m.steps for m in measurements],
        cmap="viridis",
        s=18,
    )
    figure.colorbar(dots, label="optimizer steps since capture")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xlabel("probe: relative L2 distance of recomputed segments")
    axes.set_ylabel("oracle: mean abs log-prob difference")
    if correlation is not None:
        axes.set_title(f"rank correlation {correlation:.3f}, {len(measurements)} points", fontsize=10)
    figure.savefig(path)
    pyplot.close(figure)


def configuration(arguments: argparse.Namespace) -> TrainConfig:
    """The user's configuration, turned to rounds of steps on the same responses."""
    words = list(arguments.config)
    path = Path(words.pop(0)) if words and "=" not in words[0] else None
    words += [
        f"prompts_per_step={arguments.prompts}", f"num_iterations={arguments.steps}",
        f"max_steps={arguments.steps * arguments.rounds}", "gradient_accumulation_steps=1", "refresh=always",
        "dynamic_sampling=false", "lr_scheduler_type=constant", "lr_scheduler_kwargs={}", "warmup_steps=0", "eval={}",
        "eval_steps=null", "retain_graph_bytes=0",
    ]  # fmt: skip
    if path is not None:
        sys.path[:0] = [str(path.parent.resolve()), str(Path.cwd())]
        return load_config(path, words)
    with importlib.resources.as_file(importlib.resources.files("longstraw.tasks") / "default.yaml") as default:
        return load_config(default, words)


def main(words: Sequence[str] | None = None) -> None:
    """Run the study and print its table; a configuration that cannot be used exits with a message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="*", metavar="CONFIG.yaml | KEY=VALUE")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps a round")
    parser.add_argument("--prompts", type=int, default=4, help="prompts a round; twice their states are held at once")
    parser.add_argument("--rounds", type=int, default=1, help="rounds; each with new prompts, from where training is")
    parser.add_argument("--segments", type=int, default=2, help="random segments that the probe recomputes")
    parser.add_argument("--out", type=Path, default=Path("staleness"), help="path of the files, without a suffix")
    arguments = parser.parse_args(words)
    try:
        run(arguments)
    except ValueError as error:
        sys.exit(f"error: {error}")


def run(arguments: argparse.Namespace) -> None:
    """The study as the arguments say."""
    begin = time.perf_counter()
    console = Console()
    quiet_transformers()
    config = configuration(arguments)
    seed_everything(config.seed)
    with tempfile.TemporaryDirectory() as folder:  # where a trainer would look for its past
        trainer = build_trainer(config, RunDir(Path(folder)), Reporter(console, 1))
        measurements = []
        with console.status("sampling") as status:
            for measured in study(trainer, arguments.rounds, arguments.segments):
                measurements.append(measured)
                status.update(f"round {measured.round + 1}, step {measured.steps}, dataset row {measured.row}")
    rows, ranked = table(measurements), correlations(measurements)
    write(arguments.out, config, measurements, rows, ranked, time.perf_counter() - begin)
    shown = Table(*(title for title, _ in TABLE_COLUMNS.values()), title="A kept state against a fresh capture")
    for row in rows:
        shown.add_row(*(form.format(row[name]) for name, (_, form) in TABLE_COLUMNS.items()))
    console.print(shown)
    for name, value in ranked.items():
        text = CUTS[name][0] if name in CUTS else "over all points"
        console.print(f"rank correlation of probe and oracle {text}: {'–' if value is None else f'{value:.3f}'}")
    console.print(f"{time.perf_counter() - begin:.0f} s; written: {arguments.out}.csv, .json, .svg")


def write(
    out: Path,
    config: TrainConfig,
    measurements: Sequence[Measurement],
    rows: Sequence[dict[str, float]],
    ranked: dict[str, float | None],
    seconds: float,
) -> None:
    """OUT.csv, OUT.json and, with matplotlib, OUT.svg."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(measurements[0])))
        writer.writeheader()
        writer.writerows(asdict(measurement) for measurement in measurements)
    receipt: dict[str, Any] = {"table": rows, "rank_correlation": ranked, "seconds": seconds, **collect_receipt()}
    receipt["date"] = time.strftime("%Y-%m-%d")
    receipt["config"] = config_to_yaml(config)
    out.with_suffix(".json").write_text(json.dumps(receipt, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib"):
        plot(out.with_suffix(".svg"), measurements, ranked["all"])


if __name__ == "__main__":
    main()
