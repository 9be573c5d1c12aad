"""Attention of a live piece over its own tokens and any number of pages, with page-wise gradients.

Each part (the piece itself, causally; every page, without a mask) gives an output and a log-sum-exp; merging by
log-sum-exp is exact. The backward pass streams the pages again and recomputes part by part with the whole's output and
log-sum-exp. Neither pass holds more than a page or two, and the autograd graph holds page handles, not pages.

Shapes: B rows, T live tokens, S tokens of a page, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from longstraw.attention import kernels
from longstraw.pages import Page, PageStore


class Prefix:
    """The pages before a piece, and which of them collect a gradient.

    Args:
        store: holds the pages: (k [R, K, S, D], v [R, K, S, D]) with R = 1, shared by all rows, or R = B.
        pages: in the order of their tokens.
        num_constant: so many of the first pages are constants: no gradient is computed for them.
    """

    def __init__(self, store: PageStore, pages: Sequence[Page], num_constant: int = 0) -> None:
        self.store = store
        self.pages = list(pages)
        self.constant = {id(page) for page in self.pages[:num_constant]}

    def stage(self) -> None:
        """Starts bringing the first page."""
        if self.pages:
            self.store.stage(self.pages[0])

    def wants_gradient(self, page: Page) -> bool:
        return id(page) not in self.constant


def attend(
    q_BHTD: torch.Tensor, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, prefix: Prefix, scale: float
) -> torch.Tensor:
    """Output [B, H, T, D]. Gradients reach q, k and v through autograd, and pages through `prefix.store.accumulate`."""
    return _PagedAttention.apply(q_BHTD, k_BKTD, v_BKTD, prefix, scale)


class _PagedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefix: Prefix, scale: float
    ) -> torch.Tensor:
        k, v = k.to(q.dtype), v.to(q.dtype)
        merged = Merge(*kernels.part_forward(q, k, v, scale, causal=True))
        attend_pages(merged, q, prefix, scale)
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merged.lse)
        ctx.prefix, ctx.scale = prefix, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        prefix, scale = ctx.prefix, ctx.scale
        grad = grads[0].contiguous()
        grad_q, grad_k, grad_v = kernels.part_backward(grad, q, k, v, out, lse, scale, causal=True)
        grad_q = grad_q.to(lse.dtype)
        rows = q.shape[0]
        folded: tuple[torch.Tensor, ...] | None = None
        for page, (page_k, page_v) in prefix.store.stream(prefix.pages):
            fold = page.rows == 1 and rows > 1
            if fold and folded is None:
                folded = (fold_rows(grad), fold_rows(q), fold_rows(out), fold_rows(lse[..., None])[..., 0])
            grad_part, q_part, out_part, lse_part = folded if fold and folded else (grad, q, out, lse)
            page_k, page_v = page_k.to(q.dtype), page_v.to(q.dtype)
            dq, dk, dv = kernels.part_backward(grad_part, q_part, page_k, page_v, out_part, lse_part, scale, False)
            grad_q += unfold_rows(dq, rows) if fold else dq
            if prefix.wants_gradient(page):
                prefix.store.accumulate(page, (dk, dv))
        return grad_q.to(q.dtype), grad_k, grad_v, None, None


class Merge:
    """A running attention over parts: output [B, H, T, D] and log-sum-exp [B, H, T] in float32 at least."""

    def __init__(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        self.out = out if out.dtype == lse.dtype else out.to(lse.dtype)
        self.lse = lse

    def add(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merges another part: o = sum_i o_i exp(lse_i - lse), lse = log sum_i exp(lse_i)."""
        total = torch.logaddexp(self.lse, lse)
        kept = self.out * (self.lse - total).exp()[..., None]
        self.out = kept.addcmul_(out.to(total.dtype), (lse - total).exp()[..., None])
        self.lse = total


def attend_pages(merged: Merge, q_BHTD: torch.Tensor, prefix: Prefix, scale: float) -> None:
    """Merges every page of the prefix into a running attention, without a graph."""
    rows = q_BHTD.shape[0]
    folded = None
    for page, (k, v) in prefix.store.stream(prefix.pages):
        k, v = k.to(q_BHTD.dtype), v.to(q_BHTD.dtype)
        if page.rows == 1 and rows > 1:
            folded = fold_rows(q_BHTD) if folded is None else folded
            out, lse = kernels.part_forward(folded, k, v, scale, causal=False)
            merged.add(unfold_rows(out, rows), unfold_rows(lse[..., None], rows)[..., 0])
        else:
            merged.add(*kernels.part_forward(q_BHTD, k, v, scale, causal=False))


def fold_rows(x_BHTD: torch.Tensor) -> torch.Tensor:
    """[B, H, T, D] -> [1, H, B T, D]: all rows query one shared page."""
    return x_BHTD.transpose(0, 1).flatten(1, 2)[None]


def unfold_rows(x_1HND: torch.Tensor, rows: int) -> torch.Tensor:
    return x_1HND[0].unflatten(1, (rows, -1)).transpose(0, 1)
