"""What a user's function is handed is its own: what it writes there, nobody else sees."""

from __future__ import annotations

from typing import Any

import numpy as np

_UNCHANGEABLE = {int, float, bool, str, bytes, type(None)}


def own_copy(value: Any) -> Any:
    """A copy of lists, mappings, sets and arrays at any depth; other objects are handed as they are."""
    if isinstance(value, list):
        if set(map(type, value)) <= _UNCHANGEABLE:  # token ids, perhaps millions
            return value.copy()
        return [own_copy(entry) for entry in value]
    if isinstance(value, dict):
        return {key: own_copy(entry) for key, entry in value.items()}
    if type(value) is tuple:
        return tuple(own_copy(entry) for entry in value)
    if isinstance(value, (set, np.ndarray)):
        return value.copy()
    return value
