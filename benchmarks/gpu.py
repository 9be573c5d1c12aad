"""What an hour of GPU time is for, in under eight minutes: exactness through the CUDA kernels, then capacity and speed.

    python -m benchmarks.gpu [--out gpu.json] [--minutes 7.5] [--device cuda]

First the gradients of small models of every family, in float32 and bfloat16, against stock transformers on the same
device, their bits over tiers and runs, and sparse attention's choice of tokens; where one is off, the exit code is 1.
Then a random model of Qwen2.5-7B's shape with LoRA at growing prompts, unless that family was off: seconds, peak memory
by phase, and the share of the card's own matmul rate. A point that would not end in time is skipped, and says so.
Without a GPU (`--device cpu`) the first part runs as it is and the second on a toy.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks import receipt
from benchmarks.gpu_capacity import FAMILY, capacity, matmul_rate
from benchmarks.gpu_exactness import FAMILIES, choices_agree, exactness


def main(
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda" if torch.cuda.is_available() else "cpu",
    minutes: Annotated[float, typer.Option(help="Start no point that would end later.")] = 7.5,
    out: Annotated[Path | None, typer.Option(help="Write one JSON here.")] = None,
) -> None:
    """Exactness on every family, then capacity and time of a 7B shape."""
    end = time.perf_counter() + 60 * minutes
    console = Console()
    report: dict[str, Any] = {"benchmark": "gpu", "device": _device_name(device), **receipt.provenance()}
    report["exactness"] = []
    wrong = []
    for name in FAMILIES:
        row = _row_of(name, device)
        report["exactness"].append(row)
        if not row["passed"]:
            wrong.append(name)
        console.print(json.dumps(row))
        _write(out, report)
    report["choices_agree"] = choices_agree(device)
    console.print(json.dumps({"choices_agree": report["choices_agree"]}))
    _write(out, report)
    if not report["choices_agree"]:
        wrong.append("the choice of tokens")
    if wrong:
        console.print(f"Wrong: {', '.join(wrong)}.", style="bold red")
    if FAMILY in wrong:
        console.print(f"No speed is shown of {FAMILY}.", style="bold red")
        raise typer.Exit(1)
    report["matmul_flops"] = rate = matmul_rate(device)
    report["points"] = []
    for row in capacity(device, rate, lambda: end - time.perf_counter()):
        report["points"].append(row)
        console.print(json.dumps(row))
        _write(out, report)
    report["seconds"] = 60 * minutes - (end - time.perf_counter())
    _write(out, report)
    if wrong:
        raise typer.Exit(1)


def _row_of(name: str, device: str) -> dict[str, Any]:
    """A family that fails does not keep the others from being looked at: the GPU may be lent for minutes."""
    try:
        return exactness(name, device)
    except Exception as error:
        return {"family": name, "passed": False, "error": f"{type(error).__name__}: {error}"}


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device != "cpu" else "cpu"


def _write(out: Path | None, report: dict[str, Any]) -> None:
    if out is not None:
        receipt.write(out, report)


if __name__ == "__main__":
    typer.run(main)
