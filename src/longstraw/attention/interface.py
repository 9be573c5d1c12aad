"""The attention function that transformers models call while the engine runs."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from longstraw.attention.keywords import served

NAME = "longstraw"
PIECE = "longstraw_piece"  # the keyword through which a cache layer reaches the attention function


def forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Hands the call to the cache layer that the model has just updated; returns ([B, T, H, D], None).

    Raises:
        RuntimeError: called without such a layer.
        ValueError: a mask, dropout, or another keyword that is not served: see `keywords.served`.
    """
    piece = kwargs.pop(PIECE, None)
    if piece is None:
        raise RuntimeError("the longstraw attention runs only inside longstraw.Engine, with its own cache")
    scores = served(module, kwargs, query.shape[-1], attention_mask)
    return piece.attend(query, key, value, scores).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(NAME, forward)
