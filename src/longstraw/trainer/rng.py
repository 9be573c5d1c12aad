"""The state of every random number generator, as JSON and tensors, to be put back exactly."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class RngState:
    """Python's, numpy's and torch's generators (the CPU's and every CUDA device's).

    Attributes:
        numbers: JSON-ready state of Python and numpy.
        tensors: uint8 state of torch, by device.
    """

    numbers: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @classmethod
    def capture(cls) -> RngState:
        version, words, gauss = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        tensors = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            tensors |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
        return cls(
            {
                "python": [version, list(words), gauss],
                "numpy": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
            },
            tensors,
        )

    def restore(self) -> None:
        """Put the generators back. CUDA states of devices that are not here are left out."""
        version, words, gauss = self.numbers["python"]
        random.setstate((version, tuple(words), gauss))
        name, keys, *rest = self.numbers["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(self.tensors["cpu"])
        for device, state in self.tensors.items():
            if device.startswith("cuda") and torch.cuda.is_available() and int(device[5:]) < torch.cuda.device_count():
                torch.cuda.set_rng_state(state, device)


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def untouched_rng() -> Iterator[None]:
    """Whatever runs inside leaves the generators as they were."""
    before = RngState.capture()
    try:
        yield
    finally:
        before.restore()
