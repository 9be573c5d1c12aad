"""A short convolution alone: the last inputs [B, C, K] of its channels are all that later tokens need.

B rows, C channels, K kernel size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from longstraw.pages import PageStore
from longstraw.state.carried import CarriedChain, CarriedPiece, Tensors


class ConvolvedChain(CarriedChain):
    """See `CarriedChain`."""

    def __init__(self, store: PageStore, grad_from: int = 0, parent: CarriedChain | None = None) -> None:
        super().__init__(store, "convolved", grad_from, parent)

    def fork(self) -> ConvolvedChain:
        return ConvolvedChain(self.store, parent=self)

    def piece(self, start: Tensors | None, rows: int) -> ConvolvedPiece:
        return ConvolvedPiece(start, rows)


class ConvolvedPiece(CarriedPiece):
    """Gives the tail that the piece, or the tokens decoded so far, start from, and takes the new one."""

    def rewind(self) -> None:
        start = self._start_of_rows()
        self._tail = None if start is None else start[0]

    def update_conv_state(self, conv_states: torch.Tensor, conv_kernel_size: int, **_: Any) -> torch.Tensor:
        """[B, C, tail + T] with the tail joined to [B, C, T]; ends the forward pass if nothing reads on."""
        seen = conv_states
        if self._tail is not None:
            seen = torch.cat([self._tail.to(conv_states.dtype), conv_states], -1)
        size = conv_kernel_size
        self._tail = pad(seen, (max(0, size - seen.shape[-1]), 0))[..., -size:]
        self.end = (self._tail,)
        self.complete()
        return seen

    def select(self, rows: torch.Tensor) -> None:
        super().select(rows)
        if self.end is not None:
            (self._tail,) = self.end
