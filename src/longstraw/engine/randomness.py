"""Whether a model draws random numbers as it runs: the graph that is built again would be of another function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longstraw.parallel.context import ALONE, Context


@contextmanager
def refuse_randomness(
    device: torch.device, run_a_little: Callable[[], object], context: Context = ALONE
) -> Iterator[None]:
    """Refuses what ran inside if it drew from PyTorch's generators, which other threads may draw from as well.

    Args:
        run_a_little: runs the model on a few tokens, without the other ranks, to tell whether it was the model.
        context: the ranks that ran it together: all of them refuse it, or none.

    Raises:
        RuntimeError: names the operation.
    """
    before = _generators(device)
    yield
    found = None
    if _drawn(before, device):
        with _Watch(device) as watch:
            run_a_little()
        found = watch.found
    if context.agree(found is not None):
        raise RuntimeError(
            f"the model drew random numbers ({found or 'on another rank'}): a replayed graph would not be the one that "
            "was scored, and .grad is as it was. Remove what adds noise: dropout that model.eval() does not switch "
            "off, jitter in a router, a hook of a module"
        )


class _Watch(TorchDispatchMode):
    """Finds the first operation that draws from the generators."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.found is not None or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = _generators(self._device)
        result = func(*args, **(kwargs or {}))
        if _drawn(before, self._device):
            self.found = str(func)
        return result


def _generators(device: torch.device) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _drawn(before: list[torch.Tensor], device: torch.device) -> bool:
    return not all(torch.equal(one, other) for one, other in zip(before, _generators(device)))
