"""Exact GRPO on prompts of hundreds of thousands of tokens under a fixed GPU budget.

Names are resolved on first use, so that `import longstraw` and everything about configuration stays free of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Draft", "Engine", "Outcome", "ResidentState", "Scored", "Tree", "TreeScored", "__version__"]

_HOME = {
    "Engine": "longstraw.engine.engine",
    "Outcome": "longstraw.engine.step",
    "Scored": "longstraw.engine.step",
    "Draft": "longstraw.engine.sample",
    "Tree": "longstraw.engine.tree",
    "TreeScored": "longstraw.engine.walk",
    "ResidentState": "longstraw.state.resident",
}

if TYPE_CHECKING:
    from longstraw.engine.engine import Engine
    from longstraw.engine.sample import Draft
    from longstraw.engine.step import Outcome, Scored
    from longstraw.engine.tree import Tree
    from longstraw.engine.walk import TreeScored
    from longstraw.state.resident import ResidentState


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'longstraw' has no attribute {name!r}")
