"""What a run cost: seconds and peak memory, by phase and over steps."""

from __future__ import annotations

from dataclasses import dataclass

from longstraw.audit.bars import Layer
from longstraw.audit.catalogue import metric_keys
from longstraw.audit.figures import SMALL, Chart, Figure, draw_stack
from longstraw.audit.numbers import memory, memory_unit
from longstraw.audit.run_data import Row, RunData, finite, finite_values
from longstraw.audit.thinning import thin

MAX_BARS = 60
# In the order in which a step runs through them.
PHASES = ("capture", "sample", "reward", "reference", "score", "replay", "sweep", "optimizer")
OTHER_PHASE = "other"
_LEAST_SHARE = 0.02


@dataclass(frozen=True)
class PhaseCost:
    """What a phase cost.

    Attributes:
        name: of the phase; the part of a step that no phase accounts for is "other".
        seconds: a step, on average over all steps.
        share: of the steps' time, 0 to 1.
        peak: the highest of all steps, as text; empty where it was not measured.
        longest, height: seconds and peak relative to those of the phase that has most, 0 to 1.
    """

    name: str
    seconds: float
    share: float
    longest: float
    peak: str
    height: float

    @property
    def look(self) -> str:
        """Its CSS class."""
        return phase_look(self.name)


def phase_look(name: str) -> str:
    """The CSS class that gives a phase its colour."""
    return f"p-{name}" if name in (*PHASES, OTHER_PHASE) else "p-unknown"


def phase_costs(run: RunData) -> list[PhaseCost]:
    """Time and peak memory of each phase over the whole run, in the order of a step."""
    total = sum(finite(row, "step_time") or 0.0 for row in run.steps)
    seconds = {name: sum(_phase_seconds(row, name) for row in run.steps) for name in [*_phases(run), OTHER_PHASE]}
    peaks = {name: max((finite(row, f"memory/{name}") or 0.0 for row in run.steps), default=0.0) for name in seconds}
    highest, longest = max(peaks.values()), max(seconds.values())
    return [
        PhaseCost(
            name,
            seconds[name] / max(len(run.steps), 1),
            seconds[name] / total if total else 0.0,
            seconds[name] / longest if longest else 0.0,
            memory(peaks[name]) if peaks[name] else "",
            peaks[name] / highest if highest else 0.0,
        )
        for name in seconds
    ]


def cost_charts(run: RunData) -> list[Chart]:
    """Memory and throughput over steps."""
    peaks = finite_values(run.steps, "peak_memory_bytes")
    size, unit = memory_unit(max(peaks, default=0.0))
    return [
        Chart("Peak memory", unit, {"peak_memory_bytes": ""}, memory_kind(run), scale=size),
        Chart(
            "Throughput",
            "tokens a second",
            {"tokens_per_second": ""},
            "Tokens of prompts and completions over the step's time.",
            zero=True,
        ),
    ]


def memory_kind(run: RunData) -> str:
    """What the run's memory figures count."""
    if run.starts and run.starts[-1].get("accelerators") and run.option("model", "device") != "cpu":
        return "The most that the allocator of the accelerator handed out."
    return "The most resident memory of the process, the model and Python included."


def seconds_by_phase(run: RunData) -> list[Figure]:
    """The stacked bars of a step's seconds; nothing where no step was timed."""
    timed = [row for row in run.steps if finite(row, "step_time") is not None]
    if not timed:
        return []
    rows = thin(timed, MAX_BARS)
    total = sum(row["step_time"] for row in rows) or 1.0
    layers, rest = [], [0.0] * len(rows)
    for name in [*_phases(run), OTHER_PHASE]:
        values = [_phase_seconds(row, name) for row in rows]
        if name == OTHER_PHASE or sum(values) < _LEAST_SHARE * total:
            rest = [a + b for a, b in zip(rest, values)]
        else:
            layers.append(Layer(name, phase_look(name), values))
    layers.append(Layer(OTHER_PHASE, phase_look(OTHER_PHASE), rest))
    note = f"Phases below {_LEAST_SHARE:.0%} of the time, and what none accounts for, are in “{OTHER_PHASE}”."
    return [draw_stack("Seconds a step by phase", note, "seconds", layers, rows, (SMALL,))]


def _phases(run: RunData) -> list[str]:
    found = {key.removeprefix("time/") for key in metric_keys(run) if key.startswith("time/")}
    return [*(name for name in PHASES if name in found), *sorted(found - set(PHASES))]


def _phase_seconds(row: Row, name: str) -> float:
    if name != OTHER_PHASE:
        return finite(row, f"time/{name}") or 0.0
    known = sum(finite(row, key) or 0.0 for key in row if key.startswith("time/"))
    return max((finite(row, "step_time") or 0.0) - known, 0.0)
