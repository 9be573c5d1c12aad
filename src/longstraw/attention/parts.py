"""An attention in parts: the piece's own tokens, and each page before them.

Each part gives an output and a log-sum-exp; merging by log-sum-exp is exact. In the backward pass each part is
recomputed with the whole's output and log-sum-exp, so that the parts' query gradients add up and key and value
gradients are the whole's already (Dao et al., arXiv 2205.14135, section 3.1 and appendix B).

Shapes: B rows, T queries, S keys of a part, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from longstraw.attention import kernels
from longstraw.attention.scores import Scores
from longstraw.pages.prefix import Prefix
from longstraw.parallel.context import Context
from longstraw.precision import wide_dtype

Part = tuple[torch.Tensor, torch.Tensor]  # output [B, H, T, D], log-sum-exp [B, H, T]


class Queries:
    """A piece's queries, as each part wants them: B rows side by side, or as one where all rows share the part's keys.

    Args:
        q_BHTD: the queries.
        scores: see `Scores`.
        grad_BHTD: the gradient of the whole's output, for `backward`, as the next two.
        out_BHTD: the whole's output.
        lse_BHT: the whole's log-sum-exp.
    """

    def __init__(
        self,
        q_BHTD: torch.Tensor,
        scores: Scores,
        grad_BHTD: torch.Tensor | None = None,
        out_BHTD: torch.Tensor | None = None,
        lse_BHT: torch.Tensor | None = None,
    ) -> None:
        self.q_BHTD = q_BHTD
        self.rows, _, self.num_queries, _ = q_BHTD.shape
        self._scores = scores
        self._given = (q_BHTD, grad_BHTD, out_BHTD, None if lse_BHT is None else lse_BHT[..., None])
        self._as_one: tuple[torch.Tensor | None, ...] | None = None

    def of(self, part: slice) -> Queries:
        """Some of the queries."""
        if part == slice(0, self.num_queries):
            return self
        q, grad, out, lse = (None if x is None else x[:, :, part].contiguous() for x in self._given)
        assert q is not None
        return Queries(q, self._scores, grad, out, None if lse is None else lse[..., 0])

    def forward(
        self,
        k_BKSD: torch.Tensor,
        v_BKSD: torch.Tensor,
        causal: bool = False,
        kernel: Callable[..., Part] = kernels.part_forward,
    ) -> Part:
        """The part's output and log-sum-exp.

        Args:
            k_BKSD: B rows, or one that all rows of queries share.
            causal: query t sees keys 0 to t; T must equal S. Otherwise every query sees every key.
        """
        q, *_ = self._for(k_BKSD)
        out, lse = kernel(q, k_BKSD, v_BKSD, self._scores, causal)
        return self._rows_of(out), self._rows_of(lse[..., None])[..., 0]

    def backward(
        self, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, causal: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The part's share of dq [B, H, T, D], and its dk and dv, of the keys' shape."""
        q, grad, out, lse = self._for(k_BKSD)
        assert grad is not None and out is not None and lse is not None
        dq, dk, dv = kernels.part_backward(grad, q, k_BKSD, v_BKSD, out, lse[..., 0], self._scores, causal)
        return self._rows_of(dq), dk, dv

    def _for(self, k_BKSD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if k_BKSD.shape[0] == self.rows:
            return self._given
        if self._as_one is None:
            self._as_one = tuple(None if x is None else x.transpose(0, 1).flatten(1, 2)[None] for x in self._given)
        return self._as_one

    def _rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """[B, H, T, ...] of what came from one row or from B."""
        return x if x.shape[0] == self.rows else x[0].unflatten(1, (self.rows, -1)).transpose(0, 1)


class Merge:
    """A running attention over parts, empty at first.

    Attributes:
        out: [B, H, T, D] in float32 at least.
        lse: [B, H, T]; -inf for a query that no part was for.
    """

    out: torch.Tensor
    lse: torch.Tensor

    def __init__(self, num_queries: int) -> None:
        self._num_queries = num_queries
        self._empty = True

    def reserve(self, like_BHTD: torch.Tensor, dtype: torch.dtype) -> None:
        """Makes room for all queries at once, where parts are for some of them."""
        self._empty = False
        self.out = torch.zeros(like_BHTD.shape, dtype=dtype, device=like_BHTD.device)
        self.lse = torch.full(like_BHTD.shape[:3], float("-inf"), dtype=dtype, device=like_BHTD.device)

    def add(self, out: torch.Tensor, lse: torch.Tensor, part: slice = slice(None)) -> None:
        """Merges another part: o = sum_i o_i exp(lse_i - lse), lse = log sum_i exp(lse_i).

        Args:
            part: the queries that it is for.
        """
        out = out if out.dtype == lse.dtype else out.to(lse.dtype)
        whole = out.shape[2] == self._num_queries
        if self._empty:
            if whole:
                self._empty = False
                self.out, self.lse = out, lse
                return
            self.reserve(out[:, :, :1].expand(-1, -1, self._num_queries, -1), lse.dtype)
        before_out, before_lse = (self.out, self.lse) if whole else (self.out[:, :, part], self.lse[:, :, part])
        total = torch.logaddexp(before_lse, lse)
        merged = before_out * (before_lse - total).exp()[..., None]
        merged = merged.addcmul_(out.to(total.dtype), (lse - total).exp()[..., None])
        if whole:
            self.out, self.lse = merged, total
        else:
            self.out[:, :, part], self.lse[:, :, part] = merged, total

    def add_pages(self, queries: Queries, prefix: Prefix, dtype: torch.dtype) -> None:
        """Merges every page (k, v) of a prefix, computed in `dtype`, without a graph."""
        for _, (k, v) in prefix.stream():
            self.add(*queries.forward(k.to(dtype), v.to(dtype)))

    def close(self, context: Context, queries: Queries, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp of this rank's queries, with what other ranks found for them, and with the sinks: the
        part without a value, whose logits take their share of every query's softmax."""
        if self._empty:
            self.reserve(queries.q_BHTD, wide_dtype(queries.q_BHTD.dtype))
        out, lse = context.merge(self.out, self.lse)
        if scores.sinks is None:
            return out, lse
        total = torch.logaddexp(lse, scores.sinks.to(lse.dtype)[:, None])
        return out * (lse - total).exp()[..., None], total


class QueryGradient:
    """A running sum of the parts' query gradients, [B, H, T, D] in float32 at least."""

    def __init__(self, queries: Queries) -> None:
        self._queries = queries
        self._sum: torch.Tensor | None = None

    def add(self, dq_BHTD: torch.Tensor, part: slice = slice(None)) -> None:
        """Adds a part's; `part` are the queries that it is for."""
        whole = dq_BHTD.shape[2] == self._queries.num_queries
        if self._sum is None and whole:
            self._sum = dq_BHTD.to(wide_dtype(dq_BHTD.dtype))
        else:
            (self.sum if whole else self.sum[:, :, part]).add_(dq_BHTD)

    @property
    def sum(self) -> torch.Tensor:
        """Zeros where there was no part."""
        if self._sum is None:
            q_BHTD = self._queries.q_BHTD
            self._sum = torch.zeros(q_BHTD.shape, dtype=wide_dtype(q_BHTD.dtype), device=q_BHTD.device)
        return self._sum


def own_part(context: Context, num_queries: int, num_own: int) -> list[tuple[slice, bool]]:
    """Who of a piece's queries attends to the `num_own` tokens of the piece that this rank has: [(queries, causal)].

    Those of the same tokens do so causally, those of later ones to all.
    """
    first = context.own_start - context.start
    last = first + num_own
    parts = [(slice(first, last), True), (slice(last, num_queries), False)]
    return [(part, causal) for part, causal in parts if num_own and part.start < part.stop]


def sinks_gradient(
    scores: Scores, grad_BHTD: torch.Tensor, out_BHTD: torch.Tensor, lse_BHT: torch.Tensor
) -> torch.Tensor | None:
    """[H], the gradient of the sinks: -sum over queries of exp(sink - lse) sum(grad * out); None without sinks."""
    if scores.sinks is None:
        return None
    weight = (scores.sinks.to(lse_BHT.dtype)[:, None] - lse_BHT).exp()
    delta = (grad_BHTD.to(lse_BHT.dtype) * out_BHTD.to(lse_BHT.dtype)).sum(-1)
    return -(weight * delta).sum((0, 2)).to(scores.sinks.dtype)
