"""Sizes in bytes, written with their unit."""

from __future__ import annotations

from typing import Any

_UNITS = {
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "B": 1,
}


def parse_bytes(value: Any) -> Any:
    """'8GiB' or '500 MB' as a number of bytes; anything else as it is, for the type's own check."""
    if isinstance(value, str):
        for unit, size in _UNITS.items():
            number = value.strip().upper().removesuffix(unit).strip()
            if number != value.strip().upper() and number.replace(".", "", 1).isdigit():
                return int(float(number) * size)
    return value
