"""Sliding-window attention of a piece over the carried tail of the window and itself, in tiles of queries.

Shapes: B rows, T tokens of the piece, S = carried + T keys, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from longstraw.attention import reference
from longstraw.attention.scores import Scores
from longstraw.precision import wide_dtype

_TILE = 512  # queries; a tile reads window + tile keys


def attend(q_BHTD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, scores: Scores) -> torch.Tensor:
    """Output [B, H, T, D], differentiable: each of the last T tokens sees `scores.window` tokens that end with itself.

    Scores with sinks or a soft-cap take plain matrix products, tile by tile.
    """
    return _WindowAttention.apply(q_BHTD, k_BKSD, v_BKSD, scores.sinks, scores)


class _WindowAttention(torch.autograd.Function):
    """The graph holds queries, keys and values alone: a tile is computed once more when it is pulled back."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, scores: Scores
    ) -> torch.Tensor:
        ctx.save_for_backward(q, k, v, sinks)
        ctx.scores = scores
        parts = [
            _tile(q[:, :, queries], k[:, :, keys], v[:, :, keys], scores)
            for queries, keys in _tiles(q.shape[2], k.shape[2], scores.window)
        ]
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, sinks = ctx.saved_tensors
        grad_q = torch.empty_like(q)
        grad_k, grad_v = (torch.zeros_like(x, dtype=wide_dtype(x.dtype)) for x in (k, v))
        grad_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=wide_dtype(sinks.dtype))
        for queries, keys in _tiles(q.shape[2], k.shape[2], ctx.scores.window):
            with torch.enable_grad():
                inputs = (q[:, :, queries], k[:, :, keys], v[:, :, keys], *([] if sinks is None else [sinks]))
                leaves = [x.detach().requires_grad_() for x in inputs]
                scores = replace(ctx.scores, sinks=leaves[3] if sinks is not None else None)
                out = _tile(leaves[0], leaves[1], leaves[2], scores)
            part_q, part_k, part_v, *part_sinks = torch.autograd.grad(out, leaves, grads[0][:, :, queries])
            grad_q[:, :, queries] = part_q
            grad_k[:, :, keys] += part_k
            grad_v[:, :, keys] += part_v
            if grad_sinks is not None:
                grad_sinks += part_sinks[0]
        grad_sinks = None if grad_sinks is None else grad_sinks.to(sinks.dtype)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks, None


def _tiles(num_queries: int, num_keys: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Queries of a tile, and the keys that any of them sees."""
    assert window is not None
    before = num_keys - num_queries
    for start in range(0, num_queries, _TILE):
        stop = min(start + _TILE, num_queries)
        yield slice(start, stop), slice(max(0, before + start - window + 1), before + stop)


def _tile(q_BHTD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, scores: Scores) -> torch.Tensor:
    if scores.sinks is not None or scores.softcap is not None:
        return reference.attend(q_BHTD, k_BKSD.to(q_BHTD.dtype), v_BKSD.to(q_BHTD.dtype), scores)
    num_queries, num_keys = q_BHTD.shape[2], k_BKSD.shape[2]
    query = torch.arange(num_keys - num_queries, num_keys, device=q_BHTD.device)[:, None]
    key = torch.arange(num_keys, device=q_BHTD.device)[None]
    # on CUDA the fused kernels with a mask add up in any order in their backward; matrix products do not
    pulled_back = q_BHTD.device.type == "cuda" and torch.is_grad_enabled()
    with sdpa_kernel(SDPBackend.MATH) if pulled_back else contextlib.nullcontext():
        return scaled_dot_product_attention(
            q_BHTD,
            k_BKSD.to(q_BHTD.dtype),
            v_BKSD.to(q_BHTD.dtype),
            attn_mask=(key <= query) & (key > query - scores.window),
            scale=scores.scale,
            enable_gqa=q_BHTD.shape[1] != k_BKSD.shape[1],
        )
