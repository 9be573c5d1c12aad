"""The precision that sums and log-probabilities are taken in."""

from __future__ import annotations

import torch


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
