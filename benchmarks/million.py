"""A million tokens of real text on this machine: one GRPO step, pages on disk, private memory under 2 GB.

    python -m benchmarks.million                    # 1,048,576 tokens, `none` and `full`
    python -m benchmarks.million --curve            # 64K to 512K, with fitted exponents; others with --lengths
    python -m benchmarks.million --tokens 65536 --modes none

First the gate: on the same model and text, at a prompt short enough for it, both gradients against conventional
autograd. Then every run in a process of its own. Rows are kept under `runs/million` and found again.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import receipt
from benchmarks.gate import ALLOWED, relative_error
from benchmarks.measure import ROOT, Spec, measure
from benchmarks.options import numbers
from benchmarks.workload import TextWorkload, topics

LIMIT = 2 * 10**9  # private resident bytes of the whole process
CURVE = "65536,131072,262144,524288"
REFERENCES = {"none": "constant_prompt", "full": "conventional"}


def main(
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt.", min=2)] = 1 << 20,
    modes: Annotated[str, typer.Option(help="prompt_grad, comma-separated.")] = "none,full",
    group: Annotated[int, typer.Option(help="Responses of 256 tokens.", min=2)] = 4,
    curve: Annotated[bool, typer.Option("--curve", help="Several lengths instead, with fitted exponents.")] = False,
    lengths: Annotated[str, typer.Option(help="Those lengths, comma-separated.")] = CURVE,
    segment_tokens: Annotated[int, typer.Option(help="The engine's segment_tokens.")] = 8192,
    page_dir: Annotated[Path | None, typer.Option(help="Where page files go; has to be a disk.")] = None,
    gate_tokens: Annotated[int, typer.Option(help="Prompt of the gate.")] = 4096,
    again: Annotated[bool, typer.Option("--again", help="Measure anew what has been measured.")] = False,
    cache: Annotated[Path, typer.Option(help="Where rows are kept.")] = ROOT / "runs" / "million",
    out: Annotated[Path | None, typer.Option(help="Write the receipt here.")] = None,
) -> None:
    """Phases, bytes and seconds of one step on a prompt of real text."""
    console = Console()
    console.width = max(console.width, 110)
    names = [name.strip() for name in modes.split(",")]
    if set(names) - set(REFERENCES):
        raise typer.BadParameter('choose among "none" and "full"', param_hint="--modes")
    prompts = numbers("--lengths", lengths) if curve else [tokens]
    options = {"segment_tokens": segment_tokens, "tier": "disk", "page_dir": str(page_dir) if page_dir else None}

    gate = _gate(TextWorkload(prompt=gate_tokens, group=group), names, {**options, "segment_tokens": gate_tokens // 3})
    for name, entry in gate.items():
        verdict = "ok" if entry["passed"] else "WRONG"
        error = f"relative L2 error {entry['relative_l2_error']:.1e}, allowed {ALLOWED:.0e}"
        console.print(f"gate at {gate_tokens:,} tokens, {name} against {entry['reference']}: {error}: {verdict}")
    if not all(entry["passed"] for entry in gate.values()):
        console.print("A gradient is wrong: nothing is measured.", style="bold red")
        raise typer.Exit(1)

    rows = []
    for num_tokens in prompts:
        for name in names:
            workload = TextWorkload(prompt=num_tokens, group=group)
            rows.append(_row(workload, name, options, cache, again))
            console.print(_table(rows[-1:]))
    report: dict[str, Any] = {
        "benchmark": "million_curve" if curve else "million",
        "config": {
            "model": _shape(),
            "text": f"pydoc_data.topics as UTF-8 bytes, {topics().numel()} of them, repeated to the prompt's length",
            "group": group,
            "response": TextWorkload().response,
            "dtype": "float32",
            "engine": {name: value for name, value in options.items() if value is not None},
        },
        **receipt.provenance(),
        "gate": {"prompt": gate_tokens, **gate},
        "rows": rows,
    }
    if len(rows) > 1:
        console.print(_table(rows))
    if curve:
        report["exponents"] = {name: _exponents([row for row in rows if row["prompt_grad"] == name]) for name in names}
        for name, fitted in report["exponents"].items():
            text = ", ".join(f"{what} ~ tokens^{exponent:.2f}" for what, exponent in fitted.items())
            console.print(f"{name}: {text}", highlight=False)
    out = out or ROOT / "docs" / "figures" / ("million_curve.json" if curve else "million.json")
    receipt.write(out, report)
    console.print(f"receipt: {out}")
    if any(row["private_bytes"] > LIMIT for row in rows):
        console.print(f"private memory passed {LIMIT / 1e9:.0f} GB", style="bold red")
        raise typer.Exit(1)


def _gate(workload: TextWorkload, names: list[str], options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    gate = {}
    with tempfile.TemporaryDirectory(prefix="longstraw-benchmark-") as folder:
        for name in names:
            ours, reference = Path(folder, name), Path(folder, REFERENCES[name])
            measure(Spec("longstraw", workload, {"prompt_grad": name, **options}, ours))
            measure(Spec(REFERENCES[name], workload, {}, reference))
            error = relative_error(ours, reference)
            gate[name] = {"reference": REFERENCES[name], "relative_l2_error": error, "passed": error <= ALLOWED}
    return gate


def _row(workload: TextWorkload, mode: str, options: dict[str, Any], cache: Path, again: bool) -> dict[str, Any]:
    path = cache / f"{mode}-p{workload.prompt}-g{workload.group}-s{options['segment_tokens']}.json"
    if path.exists() and not again:
        return json.loads(path.read_text())
    row = measure(Spec("longstraw", workload, {"prompt_grad": mode, "report_progress": True, **options}))
    if not math.isfinite(row["loss"]):
        raise RuntimeError(f"the loss of {mode} at {workload.prompt} tokens is {row['loss']}")
    row = {
        "prompt_grad": mode,
        "prompt": workload.prompt,
        "private_bytes": row["base_bytes"] + row["peak_bytes"],
        **row,
        **receipt.provenance(),
    }
    receipt.write(path, row)
    return row


def _exponents(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Least-squares slopes of logarithms over the logarithm of the prompt's length."""
    values = {
        "seconds": [row["seconds"] for row in rows],
        "peak memory above the model": [row["peak_bytes"] for row in rows],
        "bytes on disk": [_on_disk(row) for row in rows],
        **{
            f"seconds of {phase}": [row["phases"][phase]["seconds"] for row in rows]
            for phase in ("capture", "sweep")
            if all(phase in row["phases"] for row in rows)
        },
    }
    lengths = [row["prompt"] for row in rows]
    return {name: _slope(lengths, numbers) for name, numbers in values.items()}


def _slope(xs: list[int], ys: list[float]) -> float:
    a, b = [math.log(x) for x in xs], [math.log(y) for y in ys]
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    return sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b)) / sum((x - mean_a) ** 2 for x in a)


def _on_disk(row: dict[str, Any]) -> int:
    return sum(tiers.get("disk", 0) for tiers in row["state_bytes"].values())


def _shape() -> dict[str, Any]:
    model = TextWorkload().model()
    config = model.config
    kept = (
        *("model_type", "vocab_size", "hidden_size", "intermediate_size", "layer_types"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "linear_num_key_heads"),
        *("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    )
    return {name: getattr(config, name) for name in kept} | {"parameters": sum(p.numel() for p in model.parameters())}


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="One gradient step, pages on disk; private memory of the whole process")
    for column in ("prompt", "prompt_grad", "seconds", "private MB", "above the model", "disk MB", "phases, seconds"):
        table.add_column(column, justify="left" if column in ("prompt_grad", "phases, seconds") else "right")
    for row in rows:
        phases = ", ".join(f"{name} {cost['seconds']:.0f}" for name, cost in row["phases"].items())
        sizes = (row["private_bytes"], row["peak_bytes"], _on_disk(row))
        megabytes = [f"{size / 1e6:.0f}" for size in sizes]
        table.add_row(f"{row['prompt']:,}", row["prompt_grad"], f"{row['seconds']:.0f}", *megabytes, phases)
    return table


if __name__ == "__main__":
    typer.run(main)
