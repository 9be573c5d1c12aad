"""Attention of a piece over its own tokens and any number of pages, with page-wise gradients.

The backward pass streams the pages again. Neither pass holds more than a page or two, and the autograd graph holds page
handles, not pages.

Shapes: B rows, T tokens of the piece, S tokens that a decoder grew, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch

from longstraw.attention.parts import Merge, Queries, QueryGradient, own_part, sinks_gradient
from longstraw.attention.scores import Scores
from longstraw.pages.prefix import Prefix


def attend(
    q_BHTD: torch.Tensor, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, prefix: Prefix, scores: Scores
) -> torch.Tensor:
    """Output [B, H, T, D]: causal within the piece, all of the pages (k [R, K, S, D], v [R, K, S, D]) before it.

    Gradients reach q, k, v and the sinks through autograd, and pages through `prefix.accumulate`.
    """
    return _PagedAttention.apply(q_BHTD, k_BKTD, v_BKTD, scores.sinks, prefix, scores)


@torch.no_grad()
def decode(
    q_BH1D: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, prefix: Prefix, scores: Scores
) -> torch.Tensor:
    """Output [B, H, 1, D] of the last grown token's query to the pages and all grown tokens, without a graph."""
    queries, merged = Queries(q_BH1D, scores), Merge(1)
    if prefix.context.counts_own:
        merged.add(*queries.forward(k_BKSD.to(q_BH1D.dtype), v_BKSD.to(q_BH1D.dtype)))
    merged.add_pages(queries, prefix, q_BH1D.dtype)
    return merged.close(prefix.context, queries, scores)[0].to(q_BH1D.dtype)


class _PagedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        prefix: Prefix,
        scores: Scores,
    ) -> torch.Tensor:
        k, v = k.to(q.dtype), v.to(q.dtype)
        context = prefix.context
        queries = Queries(context.gather(q, 2), scores)
        merged = Merge(queries.num_queries)
        for part, causal in own_part(context, queries.num_queries, k.shape[2]):
            merged.add(*queries.of(part).forward(k, v, causal), part)
        merged.add_pages(queries, prefix, q.dtype)
        out, lse = merged.close(context, queries, scores)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.prefix, ctx.scores = prefix, scores
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        prefix, scores = ctx.prefix, ctx.scores
        context = prefix.context
        grad = grads[0].contiguous()
        everyone = [context.gather(x, 2) for x in (q, grad, out, lse)]
        queries = Queries(everyone[0], scores, *everyone[1:])
        total = QueryGradient(queries)
        grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
        for part, causal in own_part(context, queries.num_queries, k.shape[2]):
            dq, dk, dv = queries.of(part).backward(k, v, causal)
            total.add(dq, part)
            grad_k, grad_v = (dk, dv) if causal else (grad_k + dk, grad_v + dv)
        for page, (page_k, page_v) in prefix.stream():
            dq, *gradients = queries.backward(page_k.to(q.dtype), page_v.to(q.dtype))
            total.add(dq)
            prefix.accumulate(page, lambda gradients=gradients: gradients)
        grad_q = context.scatter_sum(total.sum, 2)
        return grad_q.to(q.dtype), grad_k, grad_v, sinks_gradient(scores, grad, out, lse), None, None
