"""Plain PyTorch attention: the oracle that the fast paths are compared with.

Shapes: B rows, T queries, S keys, H query heads, K key/value heads (H a multiple of K), D head size.
"""

from __future__ import annotations

import torch

from longstraw.attention.scores import Scores
from longstraw.precision import wide_dtype


def attend(q_BHTD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, scores: Scores) -> torch.Tensor:
    """Causal attention [B, H, T, D] of the last T of S tokens, differentiable; materialises the scores."""
    num_queries, num_keys = q_BHTD.shape[-2], k_BKSD.shape[-2]
    query = torch.arange(num_keys - num_queries, num_keys, device=q_BHTD.device)[:, None]
    key = torch.arange(num_keys, device=q_BHTD.device)[None]
    visible = key <= query
    if scores.window is not None:
        visible = visible & (key > query - scores.window)
    groups = q_BHTD.shape[1] // k_BKSD.shape[1]
    found = scores.of(q_BHTD @ k_BKSD.repeat_interleave(groups, 1).transpose(-1, -2))
    found = found.masked_fill(~visible, float("-inf"))
    if scores.sinks is not None:
        found = torch.cat([found, scores.sinks[:, None, None].to(found.dtype).expand(*found.shape[:3], 1)], -1)
    weights = found.softmax(-1)[..., :num_keys]
    return weights @ v_BKSD.repeat_interleave(groups, 1)


def part_forward(
    q_BHTD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, scores: Scores, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One part of an attention split by keys: its output [B, H, T, D] and log-sum-exp [B, H, T].

    Args:
        scores: its sinks and window are not the part's.
        causal: the queries are those of the last T of the S tokens, and see no later one.
    """
    groups = q_BHTD.shape[1] // k_BKSD.shape[1]
    products = q_BHTD @ k_BKSD.repeat_interleave(groups, 1).transpose(-1, -2)
    found = scores.of(products.to(wide_dtype(products.dtype)))
    if causal:
        found = found.masked_fill(_future(found), float("-inf"))
    lse = found.logsumexp(-1)
    weights = (found - lse[..., None]).exp().to(v_BKSD.dtype)
    return weights @ v_BKSD.repeat_interleave(groups, 1), lse


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
    """The part's gradients (dq, dk, dv), given the output and log-sum-exp of the *whole* attention.

    With p = exp(s - lse) and delta = sum(grad * out), both global, the parts' dq add up to the whole's, and dk, dv of
    a part are already the whole's (Dao et al., FlashAttention, arXiv 2205.14135, section 3.1 and appendix B).
    """
    wide = wide_dtype(q_BHTD.dtype)
    groups = q_BHTD.shape[1] // k_BKSD.shape[1]
    k_BHSD, v_BHSD = (x.repeat_interleave(groups, 1) for x in (k_BKSD, v_BKSD))
    found = scores.of((q_BHTD @ k_BHSD.transpose(-1, -2)).to(wide))
    slope = scores.slope(found)
    if causal:
        found = found.masked_fill(_future(found), float("-inf"))
    weights = (found - lse_BHT[..., None]).exp()
    delta = (grad_BHTD.to(wide) * out_BHTD.to(wide)).sum(-1, keepdim=True)
    grad_products = weights * ((grad_BHTD @ v_BHSD.transpose(-1, -2)).to(wide) - delta) * slope
    grad_products = grad_products.to(q_BHTD.dtype)
    grad_q = grad_products @ k_BHSD
    grad_k = (grad_products.transpose(-1, -2) @ q_BHTD).unflatten(1, (-1, groups)).sum(2)
    grad_v = (weights.to(q_BHTD.dtype).transpose(-1, -2) @ grad_BHTD).unflatten(1, (-1, groups)).sum(2)
    return grad_q, grad_k, grad_v


def _future(scores: torch.Tensor) -> torch.Tensor:
    """Which of [..., T, S] lie after their query, where the queries are the last T of S tokens."""
    num_queries, num_keys = scores.shape[-2:]
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=scores.device).triu(1 + num_keys - num_queries)
