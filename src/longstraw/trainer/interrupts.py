"""Stopping on request: Ctrl-C and SIGTERM end the run between two states, never inside a critical section."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class StopRequested(KeyboardInterrupt):
    """The user or the system asked the run to end."""


class Interrupts:
    """While active, SIGINT and SIGTERM raise StopRequested: at once, or at the end of a `deferred` section."""

    def __init__(self) -> None:
        self._depth = 0
        self._pending = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Handle the signals inside; elsewhere than in the main thread, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """A section that is finished before a request is followed."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._pending and self._depth == 0:
            self._pending = False
            raise StopRequested

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._depth:
            self._pending = True
        else:
            raise StopRequested
