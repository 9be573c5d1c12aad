"""A model in evaluation mode for a while, every module restored afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """No module trains while the context lasts; restored on leaving, also by exception."""
    modules: list[Any] = list(model.modules())
    training = [module for module in modules if module.training]
    # In evaluation mode on some CPUs bitsandbytes repacks 4-bit weights for a kernel without a backward.
    repacking = [module for module in modules if getattr(module, "support_avx512bf16_for_cpu", False)]
    try:
        for module in training:
            module.training = False
        for module in repacking:
            module.support_avx512bf16_for_cpu = False
        yield
    finally:
        for module in training:
            module.training = True
        for module in repacking:
            module.support_avx512bf16_for_cpu = True
