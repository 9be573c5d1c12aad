"""Memory that nobody wrote holds NaN in every test, so that a stale read shows; one thread, for repeatability."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)
torch.utils.deterministic.fill_uninitialized_memory = True  # torch.empty and its kin: NaN, or the largest integer
torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.fixture
def float64_inside() -> Iterator[None]:
    """Stock models of dtype float64 compute in float64 throughout."""
    from families import computing_in_float64

    with computing_in_float64():
        yield
