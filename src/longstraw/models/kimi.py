"""Kimi Linear: Kimi Delta Attention (arXiv 2510.26692), and multi-head latent attention every few layers.

Kimi Delta Attention is a gated delta rule whose decay is a number a key channel; see `delta_rule`. The latent attention
is the one of `mla`, without positions: the part of a key that would be rotated is used as it is.

Shapes: B rows, T tokens, E hidden size, H heads of size D, for keys and values alike.
"""

from __future__ import annotations

from typing import Any

import torch

from longstraw.models import delta_rule, mla, short_convolution
from longstraw.models.family import Family, Layer, by_kind, register
from longstraw.models.short_convolution import Kernels
from longstraw.precision import wide_dtype
from longstraw.state.latent import LatentChain
from longstraw.state.recurrent import RecurrentChain


def forward(
    self: Any, hidden_states: torch.Tensor, cache: Any = None, attention_mask: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    """The stock delta attention's arguments and result [B, T, E]. Pieces are unpadded: no mask applies."""
    shapes = [(self.num_heads, self.head_dim)] * 3
    kernels = Kernels.of(self.conv1d, shapes, self.activation)

    parts_BTHD, g_BTHD, beta_BTH = project(self, hidden_states)
    out_BTHD = mix(cache.layers[self.layer_idx], parts_BTHD, g_BTHD, beta_BTH, kernels)
    return combine(self, out_BTHD, hidden_states)


def project(attention: Any, hidden_BTE: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Token by token: queries, keys and values [B, T, H, D], decays [B, T, H, D] (float32), betas [B, T, H]."""
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    parts = [projection(hidden_BTE).unflatten(-1, (-1, attention.head_dim)) for projection in projections]
    return parts, attention.forget_gate(hidden_BTE), attention.b_proj(hidden_BTE).sigmoid()


def mix(
    piece: Any, parts_BTHD: list[torch.Tensor], g_BTHD: torch.Tensor, beta_BTH: torch.Tensor, kernels: Kernels
) -> torch.Tensor:
    """All that mixes tokens, head by head: the convolution and the recurrence; outputs [B, T, H, D].

    Args:
        piece: gives the tail and the state [B, H, D, D] before the piece and takes those after it.
        parts_BTHD: queries, keys and values.
    """
    dtype = parts_BTHD[0].dtype
    wide = wide_dtype(dtype)
    q, k, v = (part.to(wide) for part in short_convolution.convolve(piece, parts_BTHD, kernels))
    q, k = delta_rule.unit(q) * q.shape[-1] ** -0.5, delta_rule.unit(k)
    state = piece.recurrent_states[0]
    g, beta = (piece.context.to_heads(x.to(wide), beta_BTH.shape[2]) for x in (g_BTHD, beta_BTH))
    out = delta_rule.scan(q, k, v, g, beta, state, piece.update_recurrent_state)
    return piece.context.to_tokens(out.to(dtype), beta_BTH.shape[2])


def combine(attention: Any, out_BTHD: torch.Tensor, hidden_BTE: torch.Tensor) -> torch.Tensor:
    """Token by token: the gated norm and the output projection."""
    gate_BTHD = attention.g_b_proj(attention.g_a_proj(hidden_BTE)).unflatten(-1, (-1, attention.head_dim))
    return attention.o_proj(attention.o_norm(out_BTHD, gate_BTHD).flatten(2))


def layers(config: Any) -> list[Layer]:
    """Kimi Delta Attention, or latents."""
    kinds = {"linear_attention": Layer(RecurrentChain, forward), "full_attention": Layer(LatentChain, mla.forward)}
    return by_kind(kinds, config.layer_types)


register(Family(("kimi_linear",), layers))
