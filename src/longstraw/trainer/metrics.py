"""metrics.jsonl: one JSON object a line, in order of steps; read back when a run is resumed."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longstraw.trainer.written import written

Row = dict[str, Any]


class MetricsLog:
    """Appends rows to a JSON lines file. A number that is not finite is written as null.

    Args:
        path: the file.
        writes: False where another process writes it.

    Attributes:
        listeners: called with every row that is appended, once it is written.
    """

    def __init__(self, path: Path, writes: bool = True) -> None:
        self._path = path
        self._writes = writes
        self._unwritten: list[str] = []
        self.listeners: list[Callable[[Row], None]] = []

    def rows(self) -> list[Row]:
        """All rows. A last line that a kill cut short is left out."""
        if not self._path.exists():
            return []
        rows = []
        for line in self._path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return rows

    def append(self, row: Row) -> None:
        """Writes a row. One that the disk refuses is kept for `flush`.

        Raises:
            WriteError: it refused.
        """
        if not self._writes:
            return
        self._unwritten.append(json.dumps(to_plain(row)) + "\n")
        self.flush()
        for listener in self.listeners:
            listener(row)

    def flush(self) -> None:
        """Writes what could not be written before, whole lines or nothing.

        Raises:
            WriteError: the disk refuses.
        """
        if not self._unwritten:
            return
        with written(self._path):
            size = self._path.stat().st_size if self._path.exists() else 0
            try:
                with self._path.open("a") as file:
                    file.write("".join(self._unwritten))
            except OSError:
                with contextlib.suppress(OSError):
                    os.truncate(self._path, size)
                raise
        self._unwritten.clear()

    def drop_after(self, step: int) -> None:
        """Forget rows of later steps: they will be run again. The file is replaced at once."""
        if not self._writes:
            return
        kept = [row for row in self.rows() if row.get("step", 0) <= step]
        temporary = self._path.with_suffix(".tmp")
        with written(self._path):
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
            os.replace(temporary, self._path)


def to_plain(value: Any) -> Any:
    """JSON-ready: tensors and numpy scalars as numbers, what is not finite as None."""
    if isinstance(value, dict):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "item"):
        return to_plain(value.item())
    return value
