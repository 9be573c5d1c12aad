"""The precision that sums and log-probabilities are taken in."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def in_its_own_precision(function: Callable[P, R]) -> Callable[P, R]:
    """The function computes in the dtype of its tensors, under autocast too: a state sums over all tokens."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.autocast(next(x.device.type for x in args if isinstance(x, torch.Tensor)), enabled=False):
            return function(*args, **kwargs)

    return run
