"""GatedDeltaNet: the convolution tail [B, C, W] and the recurrent matrices [B, H, Dk, Dv] after the last token.

B rows, C convolution channels, W convolution kernel size, H value heads, Dk and Dv key and value head sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import LinearAttentionLayer

from longstraw.pages import PageStore
from longstraw.state.carried import CarriedChain, CarriedPiece, Tensors


class RecurrentChain(CarriedChain):
    """See `CarriedChain`."""

    def __init__(self, store: PageStore, grad_from: int = 0, parent: CarriedChain | None = None) -> None:
        super().__init__(store, "recurrent", grad_from, parent)

    def fork(self) -> RecurrentChain:
        return RecurrentChain(self.store, parent=self)

    def piece(self, start: Tensors | None, rows: int) -> RecurrentPiece:
        return RecurrentPiece(start, rows)


class RecurrentPiece(CarriedPiece, LinearAttentionLayer):
    """Gives the layer its starting state and takes the new one, out of place, at any length.

    The stock layer writes into its states; a graph cannot run through that.
    """

    def __init__(self, start: Tensors | None, rows: int) -> None:
        super().__init__(start, rows)
        self.record_past = True  # or the model updates the convolution state in place for one-token pieces

    def rewind(self) -> None:
        start = self._start_of_rows()
        if start is not None:
            self._load(start)
        else:
            self.conv_states[0] = self.recurrent_states[0] = None
            self.has_previous_state[0] = False

    def update_conv_state(  # type: ignore[override]
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> torch.Tensor:
        before = self.conv_states[0]
        if before is None:
            seen = conv_states
        else:
            seen = torch.cat([before.to(conv_states.dtype), conv_states], -1)
        size = conv_kernel_size or seen.shape[-1]
        self.conv_states[0] = pad(seen, (max(0, size - seen.shape[-1]), 0))[..., -size:]
        return seen

    def update_recurrent_state(  # type: ignore[override]
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        self.recurrent_states[0] = recurrent_states
        self.has_previous_state[0] = True
        assert self.conv_states[0] is not None
        self.end = (self.conv_states[0], recurrent_states)
        self.complete()
        return recurrent_states

    def select(self, rows: torch.Tensor) -> None:
        super().select(rows)
        if self.end is not None:
            self._load(self.end)

    def _load(self, state: Tensors) -> None:
        self.conv_states[0], self.recurrent_states[0] = state
        self.has_previous_state[0] = True
