"""One thread at a time runs a model through the engine: a run changes the model's settings and its `.grad`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary


class Turn:
    """Whose turn it is to run a model. Another thread waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """While the context lasts, it is this thread's.

        Raises:
            RuntimeError: it is this thread's already: it would wait for itself.
        """
        if self._owner == threading.get_ident():
            raise RuntimeError(
                "the engine was called from within one of its own calls on this model, as by a progress callback or a "
                "hook of a module: the model is in the middle of a piece. Call it before or after; an objective may "
                "call the engine"
            )
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None


_turns: WeakValueDictionary[int, Turn] = WeakValueDictionary()  # by the config's id; a host keeps config and turn alive
_making = threading.Lock()


def turn_of(backbone: Any) -> Turn:
    """The one turn of all engines that serve a model, or models that share its config, which a run changes."""
    with _making:
        return _turns.setdefault(id(backbone.config), Turn())
