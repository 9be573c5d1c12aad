"""Seconds and peak private memory of a process, by phase, read from the operating system (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import time
from dataclasses import dataclass
from types import TracebackType

INTERVAL = 0.002  # seconds between samples


def private_resident() -> int:
    """Private resident bytes of this process: what mapped files hold in the page cache does not count.

    Raises:
        OSError: the system does not tell (it is not Linux).
    """
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
    raise OSError("no RssAnon in /proc/self/status: memory is measured on Linux only")


def settle() -> None:
    """Collects garbage and returns the allocator's free memory to the system, so that a base is a base."""
    gc.collect()
    # With another C library the base is a little higher, for every method alike.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


@dataclass
class PhaseCost:
    """What a phase took.

    Attributes:
        seconds: wall time.
        peak_bytes: the most private memory above the base.
    """

    seconds: float = 0.0
    peak_bytes: int = 0


class Watcher:
    """Samples memory from a thread while its context lasts. The work calls `enter` first, and as its phases change."""

    def __init__(self) -> None:
        self.phases: dict[str, PhaseCost] = {}
        self._phase = ""
        self._since = 0.0
        self.base_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def peak_bytes(self) -> int:
        return max((phase.peak_bytes for phase in self.phases.values()), default=0)

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases.values())

    def enter(self, phase: str) -> None:
        """Closes the phase before and opens this one."""
        now = time.perf_counter()
        self._sample()
        if self._phase:
            self.phases[self._phase].seconds += now - self._since
        self.phases.setdefault(phase, PhaseCost())
        self._phase, self._since = phase, now

    def __enter__(self) -> Watcher:
        settle()
        self.base_bytes = private_resident()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._phase:
            self.phases[self._phase].seconds += time.perf_counter() - self._since
        self._sample()
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL):
            self._sample()

    def _sample(self) -> None:
        phase = self.phases.get(self._phase)
        if phase is not None:
            phase.peak_bytes = max(phase.peak_bytes, private_resident() - self.base_bytes)
