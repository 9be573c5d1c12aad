"""Long runs in few points: neighbouring steps averaged, peaks kept; and running means."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from longstraw.audit.run_data import Row, finite_values

_SPAN = "_steps"


def thin(rows: Sequence[Row], most: int) -> list[Row]:
    """At most `most` rows, each standing for equally many steps, give or take one.

    Values are means over the steps that have them; maxima for peaks of memory and longest lengths, minima for
    shortest lengths.
    """
    parts = min(most, len(rows))
    edges = [part * len(rows) // parts for part in range(parts + 1)] if parts else []
    return [_merged(rows[first:last]) for first, last in pairwise(edges)]


def steps_label(row: Row) -> str:
    """E.g. "step 12"; or "steps 11 to 15" for a row that stands for several."""
    first, last = row.get(_SPAN, (row["step"], row["step"]))
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Centred mean over `window` values, fewer at the ends."""
    half = window // 2
    slices = (values[max(0, index - half) : index + half + 1] for index in range(len(values)))
    return [sum(part) / len(part) for part in slices]


def _merged(rows: Sequence[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        if values := finite_values(rows, key):
            merged[key] = _combine(key, values)
    merged["step"] = sum(row["step"] for row in rows) / len(rows)
    merged[_SPAN] = (rows[0]["step"], rows[-1]["step"])
    return merged


def _combine(key: str, values: list[float]) -> float:
    if key.startswith("memory/") or key == "peak_memory_bytes" or "/max_" in key or key.endswith("/max"):
        return max(values)
    if "/min_" in key or key.endswith("/min"):
        return min(values)
    return sum(values) / len(values)
