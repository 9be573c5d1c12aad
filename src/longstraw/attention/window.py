"""Sliding-window attention of a live piece over the carried tail of the window and itself, in tiles of queries.

Shapes: B rows, T live tokens, S = carried + T keys, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

_TILE = 512  # queries; a tile reads window + tile keys


def attend(q_BHTD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, window: int, scale: float) -> torch.Tensor:
    """Output [B, H, T, D], differentiable: each of the last T tokens sees the `window` tokens that end with itself."""
    num_queries, num_keys = q_BHTD.shape[2], k_BKSD.shape[2]
    before = num_keys - num_queries
    outputs = []
    for start in range(0, num_queries, _TILE):
        stop = min(start + _TILE, num_queries)
        first = max(0, before + start - window + 1)
        last = before + stop
        query = torch.arange(before + start, last, device=q_BHTD.device)[:, None]
        key = torch.arange(first, last, device=q_BHTD.device)[None]
        visible = (key <= query) & (key > query - window)
        outputs.append(
            scaled_dot_product_attention(
                q_BHTD[:, :, start:stop],
                k_BKSD[:, :, first:last].to(q_BHTD.dtype),
                v_BKSD[:, :, first:last].to(q_BHTD.dtype),
                attn_mask=visible,
                scale=scale,
                enable_gqa=q_BHTD.shape[1] != k_BKSD.shape[1],
            )
        )
    return torch.cat(outputs, 2)
