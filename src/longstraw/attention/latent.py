"""Attention of every query to all latents before it, over pages, with page-wise gradients: multi-head latent attention
without an indexer.

In a piece, latents are expanded to keys and values a tile of tokens at a time, k = [W_k c, r] and v = W_v c
(DeepSeek-V2, arXiv 2405.04434, section 2.1.2); tiles are merged by log-sum-exp, as in `parts`. One query a row, as in
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

from longstraw.attention import reference
from longstraw.attention.parts import Merge, Queries
from longstraw.attention.scores import Scores
from longstraw.pages import Page
from longstraw.pages.prefix import Prefix
from longstraw.precision import wide_dtype

_TILE_BYTES = 64 << 20  # expanded keys and values of one tile


def attend(
    q_BTHD: torch.Tensor,
    q_rope_BTHR: torch.Tensor,
    w_k_HDC: torch.Tensor,
    w_v_HVC: torch.Tensor,
    piece_BTE: torch.Tensor,
    prefix: Prefix,
    scores: Scores,
) -> torch.Tensor:
    """Output [B, T, H, V]: causal within the piece, all of the pages before it.

    Gradients reach both parts of the query, the weights and the piece's latents through autograd, and pages through
    `prefix.accumulate`.

    Args:
        prefix: pages (latents [R, S, E],) of the tokens before, R = 1 (shared by all rows) or R = B.
    """
    return _LatentAttention.apply(q_BTHD, q_rope_BTHR, w_k_HDC, w_v_HVC, piece_BTE, prefix, scores)


@torch.no_grad()
def decode(
    q_B1HD: torch.Tensor,
    q_rope_B1HR: torch.Tensor,
    w_k_HDC: torch.Tensor,
    w_v_HVC: torch.Tensor,
    grown_BSE: torch.Tensor,
    prefix: Prefix,
    scores: Scores,
) -> torch.Tensor:
    """Output [B, 1, H, V] of the last grown token's query to the pages and all grown tokens, without a graph."""
    wide = wide_dtype(q_B1HD.dtype)
    rank = w_k_HDC.shape[2]
    latent_HBC = q_B1HD[:, 0].transpose(0, 1).to(wide) @ w_k_HDC.to(wide)
    query_BHE = torch.cat([latent_HBC.transpose(0, 1), q_rope_B1HR[:, 0].to(wide)], -1)
    queries, merged = Queries(query_BHE[:, None], scores), Merge(query_BHE.shape[1])  # H queries of one head

    def add(tokens_RSE: torch.Tensor) -> None:
        tokens_R1SE = tokens_RSE.to(wide)[:, None]
        merged.add(*queries.forward(tokens_R1SE, tokens_R1SE[..., :rank], kernel=reference.part_forward))

    if prefix.context.counts_own:
        add(grown_BSE)
    for _, (tokens_RSE,) in prefix.stream():
        add(tokens_RSE)
    out_B1HC, _ = merged.close(prefix.context, queries, scores)
    out_HBV = out_B1HC[:, 0].transpose(0, 1) @ w_v_HVC.to(wide).transpose(1, 2)
    return out_HBV.transpose(0, 1)[:, None].to(q_B1HD.dtype)


class _LatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        q_rope: torch.Tensor,
        w_k: torch.Tensor,
        w_v: torch.Tensor,
        piece: torch.Tensor,
        prefix: Prefix,
        scores: Scores,
    ) -> torch.Tensor:
        expansion = _Expansion(w_k, w_v, q, q_rope)
        context = prefix.context
        queries = Queries(context.gather(expansion.query, 2), scores)
        merged = Merge(queries.num_queries)
        merged.reserve(queries.q_BHTD, expansion.wide)
        for _, _, tokens, parts in _tiles(expansion, piece, prefix, queries.num_queries):
            k, v = expansion.expand(tokens)
            for part, causal in parts:
                merged.add(*queries.of(part).forward(k, v, causal), part)
        out, lse = merged.close(context, queries, scores)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, q_rope, w_k, w_v, piece, out, lse)
        ctx.prefix, ctx.scores = prefix, scores
        return out[..., : w_v.shape[1]].transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        q, q_rope, w_k, w_v, piece, out, lse = ctx.saved_tensors
        expansion = _Expansion(w_k, w_v, q, q_rope)
        context = ctx.prefix.context
        grad = pad(grads[0].transpose(1, 2), (0, expansion.size - w_v.shape[1])).contiguous()
        everyone = [context.gather(x, 2) for x in (expansion.query, grad, out, lse)]
        queries = Queries(everyone[0], ctx.scores, *everyone[1:])
        grad_query, grad_w_k, grad_w_v, grad_piece = (
            torch.zeros(x.shape, dtype=expansion.wide, device=x.device) for x in (everyone[0], w_k, w_v, piece)
        )
        for page, first, tokens, parts in _tiles(expansion, piece, ctx.prefix, queries.num_queries):
            k, v = expansion.expand(tokens)
            grad_k, grad_v = torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
            for part, causal in parts:
                found_q, found_k, found_v = queries.of(part).backward(k, v, causal)
                grad_query[:, :, part] += found_q
                grad_k += found_k
                grad_v += found_v
            last = first + tokens.shape[1]
            grad_tokens = expansion.pull_back(tokens, grad_k, grad_v, grad_w_k, grad_w_v)
            if page is None:
                grad_piece[:, first:last] = grad_tokens
                continue
            if first == 0:
                grad_page = grad_tokens.new_empty(page.rows, page.num_tokens, piece.shape[2])
            grad_page[:, first:last] = grad_tokens
            if last == page.num_tokens:
                ctx.prefix.accumulate(page, lambda found=grad_page: (found,))
        grad_query = context.scatter_sum(grad_query, 2)
        grad_q, grad_q_rope, _ = grad_query.transpose(1, 2).split(expansion.sizes, -1)
        found = zip((grad_q, grad_q_rope, grad_w_k, grad_w_v, grad_piece), (q, q_rope, w_k, w_v, piece))
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
        self.query = pad(torch.cat([q, q_rope.to(q.dtype)], -1), (0, self.sizes[2]))
        self.query = self.query.transpose(1, 2).contiguous()

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
    expansion: _Expansion, piece_BTE: torch.Tensor, prefix: Prefix, num_queries: int
) -> Iterator[tuple[Page | None, int, torch.Tensor, list[tuple[slice, bool]]]]:
    """Tiles of tokens: (their page, None for the piece; first token in it; latents; who attends to them).

    Who attends: slices of queries, with whether the part is square and causal.
    """
    token_bytes = 2 * expansion.num_heads * expansion.size * expansion.wide.itemsize
    before, num_tokens = prefix.context.own_start - prefix.context.start, piece_BTE.shape[1]
    size = max(1, _TILE_BYTES // (token_bytes * piece_BTE.shape[0]))
    for first in range(0, num_tokens, size):
        last = min(first + size, num_tokens)
        parts = [(slice(before + first, before + last), True)]
        parts += [(slice(before + last, num_queries), False)] if before + last < num_queries else []
        yield None, first, piece_BTE[:, first:last], parts
    for page, (tokens_RSE,) in prefix.stream():
        size = max(1, _TILE_BYTES // (token_bytes * page.rows))
        for first in range(0, page.num_tokens, size):
            yield page, first, tokens_RSE[:, first : first + size], [(slice(0, num_queries), False)]
