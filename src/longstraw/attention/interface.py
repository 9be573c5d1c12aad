"""The attention function that transformers models call while the engine runs."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from longstraw.attention.scores import Scores

NAME = "longstraw"
PIECE = "longstraw_piece"  # the keyword through which a cache layer reaches the attention function


def forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Hands the call to the cache layer that the model has just updated; returns ([B, T, H, D], None).

    Raises:
        RuntimeError: called without such a layer, with dropout, or with a mask.
    """
    piece = kwargs.get(PIECE)
    if piece is None:
        raise RuntimeError("the longstraw attention runs only inside longstraw.Engine, with its own cache")
    if dropout:
        raise RuntimeError(f"attention dropout {dropout} is active: a recomputed graph would be another function")
    if attention_mask is not None:
        raise RuntimeError("the longstraw attention takes no mask: pieces are causal and unpadded")
    return piece.attend(query, key, value, Scores(scaling, s_aux, softcap, sliding_window)).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(NAME, forward)
