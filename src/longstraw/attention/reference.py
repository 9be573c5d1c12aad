"""Plain PyTorch attention: the oracle that the fast paths are compared with.

Shapes: B rows, T queries, S keys, H query heads, K key/value heads (H a multiple of K), D head size.
"""

from __future__ import annotations

import torch

from longstraw.precision import wide_dtype


def attend(
    q_BHTD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of the last T of S tokens; materialises the scores.

    Args:
        window: how many tokens a query sees, itself included; None for all before it.

    Returns:
        [B, H, T, D], differentiable.
    """
    num_queries, num_keys = q_BHTD.shape[-2], k_BKSD.shape[-2]
    query = torch.arange(num_keys - num_queries, num_keys, device=q_BHTD.device)[:, None]
    key = torch.arange(num_keys, device=q_BHTD.device)[None]
    visible = key <= query
    if window is not None:
        visible = visible & (key > query - window)
    groups = q_BHTD.shape[1] // k_BKSD.shape[1]
    scores = q_BHTD @ k_BKSD.repeat_interleave(groups, 1).transpose(-1, -2) * scale
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return weights @ v_BKSD.repeat_interleave(groups, 1)


def part_forward(
    q_BHTD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One part of an attention split by keys: its output [B, H, T, D] and log-sum-exp [B, H, T]."""
    groups = q_BHTD.shape[1] // k_BKSD.shape[1]
    scores = q_BHTD @ k_BKSD.repeat_interleave(groups, 1).transpose(-1, -2)
    scores = scores.to(wide_dtype(scores.dtype)) * scale
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().to(v_BKSD.dtype)
    return weights @ v_BKSD.repeat_interleave(groups, 1), lse


def part_backward(
    grad_BHTD: torch.Tensor,
    q_BHTD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    out_BHTD: torch.Tensor,
    lse_BHT: torch.Tensor,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The part's gradients (dq, dk, dv), given the output and log-sum-exp of the *whole* attention.

    With p = exp(s - lse) and delta = sum(grad * out), both global, the parts' dq add up to the whole's, and dk, dv of
    a part are already the whole's (Dao et al., FlashAttention, arXiv 2205.14135, section 3.1 and appendix B).
    """
    wide = wide_dtype(q_BHTD.dtype)
    groups = q_BHTD.shape[1] // k_BKSD.shape[1]
    k_BHSD, v_BHSD = (x.repeat_interleave(groups, 1) for x in (k_BKSD, v_BKSD))
    scores = (q_BHTD @ k_BHSD.transpose(-1, -2)).to(wide) * scale
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    weights = (scores - lse_BHT[..., None]).exp()
    delta = (grad_BHTD.to(wide) * out_BHTD.to(wide)).sum(-1, keepdim=True)
    grad_scores = weights * ((grad_BHTD @ v_BHSD.transpose(-1, -2)).to(wide) - delta) * scale
    grad_scores = grad_scores.to(q_BHTD.dtype)
    grad_q = grad_scores @ k_BHSD
    grad_k = (grad_scores.transpose(-1, -2) @ q_BHTD).unflatten(1, (-1, groups)).sum(2)
    grad_v = (weights.to(q_BHTD.dtype).transpose(-1, -2) @ grad_BHTD).unflatten(1, (-1, groups)).sum(2)
    return grad_q, grad_k, grad_v
