"""Seconds and peak memory by phase of one step, gathered from the engine and from what happens around it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from longstraw.engine.meter import Meter, Phase


class PhaseLedger:
    """Adds up phases by name over one optimizer step."""

    def __init__(self) -> None:
        self.phases: dict[str, Phase] = {}

    def add(self, name: str, seconds: float, peak_bytes: int | None = None) -> None:
        phase = self.phases.setdefault(name, Phase())
        phase.seconds += seconds
        if peak_bytes is not None:
            phase.peak_bytes = max(peak_bytes, phase.peak_bytes or 0)

    def take(self, meter: Meter) -> None:
        """Move an engine's phases over here."""
        for name, phase in meter.phases.items():
            self.add(name, phase.seconds, phase.peak_bytes)
        meter.phases.clear()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - begin)

    @property
    def peak_bytes(self) -> int | None:
        """The highest of all phases; None where the system does not tell."""
        return max((phase.peak_bytes for phase in self.phases.values() if phase.peak_bytes is not None), default=None)

    def metrics(self) -> dict[str, Any]:
        """`time/NAME` in seconds and `memory/NAME` in bytes."""
        seconds = {f"time/{name}": phase.seconds for name, phase in self.phases.items()}
        peaks = {
            f"memory/{name}": phase.peak_bytes for name, phase in self.phases.items() if phase.peak_bytes is not None
        }
        return seconds | peaks
