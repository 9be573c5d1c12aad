"""Where the engine's step spends its time, beside the floating-point floor: by phase and by operator.

    python -m benchmarks.profile_step [--prompt 8192] [--group 8] [--mode full] [--family llama] [--out receipt.json]

The floor is the time that the step's floating-point operations would take at this machine's measured rate of large
matrix products. Operations are counted as they are dispatched (`torch.utils.flop_counter`; an attention kernel counts
the query-key pairs that it has to look at: 4 operations a pair and head dimension forward, 10 backward). Three runs of
the same step: timed, counted, profiled.
"""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import receipt
from benchmarks.memory import Watcher
from benchmarks.methods import METHODS
from benchmarks.workload import Workload


def main(
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 8192,
    group: Annotated[int, typer.Option(help="Responses.")] = 8,
    response: Annotated[int, typer.Option(help="Tokens of a response.")] = 256,
    family: Annotated[str, typer.Option(help="llama or qwen3_5.")] = "llama",
    mode: Annotated[str, typer.Option(help="The engine's prompt_grad: full or none.")] = "full",
    segment_tokens: Annotated[int, typer.Option(help="The engine's segment_tokens.")] = 1024,
    block_tokens: Annotated[int, typer.Option(help="The engine's block_tokens.")] = 256,
    tier: Annotated[str, typer.Option(help="Where pages rest: device, host or disk.")] = "device",
    top: Annotated[int, typer.Option(help="Operators to show.")] = 15,
    out: Annotated[Path | None, typer.Option(help="Write a JSON receipt here.")] = None,
) -> None:
    """Time by phase and operator of one gradient step, and the floor under it."""
    console = Console()
    console.width = max(console.width, 110)
    try:
        workload = Workload(family, prompt, group, response)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    options = {"prompt_grad": mode, "segment_tokens": segment_tokens, "block_tokens": block_tokens, "tier": tier}
    model, data = workload.model(), workload.data()
    step = METHODS["longstraw"](model, **options)
    step(data.head(64, 2, 16), Watcher())

    rate = matmul_rate()
    with console.status("timed run"), Watcher() as watcher:
        step(data, watcher)
    seconds = {name: cost.seconds for name, cost in watcher.phases.items()}
    with console.status("counted run"):
        counts = count(lambda phases: step(data, phases))
    with console.status("profiled run"):
        times = operator_times(lambda phases: step(data, phases))

    phases = {
        name: {"seconds": spent, "operations": sum(counts[name].values()), "floor": sum(counts[name].values()) / rate}
        for name, spent in seconds.items()
    }
    operators = _operators(counts, times, rate)
    report = {
        "benchmark": "profile_step",
        "config": {**workload.as_dict(), "dtype": "float32", "engine": options, "threads": torch.get_num_threads()},
        **receipt.provenance(),
        "matmul_operations_per_second": rate,
        "phases": phases,
        "operators": operators,
        "profiled_seconds_by_phase": {name: sum(found.values()) for name, found in times.items()},
        "operator_seconds_by_phase": {name: dict(found) for name, found in times.items()},
    }
    console.print(f"matrix products: {rate / 1e9:.0f} billion operations a second, {torch.get_num_threads()} threads")
    console.print(_phase_table(phases))
    console.print(_operator_table(operators, top))
    if out is not None:
        receipt.write(out, report)
        console.print(f"receipt: {out}")


def matmul_rate(size: int = 2048, repeats: int = 8) -> float:
    """Floating-point operations a second of the best of some float32 products of square matrices."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    best = float("inf")
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


class _Counter(Watcher):
    """Notes the operations of each phase instead of watching memory."""

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()
        self._counter = counter
        self._before: dict[str, int] = {}
        self._current = ""
        self.counts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def enter(self, phase: str) -> None:
        now = {str(op): int(n) for op, n in self._counter.get_flop_counts().get("Global", {}).items()}
        for op, number in now.items():
            added = number - self._before.get(op, 0)
            if added and self._current:
                self.counts[self._current][f"aten::{op.removeprefix('aten.')}"] += added
        self._before, self._current = now, phase


def count(step: Any) -> dict[str, dict[str, float]]:
    """Floating-point operations by phase and operator."""
    aten = torch.ops.aten
    attention = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    }
    with FlopCounterMode(display=False, custom_mapping=attention) as counter:
        phases = _Counter(counter)
        step(phases)
        phases.enter("end")
    return phases.counts


def _pairs(query: Any, key: Any, causal: bool) -> int:
    """Rows x query heads x visible query-key pairs."""
    rows, heads, num_queries, _ = query
    num_keys = key[2]
    return rows * heads * (num_queries * (num_queries + 1) // 2 if causal else num_queries * num_keys)


def _attention_forward(query: Any, key: Any, value: Any, p: float = 0.0, causal: bool = False, **_: Any) -> int:
    return _pairs(query, key, causal) * 2 * (query[3] + value[3])


def _attention_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, p: float = 0.0, causal: bool = False, **_: Any
) -> int:
    """Scores again, and the gradients of weights, values, queries and keys."""
    return _pairs(query, key, causal) * (6 * query[3] + 4 * value[3])


class _Marker(Watcher):
    """Marks the phases in a profile."""

    def __init__(self) -> None:
        super().__init__()
        self._range: Any = None

    def enter(self, phase: str) -> None:
        self.close()
        self._range = record_function(f"phase:{phase}")
        self._range.__enter__()

    def close(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None


def operator_times(step: Any) -> dict[str, dict[str, float]]:
    """Seconds by phase and operator, without what an operator calls; "outside operators" is the rest of the phase."""
    marker = _Marker()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(marker)
        marker.close()
    events = list(profiler.events() or [])
    ranges = [(e.name.removeprefix("phase:"), e.time_range) for e in events if e.name.startswith("phase:")]
    times: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        if event.name.startswith("phase:") or not event.name.startswith("aten::"):
            continue
        for name, span in ranges:
            if span.start <= event.time_range.start < span.end:
                times[name][event.name] += event.self_cpu_time_total / 1e6
                break
    for name, span in ranges:
        inside = sum(times[name].values())
        times[name]["outside operators"] = max(0.0, (span.end - span.start) / 1e6 - inside)
    return times


def _operators(counts: dict[str, Any], times: dict[str, Any], rate: float) -> list[dict[str, Any]]:
    seconds: dict[str, float] = defaultdict(float)
    operations: dict[str, float] = defaultdict(float)
    for found in times.values():
        for name, spent in found.items():
            seconds[name] += spent
    for found in counts.values():
        for name, number in found.items():
            operations[name] += number
    rows = [
        {"operator": name, "seconds": spent, "operations": operations[name], "floor": operations[name] / rate}
        for name, spent in seconds.items()
    ]
    return sorted(rows, key=lambda row: -row["seconds"])


def _phase_table(phases: dict[str, Any]) -> Table:
    table = Table(title="By phase, timed run")
    for column in ("phase", "seconds", "billion operations", "floor, seconds", "floor / seconds"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    names = ("seconds", "operations", "floor")
    total = {name: sum(phase[name] for phase in phases.values()) for name in names}
    for name, found in [*phases.items(), ("step", total)]:
        numbers = f"{found['seconds']:.2f}", f"{found['operations'] / 1e9:.0f}", f"{found['floor']:.2f}"
        table.add_row(name, *numbers, f"{found['floor'] / found['seconds']:.0%}")
    return table


def _operator_table(operators: list[dict[str, Any]], top: int) -> Table:
    table = Table(title="By operator, profiled run")
    for column in ("operator", "seconds", "share", "floor, seconds", "floor / seconds"):
        table.add_column(column, justify="left" if column == "operator" else "right")
    total = sum(row["seconds"] for row in operators)
    for row in operators[:top]:
        floor = (f"{row['floor']:.2f}", f"{row['floor'] / row['seconds']:.0%}") if row["operations"] else ("", "")
        table.add_row(row["operator"], f"{row['seconds']:.2f}", f"{row['seconds'] / total:.0%}", *floor)
    rest = sum(row["seconds"] for row in operators[top:])
    table.add_row("the rest", f"{rest:.2f}", f"{rest / total:.0%}", "", "")
    return table


if __name__ == "__main__":
    typer.run(main)
