"""Seconds and peak memory of each phase of a step, measured."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass
class Phase:
    """What a phase cost.

    Attributes:
        seconds: wall time, summed over its runs.
        peak_bytes: the most memory in use at a time: the allocator's on CUDA, the process's resident memory on CPU;
            None where the system does not tell.
    """

    seconds: float = 0.0
    peak_bytes: int | None = None


class Meter:
    """Phases by name: "capture", "score", "sample", "replay", "sweep", "probe"."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self.phases: dict[str, Phase] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        phase = self.phases.setdefault(name, Phase())
        self._reset_peak()
        begin = time.perf_counter()
        try:
            yield
        finally:
            if self._cuda is not None:
                torch.cuda.synchronize(self._cuda)
            phase.seconds += time.perf_counter() - begin
            peak = self._peak()
            if peak is not None:
                phase.peak_bytes = max(peak, phase.peak_bytes or 0)

    def _reset_peak(self) -> None:
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
            torch.cuda.reset_peak_memory_stats(self._cuda)
            return
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")  # Linux: sets the peak resident size back to the present one

    def _peak(self) -> int | None:
        if self._cuda is not None:
            # with the freed blocks that other streams may still read, which max_memory_allocated leaves out
            return torch.cuda.memory_stats(self._cuda)["active_bytes.all.peak"]
        with contextlib.suppress(OSError), open("/proc/self/status") as status:
            for line in status:
                if line.startswith("VmHWM"):
                    return int(line.split()[1]) * 1024
        return None
