"""Plain PyTorch sparse attention over latents: the oracle that `indexer`, `sparse` and `latent` are compared with.

Shapes: B rows, T queries (the last T of S tokens), S tokens, H heads, D head size without position, R rotary size,
V value size, C latent rank, K chosen tokens a query.
"""

from __future__ import annotations

import torch


def scores(q_THD: torch.Tensor, w_TH: torch.Tensor, k_SD: torch.Tensor) -> torch.Tensor:
    """The indexer's scores [T, S], all pairs at once: sum_h w[t, h] relu(q[t, h] . k[s]).

    Token by token and without matrix products: those add up in an order that may depend on the column, and equal keys
    would score differently.
    """
    q_THD, w_TH = q_THD.to(torch.float32), w_TH.to(torch.float32)
    return torch.stack([(w_TH * (q_THD * k_D).sum(-1).relu()).sum(-1) for k_D in k_SD.to(torch.float32)], -1)


def choose(scores_TS: torch.Tensor, num: int) -> list[list[int]]:
    """For every query, the positions, rising, of the `num` best tokens up to itself: by score, then lower position."""
    before = scores_TS.shape[1] - scores_TS.shape[0]
    chosen = []
    for query, row in enumerate(scores_TS.tolist()):
        visible = range(before + query + 1)
        chosen.append(sorted(sorted(visible, key=lambda s: (-row[s], s))[:num]))
    return chosen


def attend(
    q_BTHD: torch.Tensor,
    q_rope_BTHR: torch.Tensor,
    w_k_HDC: torch.Tensor,
    w_v_HVC: torch.Tensor,
    tokens_BSE: torch.Tensor,
    scale: float,
    chosen_BTK: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention [B, T, H, V] to the chosen tokens, or to all up to the query's own; expands all keys and values.

    Args:
        tokens_BSE: latent and rotary key of every token side by side.
        chosen_BTK: positions, -1 for none.

    Returns:
        Differentiable in every floating-point argument.
    """
    num_queries, num_tokens = q_BTHD.shape[1], tokens_BSE.shape[1]
    rank = w_k_HDC.shape[2]
    latent_BSC, rope_BSR = tokens_BSE[..., :rank], tokens_BSE[..., rank:]
    k_BSHD = torch.einsum("bsc,hdc->bshd", latent_BSC, w_k_HDC)
    v_BSHV = torch.einsum("bsc,hvc->bshv", latent_BSC, w_v_HVC)
    scores_BHTS = torch.einsum("bthd,bshd->bhts", q_BTHD, k_BSHD) + torch.einsum(
        "bthr,bsr->bhts", q_rope_BTHR, rope_BSR
    )
    position = torch.arange(num_tokens, device=q_BTHD.device)
    visible_BTS = (position <= position[num_tokens - num_queries :, None]).expand(q_BTHD.shape[0], -1, -1)
    if chosen_BTK is not None:
        visible_BTS = visible_BTS & (chosen_BTK[..., None] == position).any(2)
    weights_BHTS = (scores_BHTS * scale).masked_fill(~visible_BTS[:, None], float("-inf")).softmax(-1)
    return torch.einsum("bhts,bshv->bthv", weights_BHTS, v_BSHV)
