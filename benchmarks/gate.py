"""The correctness gate: how far a gradient is from conventional autograd's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# float32, long sums in another order. A wrong gradient of these models is off by 1e-2 or more.
ALLOWED = 2e-5


def relative_error(gradient: Path, reference: Path) -> float:
    """As `relative_distance`, of safetensors files."""
    from safetensors.torch import load_file

    return relative_distance(load_file(gradient), load_file(reference))


def relative_distance(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """||a - b|| / ||b|| over all parameters together; a parameter that one side lacks counts as zero there."""
    import torch

    like = {**ours, **theirs}
    difference = reference_norm = 0.0
    for name, tensor in like.items():
        zero = torch.zeros_like(tensor)
        a, b = ours.get(name, zero).double(), theirs.get(name, zero).double()
        difference += float((a - b).square().sum())
        reference_norm += float(b.square().sum())
    return (difference / reference_norm) ** 0.5
