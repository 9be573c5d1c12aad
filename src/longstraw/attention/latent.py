"""Attention of every query to all latents before it, over pages, with page-wise gradients: multi-head latent attention
without an indexer.

In a piece, latents are expanded to keys and values a tile of tokens at a time, k = [W_k c, r] and v = W_v c
(DeepSeek-V2, arXiv 2405.04434, section 2.1.2); tiles are merged by log-sum-exp, as in `paged`. One query a row, as in
decoding, takes the absorbed form instead, which expands nothing. The graph holds page handles, never a page or its
expansion.

Shapes: B rows, T queries, S tokens of a page or tile, H heads, D query and key size without position, R rotary size,
V value size, C latent rank, E = C + R: one token's latent and rotary key side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import pad

from longstraw.attention import kernels, reference
from longstraw.attention.paged import Merge, Prefix, fold_rows, unfold_rows
from longstraw.pages import Page
from longstraw.precision import wide_dtype

_TILE_BYTES = 64 << 20  # expanded keys and values of one tile


def attend(
    q_BTHD: torch.Tensor,
    q_rope_BTHR: torch.Tensor,
    w_k_HDC: torch.Tensor,
    w_v_HVC: torch.Tensor,
    live_BTE: torch.Tensor,
    prefix: Prefix,
    scale: float,
) -> torch.Tensor:
    """Output [B, T, H, V]: causal within the piece, all of the pages before it.

    Gradients reach both parts of the query, the weights and the live latents through autograd, and pages through
    `prefix.store.accumulate`.

    Args:
        prefix: pages (latents [R, S, E],) of the tokens before, R = 1 (shared by all rows) or R = B.
    """
    return _LatentAttention.apply(q_BTHD, q_rope_BTHR, w_k_HDC, w_v_HVC, live_BTE, prefix, scale)


@torch.no_grad()
def decode(
    q_B1HD: torch.Tensor,
    q_rope_B1HR: torch.Tensor,
    w_k_HDC: torch.Tensor,
    w_v_HVC: torch.Tensor,
    live_BSE: torch.Tensor,
    prefix: Prefix,
    scale: float,
) -> torch.Tensor:
    """Output [B, 1, H, V] of the last live token's query to the pages and all live tokens, without a graph."""
    wide = wide_dtype(q_B1HD.dtype)
    rank = w_k_HDC.shape[2]
    latent_HBC = q_B1HD[:, 0].transpose(0, 1).to(wide) @ w_k_HDC.to(wide)
    query_BHE = torch.cat([latent_HBC.transpose(0, 1), q_rope_B1HR[:, 0].to(wide)], -1)
    query_B1HE = query_BHE[:, None]  # H queries of one head
    merged = Merge(*_absorbed(query_B1HE, live_BSE, scale, rank))
    for page, (tokens_RSE,) in prefix.store.stream(prefix.pages):
        if page.rows == query_B1HE.shape[0]:
            merged.add(*_absorbed(query_B1HE, tokens_RSE, scale, rank))
        else:
            out, lse = _absorbed(fold_rows(query_B1HE), tokens_RSE, scale, rank)
            rows = query_B1HE.shape[0]
            merged.add(unfold_rows(out, rows), unfold_rows(lse[..., None], rows)[..., 0])
    out_HBV = merged.out[:, 0].transpose(0, 1) @ w_v_HVC.to(wide).transpose(1, 2)
    return out_HBV.transpose(0, 1)[:, None].to(q_B1HD.dtype)


def _absorbed(
    query_B1HE: torch.Tensor, tokens_BSE: torch.Tensor, scale: float, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens_B1SE = tokens_BSE.to(query_B1HE.dtype)[:, None]
    return reference.part_forward(query_B1HE, tokens_B1SE, tokens_B1SE[..., :rank], scale, causal=False)


class _LatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        q_rope: torch.Tensor,
        w_k: torch.Tensor,
        w_v: torch.Tensor,
        live: torch.Tensor,
        prefix: Prefix,
        scale: float,
    ) -> torch.Tensor:
        expansion = _Expansion(w_k, w_v, q, q_rope)
        query = expansion.query
        out = torch.zeros(query.shape, dtype=expansion.wide, device=q.device)
        lse = torch.full(query.shape[:3], float("-inf"), dtype=expansion.wide, device=q.device)
        for _, _, tokens, parts in _tiles(expansion, live, prefix):
            k, v = expansion.expand(tokens)
            for part, causal in parts:
                merged = Merge(out[:, :, part], lse[:, :, part])
                merged.add(*_part_forward(query[:, :, part], k, v, scale, causal))
                out[:, :, part], lse[:, :, part] = merged.out, merged.lse
        out = out.to(q.dtype)
        ctx.save_for_backward(q, q_rope, w_k, w_v, live, out, lse)
        ctx.prefix, ctx.scale = prefix, scale
        return out[..., : w_v.shape[1]].transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        q, q_rope, w_k, w_v, live, out, lse = ctx.saved_tensors
        expansion = _Expansion(w_k, w_v, q, q_rope)
        query = expansion.query
        grad = pad(grads[0].transpose(1, 2), (0, expansion.size - w_v.shape[1]))
        grad_query, grad_w_k, grad_w_v, grad_live = (
            torch.zeros(x.shape, dtype=expansion.wide, device=x.device) for x in (query, w_k, w_v, live)
        )
        grad_page: torch.Tensor | None = None
        for page, first, tokens, parts in _tiles(expansion, live, ctx.prefix):
            k, v = expansion.expand(tokens)
            grad_k, grad_v = torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
            for part, causal in parts:
                inputs = [x[:, :, part] for x in (grad, query, out, lse[..., None])]
                found_q, found_k, found_v = _part_backward(inputs, k, v, ctx.scale, causal)
                grad_query[:, :, part] += found_q
                grad_k += found_k
                grad_v += found_v
            last = first + tokens.shape[1]
            grad_tokens = expansion.pull_back(tokens, grad_k, grad_v, grad_w_k, grad_w_v)
            if page is None:
                grad_live[:, first:last] = grad_tokens
            elif ctx.prefix.wants_gradient(page):
                if grad_page is None:
                    grad_page = grad_tokens.new_empty(page.rows, page.num_tokens, live.shape[2])
                grad_page[:, first:last] = grad_tokens
                if last == page.num_tokens:
                    ctx.prefix.store.accumulate(page, (grad_page,))
                    grad_page = None
        grad_q, grad_q_rope, _ = grad_query.transpose(1, 2).split(expansion.sizes, -1)
        found = zip((grad_q, grad_q_rope, grad_w_k, grad_w_v, grad_live), (q, q_rope, w_k, w_v, live))
        return (*(grad.to(x.dtype) for grad, x in found), None, None)


class _Expansion:
    """From latents to keys and values, padded to one size (the kernels know one), and back for gradients."""

    def __init__(self, w_k_HDC: torch.Tensor, w_v_HVC: torch.Tensor, q: torch.Tensor, q_rope: torch.Tensor) -> None:
        self.wide = wide_dtype(q.dtype)
        self.dtype = q.dtype
        self.w_k_HDC, self.w_v_HVC = w_k_HDC.to(self.wide), w_v_HVC.to(self.wide)
        self.num_heads, head, self.rank = w_k_HDC.shape
        self.size = max(head + q_rope.shape[3], w_v_HVC.shape[1])
        self.sizes = [head, q_rope.shape[3], self.size - head - q_rope.shape[3]]
        self.query = pad(torch.cat([q, q_rope.to(q.dtype)], -1), (0, self.sizes[2])).transpose(1, 2)

    def expand(self, tokens_RSE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [R, H, S, size]."""
        latent_R1SC = tokens_RSE[:, None, :, : self.rank].to(self.wide)
        k_RHSD, v_RHSV = (latent_R1SC @ w.transpose(1, 2) for w in (self.w_k_HDC, self.w_v_HVC))
        rope = tokens_RSE[:, None, :, self.rank :].to(self.wide).expand(-1, self.num_heads, -1, -1)
        k = pad(torch.cat([k_RHSD, rope], -1), (0, self.sizes[2]))
        return k.to(self.dtype), pad(v_RHSV, (0, self.size - v_RHSV.shape[3])).to(self.dtype)

    def pull_back(
        self,
        tokens_RSE: torch.Tensor,
        grad_k: torch.Tensor,
        grad_v: torch.Tensor,
        grad_w_k_HDC: torch.Tensor,
        grad_w_v_HVC: torch.Tensor,
    ) -> torch.Tensor:
        """Gradient [R, S, E] of the tokens; adds to those of the weights."""
        latent_NC = tokens_RSE[..., : self.rank].to(self.wide).flatten(0, 1)
        grad_RHSD, grad_rope_RHSR, _ = grad_k.split(self.sizes, -1)
        grad_RHSV = grad_v[..., : self.w_v_HVC.shape[1]]
        grad_w_k_HDC += grad_RHSD.permute(1, 3, 0, 2).flatten(2) @ latent_NC
        grad_w_v_HVC += grad_RHSV.permute(1, 3, 0, 2).flatten(2) @ latent_NC
        grad_latent = grad_RHSD.transpose(1, 2).flatten(2) @ self.w_k_HDC.flatten(0, 1)
        grad_latent += grad_RHSV.transpose(1, 2).flatten(2) @ self.w_v_HVC.flatten(0, 1)
        return torch.cat([grad_latent, grad_rope_RHSR.sum(1)], -1)


def _tiles(
    expansion: _Expansion, live_BTE: torch.Tensor, prefix: Prefix
) -> Iterator[tuple[Page | None, int, torch.Tensor, list[tuple[slice, bool]]]]:
    """Tiles of tokens: (their page, None for the live piece; first token in it; latents; who attends to them).

    Who attends: slices of queries, with whether the part is square and causal.
    """
    token_bytes = 2 * expansion.num_heads * expansion.size * expansion.wide.itemsize
    num_queries = live_BTE.shape[1]
    size = max(1, _TILE_BYTES // (token_bytes * live_BTE.shape[0]))
    for first in range(0, num_queries, size):
        last = min(first + size, num_queries)
        after = [(slice(last, num_queries), False)] if last < num_queries else []
        yield None, first, live_BTE[:, first:last], [(slice(first, last), True), *after]
    for page, (tokens_RSE,) in prefix.store.stream(prefix.pages):
        size = max(1, _TILE_BYTES // (token_bytes * page.rows))
        for first in range(0, page.num_tokens, size):
            yield page, first, tokens_RSE[:, first : first + size], [(slice(0, num_queries), False)]


def _part_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = q.shape[0]
    if k.shape[0] == rows:
        return kernels.part_forward(q.contiguous(), k, v, scale, causal)
    out, lse = kernels.part_forward(fold_rows(q).contiguous(), k, v, scale, causal)
    return unfold_rows(out, rows), unfold_rows(lse[..., None], rows)[..., 0]


def _part_backward(
    inputs: list[torch.Tensor], k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kernels.part_backward`; `inputs` are the gradient, queries, output and log-sum-exp, [B, H, T, ...] each."""
    rows = inputs[0].shape[0]
    shared = k.shape[0] != rows
    grad, q, out, lse = ((fold_rows(x) if shared else x).contiguous() for x in inputs)
    grad_q, grad_k, grad_v = kernels.part_backward(grad, q, k, v, out, lse[..., 0], scale, causal)
    return (unfold_rows(grad_q, rows) if shared else grad_q), grad_k, grad_v
