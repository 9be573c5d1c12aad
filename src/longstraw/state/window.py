"""Sliding-window attention: the keys and values of the last `window - 1` tokens, [B, K, S, D] each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from longstraw.attention import window
from longstraw.attention.interface import PIECE
from longstraw.attention.scores import Scores
from longstraw.pages import PageStore
from longstraw.state.carried import CarriedChain, CarriedPiece, Tensors


class WindowChain(CarriedChain):
    """See `CarriedChain`; `size` is how many tokens a query sees, itself included."""

    def __init__(
        self,
        store: PageStore,
        size: int,
        grad_from: int = 0,
        parent: CarriedChain | None = None,
    ) -> None:
        super().__init__(store, "window", grad_from, parent)
        self.size = size

    def fork(self) -> WindowChain:
        return WindowChain(self.store, self.size, parent=self)

    def piece(self, start: Tensors | None, rows: int) -> WindowPiece:
        return WindowPiece(self.size, start, rows)

    def state_nbytes(self, index: int) -> int:
        """As of a full window: the first pieces of a prompt leave less."""
        page = self._states[index]
        num_held = self.store.fetch(page)[0].shape[-2]
        return page.nbytes * (self.size - 1) // max(1, num_held)


class WindowPiece(CarriedPiece, CacheLayerMixin):
    """Attends over the carried tail and the piece, and carries the new tail on."""

    def __init__(self, size: int, start: Tensors | None, rows: int) -> None:
        super().__init__(start, rows)
        self.size = size

    def rewind(self) -> None:
        self.end = self._start_of_rows()

    def update(  # type: ignore[override]
        self, key_states: torch.Tensor, value_states: torch.Tensor, kwargs: dict[str, Any], **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        everyone = tuple(self.context.gather_keys(own) for own in (key_states, value_states))
        seen = self._behind_tail([self.context.until_own(x, -2) for x in everyone])
        keys, values = self._behind_tail([self.context.all_unpadded(x, -2) for x in everyone])
        first = max(0, keys.shape[-2] - self.size + 1)
        self.end = (keys[..., first:, :], values[..., first:, :])
        kwargs[PIECE] = self
        self.complete()
        return seen[0], seen[1]

    def _behind_tail(self, new: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return new if self.end is None else [torch.cat([tail, x], -2) for tail, x in zip(self.end, new)]

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores) -> torch.Tensor:
        if scores.window not in (None, self.size):
            raise ValueError(
                f"the model's attention asks for a window of {scores.window} tokens in a layer that is served with one "
                f"of {self.size}: its family in longstraw/models has to read the size where the model does"
            )
        return window.attend(query, key, value, replace(scores, window=self.size))
