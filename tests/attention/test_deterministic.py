"""The deterministic backward is asked for where it is needed, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from longstraw.attention.deterministic import deterministic


def _flags() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


@pytest.mark.parametrize("mode, warn_only", [(False, False), (True, True), (True, False)])
def test_flags_hold_inside_and_come_back(mode: bool, warn_only: bool) -> None:
    before = _flags()
    try:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        outside = _flags()
        with pytest.raises(KeyError), deterministic():
            assert _flags() == (True, False, False)
            raise KeyError
        assert _flags() == outside
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
