"""Full attention: every token's key and value.

Shapes: B rows, T tokens of the piece, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from longstraw.attention import paged
from longstraw.attention.interface import PIECE
from longstraw.attention.scores import Scores
from longstraw.state.appended import AppendedChain, AppendedPiece


class KVPiece(AppendedPiece, CacheLayerMixin):
    """Takes the tokens' keys and values [B, K, T, D], and attends over the pages before them."""

    def update(  # type: ignore[override]
        self, key_states: torch.Tensor, value_states: torch.Tensor, kwargs: dict[str, Any], **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kwargs[PIECE] = self
        (held,) = self.extend((key_states, value_states))
        assert held is not None
        return held[0], held[1]

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores) -> torch.Tensor:
        self.refuse_window(scores.window)
        return (paged.decode if self.grows else paged.attend)(query, key, value, self.prefixes[0], scores)


class KVChain(AppendedChain):
    """See `AppendedChain`."""

    columns = ("kv",)
    piece = KVPiece
