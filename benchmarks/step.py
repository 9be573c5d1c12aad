"""One GRPO gradient step on one long prompt: stock transformers with gradient checkpointing against the engine.

    python -m benchmarks.step [--prompt 8192] [--group 8] [--response 256] [--family llama] [--out receipt.json]

Every method runs in processes of its own, in turns. The gradients of these same timed runs are compared first, at
full size: `full` with conventional autograd, `none` with conventional autograd whose cached prompt state is a constant.
Where one disagrees, no speed is printed and the exit code is 1.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import receipt
from benchmarks.gate import ALLOWED, relative_error
from benchmarks.measure import Spec, measure
from benchmarks.workload import Workload

BASELINE = "conventional"
REFERENCES = {"none": "constant_prompt", "full": BASELINE, "full, graphs retained": BASELINE}


def main(
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 8192,
    group: Annotated[int, typer.Option(help="Responses.")] = 8,
    response: Annotated[int, typer.Option(help="Tokens of a response.")] = 256,
    family: Annotated[str, typer.Option(help="llama, or the hybrid qwen3_5.")] = "llama",
    segment_tokens: Annotated[int, typer.Option(help="The engine's segment_tokens.")] = 1024,
    block_tokens: Annotated[int, typer.Option(help="The engine's block_tokens.")] = 256,
    tier: Annotated[str, typer.Option(help="Where the engine's pages rest: device, host or disk.")] = "device",
    repeats: Annotated[int, typer.Option(help="Runs of every method, in turns.", min=1)] = 3,
    seed: int = 0,
    out: Annotated[Path | None, typer.Option(help="Write a JSON receipt here.")] = None,
) -> None:
    """Gradient error, then seconds and peak memory of one gradient step, conventional against ours."""
    console = Console()
    console.width = max(console.width, 110)
    try:
        workload = Workload(family, prompt, group, response, seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    pieces = {"segment_tokens": segment_tokens, "block_tokens": block_tokens, "tier": tier}
    plan = _plan(pieces)

    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in plan}
    with tempfile.TemporaryDirectory(prefix="longstraw-benchmark-") as folder, console.status("") as status:
        for repeat in range(repeats):
            for name, (method, options) in plan.items():
                if name == "constant_prompt" and repeat:
                    continue  # a reference, not a contestant
                status.update(f"{name}, run {repeat + 1} of {repeats}")
                gradient = Path(folder, f"{name}-{repeat}.safetensors")
                runs[name].append(measure(Spec(method, workload, options, gradient)))
        gate = _gate(Path(folder), repeats, [name for name in plan if name in REFERENCES])

    report: dict[str, Any] = {
        "benchmark": "step",
        "config": {**workload.as_dict(), "dtype": "float32", "repeats": repeats, "engine": pieces},
        **receipt.provenance(),
        "gate": gate,
    }
    passed = all(entry["passed"] for entry in gate.values())
    console.print(_gate_table(gate, workload))
    if passed:
        report["methods"] = {name: _summary(runs[name]) for name in runs if name != "constant_prompt"}
        report["ratios"] = _ratios(report["methods"])
        console.print(_speed_table(report))
    else:
        console.print("A gradient is wrong: no speed is shown.", style="bold red")
    if out is not None:
        receipt.write(out, report)
        console.print(f"receipt: {out}")
    if not passed:
        raise typer.Exit(1)


def _plan(pieces: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    from benchmarks.methods import retains_graphs

    plan: dict[str, tuple[str, dict[str, Any]]] = {
        BASELINE: ("conventional", {}),
        "constant_prompt": ("constant_prompt", {}),
        "none": ("longstraw", {"prompt_grad": "none", **pieces}),
        "full": ("longstraw", {"prompt_grad": "full", **pieces}),
    }
    if retains_graphs():
        plan["full, graphs retained"] = ("longstraw", {"prompt_grad": "full", "retain_graph_bytes": 1 << 40, **pieces})
    return plan


def _gate(folder: Path, repeats: int, names: list[str]) -> dict[str, dict[str, Any]]:
    """Every timed run of ours against its reference; the worst of them counts."""
    gate = {}
    for name in names:
        reference = Path(folder, f"{REFERENCES[name]}-0.safetensors")
        errors = [relative_error(Path(folder, f"{name}-{i}.safetensors"), reference) for i in range(repeats)]
        conventional = Path(folder, f"{BASELINE}-0.safetensors")
        gate[name] = {
            "reference": REFERENCES[name],
            "relative_l2_error": max(errors),
            "allowed": ALLOWED,
            "passed": max(errors) <= ALLOWED,
            "distance_from_the_exact_gradient": relative_error(Path(folder, f"{name}-0.safetensors"), conventional),
        }
    return gate


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    seconds, peaks = [run["seconds"] for run in runs], [run["peak_bytes"] for run in runs]
    median = min(runs, key=lambda run: abs(run["seconds"] - statistics.median(seconds)))
    return {
        "seconds": {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)},
        "peak_bytes": {"median": statistics.median(peaks), "min": min(peaks), "max": max(peaks)},
        "phases": median["phases"],
        "threads": median["threads"],
    }


def _ratios(methods: dict[str, Any]) -> dict[str, dict[str, float]]:
    base = methods[BASELINE]
    return {
        name: {
            "times_faster": base["seconds"]["median"] / found["seconds"]["median"],
            "share_of_memory": found["peak_bytes"]["max"] / base["peak_bytes"]["max"],
        }
        for name, found in methods.items()
        if name != BASELINE
    }


def _gate_table(gate: dict[str, Any], workload: Workload) -> Table:
    size = f"prompt {workload.prompt:,}, {workload.group} responses of {workload.response}"
    table = Table(title=f"Gradient of the timed runs, {workload.family}, {size}")
    for column in ("method", "against", "relative L2 error", "allowed", "", "from the exact gradient"):
        table.add_column(column)
    against = {"constant_prompt": "conventional, prompt state constant", BASELINE: "conventional"}
    for name, entry in gate.items():
        verdict = "[green]ok[/]" if entry["passed"] else "[bold red]WRONG[/]"
        errors = f"{entry['relative_l2_error']:.1e}", f"{entry['allowed']:.0e}"
        distance = f"{entry['distance_from_the_exact_gradient']:.1e}"
        table.add_row(name, against[entry["reference"]], *errors, verdict, distance)
    return table


def _speed_table(report: dict[str, Any]) -> Table:
    repeats = report["config"]["repeats"]
    spread = f"median of {repeats} (min to max)" if repeats > 1 else "one run"
    table = Table(title=f"One gradient step: {spread}; peak private memory above the model")
    for column in ("method", "seconds", "times faster", "peak MB", "share of memory", "phases, seconds"):
        table.add_column(column, justify="left" if column in ("method", "phases, seconds") else "right")
    for name, found in report["methods"].items():
        seconds = found["seconds"]
        ratio = report["ratios"].get(name)
        phases = ", ".join(f"{phase} {cost['seconds']:.1f}" for phase, cost in found["phases"].items())
        table.add_row(
            "conventional, checkpointing" if name == BASELINE else name,
            f"{seconds['median']:.2f}" + (f" ({seconds['min']:.2f} to {seconds['max']:.2f})" if repeats > 1 else ""),
            f"{ratio['times_faster']:.1f}" if ratio else "1",
            f"{found['peak_bytes']['max'] / 1e6:.0f}",
            f"{ratio['share_of_memory']:.2f}" if ratio else "1",
            phases if ratio else "",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
