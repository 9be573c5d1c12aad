"""PyTorch's own flash kernels as parts of an attention: each returns its log-sum-exp, its backward takes the whole's.

Shapes as in `reference`. On CPU the kernels serve float64, float32 and bfloat16; on CUDA float16 and bfloat16. Other
dtypes there, and scores with a soft-cap everywhere, take the plain reference in tiles of queries.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from longstraw.attention import reference
from longstraw.attention.deterministic import deterministic
from longstraw.attention.scores import Scores

_TILE_BYTES = 256 << 20  # scores of one tile of queries in the plain path
_LEAST_SHARE = 256  # queries

_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def part_forward(
    q_BHTD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, scores: Scores, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, H, T, D] and log-sum-exp [B, H, T] of the attention to these keys alone.

    Args:
        scores: its sinks and window are not the part's.
        causal: query t sees keys 0 to t; T must equal S. Otherwise every query sees every key.

    Raises:
        ValueError: no query, no key, or row counts that differ: the kernels would read out of bounds.
    """
    _guard(q_BHTD, k_BKSD, v_BKSD, causal)
    if q_BHTD.device.type == "cpu" and scores.softcap is None:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHTD, k_BKSD, v_BKSD, 0.0, causal, scale=scores.scale
        )
    if _cuda_flash(q_BHTD) and scores.softcap is None:
        q, k, v = (x.transpose(1, 2) for x in (q_BHTD, k_BKSD, v_BKSD))
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scores.scale
        )
        return out.transpose(1, 2), lse
    found = [
        reference.part_forward(q_BHTD[:, :, own], k_BKSD[:, :, seen], v_BKSD[:, :, seen], scores, causal)
        for own, seen in _tiles(q_BHTD, k_BKSD, causal)
    ]
    return torch.cat([out for out, _ in found], 2), torch.cat([lse for _, lse in found], 2)


def part_backward(
    grad_BHTD: torch.Tensor,
    q_BHTD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    out_BHTD: torch.Tensor,
    lse_BHT: torch.Tensor,
    scores: Scores,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of the part, from the output and log-sum-exp of the whole attention: see `reference`."""
    _guard(q_BHTD, k_BKSD, v_BKSD, causal)
    if q_BHTD.device.type == "cpu" and scores.softcap is None:
        num_shares = _shares(q_BHTD, k_BKSD)
        if num_shares > 1:
            return _shared_backward(num_shares, grad_BHTD, q_BHTD, k_BKSD, v_BKSD, out_BHTD, lse_BHT, scores, causal)
        return _cpu_backward(grad_BHTD, q_BHTD, k_BKSD, v_BKSD, out_BHTD, lse_BHT, 0.0, causal, scale=scores.scale)
    if _cuda_flash(q_BHTD) and scores.softcap is None:
        grad, q, k, v, out = (x.transpose(1, 2) for x in (grad_BHTD, q_BHTD, k_BKSD, v_BKSD, out_BHTD))
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the dropout state, which nothing reads here
        lengths = (None, None, q.shape[1], k.shape[1])
        with deterministic():
            gradients = torch.ops.aten._flash_attention_backward(
                grad, q, k, v, out, lse_BHT, *lengths, 0.0, causal, unused, unused, scale=scores.scale
            )
        grad_q, grad_k, grad_v = (g.transpose(1, 2) for g in gradients)
        return grad_q, grad_k, grad_v
    grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q_BHTD, k_BKSD, v_BKSD))
    for own, seen in _tiles(q_BHTD, k_BKSD, causal):
        grad, q, out, lse = (x[:, :, own] for x in (grad_BHTD, q_BHTD, out_BHTD, lse_BHT))
        keys, values = k_BKSD[:, :, seen], v_BKSD[:, :, seen]
        dq, dk, dv = reference.part_backward(grad, q, keys, values, out, lse, scores, causal)
        grad_q[:, :, own] = dq
        grad_k[:, :, seen] += dk
        grad_v[:, :, seen] += dv
    return grad_q, grad_k, grad_v


def _shares(q_BHTD: torch.Tensor, k_BKSD: torch.Tensor) -> int:
    """How many equal shares of its queries go through the CPU's backward kernel as rows of their own.

    The kernel gives a thread one K/V head of one row; a single row of few heads would leave cores idle.
    """
    num_rows, _, num_queries, _ = q_BHTD.shape
    if num_rows > 1:
        return 1
    wanted = min(torch.get_num_threads() // k_BKSD.shape[1], num_queries // _LEAST_SHARE)
    return next((num for num in range(wanted, 1, -1) if num_queries % num == 0), 1)


def _shared_backward(
    num_shares: int,
    grad_BHTD: torch.Tensor,
    q_BHTD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    out_BHTD: torch.Tensor,
    lse_BHT: torch.Tensor,
    scores: Scores,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`part_backward` of a single row, its queries in equal shares side by side.

    The log-sum-exp is the whole attention's, so the parts of any partition of the (query, key) pairs into rectangles
    and causal squares add up. Each share has its own dk and dv until they are summed.
    """
    grad, q, out, lse = (_as_rows(x, num_shares) for x in (grad_BHTD, q_BHTD, out_BHTD, lse_BHT))
    if not causal:
        k, v = (x.expand(num_shares, -1, -1, -1) for x in (k_BKSD, v_BKSD))
        dq, dk, dv = _cpu_backward(grad, q, k, v, out, lse, 0.0, False, scale=scores.scale)
        return dq.transpose(0, 1).flatten(1, 2)[None], dk.sum(0, keepdim=True), dv.sum(0, keepdim=True)
    k, v = (_as_rows(x, num_shares) for x in (k_BKSD, v_BKSD))
    squares = _cpu_backward(grad, q, k, v, out, lse, 0.0, True, scale=scores.scale)
    dq, dk, dv = (x.transpose(0, 1).flatten(1, 2)[None] for x in squares)
    size = q.shape[2]
    for place in range(1, num_shares):
        own, before = slice(place * size, (place + 1) * size), slice(0, place * size)
        grad_q, grad_k, grad_v = part_backward(
            grad_BHTD[:, :, own],
            q_BHTD[:, :, own],
            k_BKSD[:, :, before],
            v_BKSD[:, :, before],
            out_BHTD[:, :, own],
            lse_BHT[:, :, own],
            scores,
            causal=False,
        )
        dq[:, :, own] += grad_q
        dk[:, :, before] += grad_k
        dv[:, :, before] += grad_v
    return dq, dk, dv


def _as_rows(x_1HT: torch.Tensor, num_shares: int) -> torch.Tensor:
    """[1, H, T, ...] as [num_shares, H, T / num_shares, ...], contiguous."""
    return x_1HT[0].unflatten(1, (num_shares, -1)).transpose(0, 1).contiguous()


def _guard(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> None:
    if not q.shape[2] or not k.shape[2]:
        raise ValueError(f"attention needs at least one query and one key, got {q.shape[2]} and {k.shape[2]}")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"queries, keys and values have {q.shape[0]}, {k.shape[0]} and {v.shape[0]} rows")
    if q.shape[1] % k.shape[1] or k.shape[1:3] != v.shape[1:3]:
        raise ValueError(f"head or key counts do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"a causal part is square, got {q.shape[2]} queries and {k.shape[2]} keys")


def _cuda_flash(q: torch.Tensor) -> bool:
    return q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16)


def _tiles(q: torch.Tensor, k: torch.Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Queries of a tile, and the keys that any of them sees."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    size = max(1, _TILE_BYTES // (q.shape[0] * q.shape[1] * num_keys * 8))
    for first in range(0, num_queries, size):
        last = min(first + size, num_queries)
        yield slice(first, last), slice(0, last if causal else num_keys)
