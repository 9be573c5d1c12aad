"""metrics.jsonl: one JSON object a line, in order of steps; read back when a run is resumed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
        if not self._writes:
            return
        with self._path.open("a") as file:
            file.write(json.dumps(to_plain(row)) + "\n")
        for listener in self.listeners:
            listener(row)

    def drop_after(self, step: int) -> None:
        """Forget rows of later steps: they will be run again. The file is replaced at once."""
        if not self._writes:
            return
        kept = [row for row in self.rows() if row.get("step", 0) <= step]
        temporary = self._path.with_suffix(".tmp")
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
