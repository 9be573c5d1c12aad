"""Attention of every query to the few latents it has chosen, over pages, with page-wise gradients.

Multi-head latent attention in the absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): the part of a query
without position is mapped into the latent space, q W_k, and the weighted latents are mapped back, W_v o, so that keys
and values are never expanded. What a group of queries chose is gathered from the pages into one buffer; the queries
then run in tiles of bounded size. The backward pass gathers again and recomputes tile by tile: the graph holds page
handles, never a gathered latent.

Shapes: B rows, T queries, N queries of all rows, S tokens that the layer holds, K chosen tokens a query, U gathered
tokens, H heads, D head size without position, R rotary size, V value head size, C latent rank, E = C + R: one token's
latent and rotary key side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from longstraw.attention.gather import Gathered, TokenSpace
from longstraw.attention.scores import Scores
from longstraw.pages.prefix import Prefix
from longstraw.precision import wide_dtype

_CPU_BYTES = (256 << 20, 16 << 20)  # what a group of queries gathers, with its gradient; what a tile of them holds
_GPU_BYTES = (4 << 30, 512 << 20)


def attend(
    q_BTHD: torch.Tensor,
    q_rope_BTHR: torch.Tensor,
    w_k_HDC: torch.Tensor,
    w_v_HVC: torch.Tensor,
    held_BSE: torch.Tensor,
    chosen_BTK: torch.Tensor,
    prefix: Prefix,
    scores: Scores,
) -> torch.Tensor:
    """Output [B, T, H, V]; computed in float32 at least.

    Gradients reach both parts of the query, the weights and the latents through autograd, and pages through
    `prefix.accumulate`.

    Args:
        held_BSE: latents of the tokens after the pages; the queries are the last T of the S.
        chosen_BTK: positions, -1 for none, of tokens that the query may see; see `indexer.choose`.
        prefix: pages (latents [R, S, E],) of the tokens before, R = 1 (shared by all rows) or R = B.
    """
    return _SparseAttention.apply(q_BTHD, q_rope_BTHR, w_k_HDC, w_v_HVC, held_BSE, chosen_BTK, prefix, scores)


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        q_rope: torch.Tensor,
        w_k: torch.Tensor,
        w_v: torch.Tensor,
        held: torch.Tensor,
        chosen: torch.Tensor,
        prefix: Prefix,
        scores: Scores,
    ) -> torch.Tensor:
        context = prefix.context
        all_q, all_rope, all_chosen = (context.gather(x, 1) for x in (q, q_rope, chosen))
        work = _Work(all_q, all_rope, w_k, w_v, scores)
        out = torch.zeros(*all_q.shape[:3], w_v.shape[1], dtype=work.dtype, device=q.device)
        lse = torch.full(all_q.shape[:3], float("-inf"), dtype=work.dtype, device=q.device)
        out_NHV, lse_NH = out.flatten(0, 1), lse.flatten(0, 1)
        # a rank may own nothing of what a query chose
        least = float("-inf") if context.size == 1 else torch.finfo(lse.dtype).min
        for gathered, tiles in _groups(work, held, all_chosen, prefix):
            for part, places_NK, seen_NK in tiles:
                tile = work.tile(part, gathered.rows_UE[places_NK], seen_NK)
                lse_NH[part] = tile.scores_NHK.logsumexp(-1)
                latent_NHC = tile.weights(lse_NH[part].clamp(min=least)) @ tile.latent_NKC
                out_NHV[part] = _per_head(latent_NHC, work.w_v_HVC.transpose(1, 2))
        out, lse = (x.transpose(1, 2) for x in context.merge(out.transpose(1, 2), lse.transpose(1, 2)))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, q_rope, w_k, w_v, held, chosen, out, lse)
        ctx.prefix, ctx.scores = prefix, scores
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        q, q_rope, w_k, w_v, held, chosen, out, lse = ctx.saved_tensors
        context, own = ctx.prefix.context, (q, q_rope, w_k, w_v, held)
        q, q_rope, all_chosen, out, lse, grad = (context.gather(x, 1) for x in (q, q_rope, chosen, out, lse, grads[0]))
        work = _Work(q, q_rope, w_k, w_v, ctx.scores)
        rank = w_k.shape[2]
        grad_q, grad_q_rope, grad_w_k, grad_w_v, grad_held = (
            torch.zeros(x.shape, dtype=work.dtype, device=x.device) for x in (q, q_rope, w_k, w_v, held)
        )
        grad_q_NHD, grad_q_rope_NHR = grad_q.flatten(0, 1), grad_q_rope.flatten(0, 1)
        out_NHV, lse_NH, grad_NHV = (x.flatten(0, 1) for x in (out, lse, grad))
        for gathered, tiles in _groups(work, held, all_chosen, ctx.prefix):
            grad_UE = torch.zeros(gathered.rows_UE.shape, dtype=work.dtype, device=q.device)
            for part, places_NK, seen_NK in tiles:
                tile = work.tile(part, gathered.rows_UE[places_NK], seen_NK)
                weights_NHK = tile.weights(lse_NH[part])
                grad_out_NHV = grad_NHV[part].to(work.dtype)
                delta_NH1 = (grad_out_NHV * out_NHV[part]).sum(-1, keepdim=True)
                grad_latent_NHC = _per_head(grad_out_NHV, work.w_v_HVC)
                grad_scores_NHK = grad_latent_NHC @ tile.latent_NKC.transpose(1, 2)
                grad_scores_NHK = grad_scores_NHK.sub_(delta_NH1).mul_(weights_NHK).mul_(ctx.scores.scale)
                grad_query_NHE = grad_scores_NHK @ tile.tokens_NKE
                grad_query_NHC = grad_query_NHE[..., :rank]
                grad_q_NHD[part] = _per_head(grad_query_NHC, work.w_k_HDC.transpose(1, 2))
                grad_q_rope_NHR[part] = grad_query_NHE[..., rank:]
                grad_w_k += work.q_NHD[part].to(work.dtype).permute(1, 2, 0) @ grad_query_NHC.transpose(0, 1)
                grad_w_v += grad_out_NHV.permute(1, 2, 0) @ (weights_NHK @ tile.latent_NKC).transpose(0, 1)
                grad_NKE = grad_scores_NHK.transpose(1, 2) @ tile.query_NHE
                grad_NKE[..., :rank] += weights_NHK.transpose(1, 2) @ grad_latent_NHC
                _add_rows(grad_UE, places_NK, grad_NKE)
            gathered.scatter(grad_UE, grad_held)
        grad_q, grad_q_rope = (context.scatter_sum(x, 1) for x in (grad_q, grad_q_rope))
        found = zip((grad_q, grad_q_rope, grad_w_k, grad_w_v, grad_held), own)
        return (*(grad.to(x.dtype) for grad, x in found), None, None, None)


class _Work:
    """The queries of a call, and the dtype that they compute in."""

    def __init__(
        self, q: torch.Tensor, q_rope: torch.Tensor, w_k: torch.Tensor, w_v: torch.Tensor, scores: Scores
    ) -> None:
        self.dtype = wide_dtype(q.dtype)
        self.q_NHD, self.q_rope_NHR = q.flatten(0, 1), q_rope.flatten(0, 1)
        self.w_k_HDC, self.w_v_HVC = w_k.to(self.dtype), w_v.to(self.dtype)
        self.scores = scores

    def tile(self, part: slice, tokens_NKE: torch.Tensor, seen_NK: torch.Tensor) -> _Tile:
        latent_NHC = _per_head(self.q_NHD[part].to(self.dtype), self.w_k_HDC)
        query_NHE = torch.cat([latent_NHC, self.q_rope_NHR[part].to(self.dtype)], -1)
        tokens_NKE = tokens_NKE.to(self.dtype)
        scores_NHK = (query_NHE @ tokens_NKE.transpose(1, 2)).mul_(self.scores.scale)
        scores_NHK.masked_fill_(~seen_NK[:, None], float("-inf"))
        return _Tile(query_NHE, tokens_NKE, tokens_NKE[..., : latent_NHC.shape[2]], scores_NHK)


@dataclass
class _Tile:
    """A few queries with the tokens they chose."""

    query_NHE: torch.Tensor
    tokens_NKE: torch.Tensor
    latent_NKC: torch.Tensor
    scores_NHK: torch.Tensor

    def weights(self, lse_NH: torch.Tensor) -> torch.Tensor:
        """exp(score - log-sum-exp), in place of the scores."""
        return self.scores_NHK.sub_(lse_NH[..., None]).exp_()


Parts = Iterator[tuple[slice, torch.Tensor, torch.Tensor]]


def _groups(
    work: _Work, held_BSE: torch.Tensor, chosen_BTK: torch.Tensor, prefix: Prefix
) -> Iterator[tuple[Gathered, Parts]]:
    """Groups of queries with what they gathered, and their tiles: (queries, places of their choices, which exist)."""
    gathered_bytes, tile_bytes = _CPU_BYTES if held_BSE.device.type == "cpu" else _GPU_BYTES
    width, num_chosen, num_heads = held_BSE.shape[2], chosen_BTK.shape[2], work.q_NHD.shape[1]
    item = torch.finfo(work.dtype).bits // 8
    tile = max(1, tile_bytes // (item * 2 * (num_chosen * (width + num_heads) + num_heads * width)))
    space = TokenSpace(prefix, held_BSE)
    addresses_NK = space.addresses(chosen_BTK)
    seen_NK = (chosen_BTK.flatten(0, 1) >= 0) & space.owns(addresses_NK)
    num_queries = addresses_NK.shape[0]
    room = gathered_bytes // (2 * item * width)  # tokens
    group = num_queries if space.size <= room else max(1, room // num_chosen)
    for first in range(0, num_queries, group):
        last = min(first + group, num_queries)
        gathered = Gathered(space, addresses_NK[first:last], seen_NK[first:last])
        if not gathered.rows_UE.shape[0]:
            continue

        def tiles(first: int = first, last: int = last, places_NK: torch.Tensor = gathered.places_NK) -> Parts:
            for begin in range(first, last, tile):
                part = slice(begin, min(begin + tile, last))
                yield part, places_NK[part.start - first : part.stop - first], seen_NK[part]

        yield gathered, tiles()


def _per_head(x_NHA: torch.Tensor, w_HAB: torch.Tensor) -> torch.Tensor:
    """[N, H, B]: every head's numbers through the head's own matrix."""
    return (x_NHA.transpose(0, 1) @ w_HAB).transpose(0, 1)


def _add_rows(into_UE: torch.Tensor, places_NK: torch.Tensor, rows_NKE: torch.Tensor) -> None:
    """Sums rows into their places, in a fixed order: on a GPU `index_add_` would add in any."""
    places, rows = places_NK.flatten(), rows_NKE.flatten(0, 1)
    if into_UE.device.type == "cpu":
        into_UE.index_add_(0, places, rows)
    else:
        into_UE.index_put_((places.long(),), rows, accumulate=True)
