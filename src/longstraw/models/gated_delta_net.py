"""GatedDeltaNet with attention every few layers: Qwen3-Next, Qwen3.5/3.6 and OLMo Hybrid.

Gated Delta Networks (arXiv 2412.06464): a gated delta rule whose decay is a number a head; see `delta_rule`. The
families differ in how they project, and in the names of what they project with.

Shapes: B rows, T tokens, E hidden size, K key heads of size D, H value heads of size V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import softplus

from longstraw.models import delta_rule, short_convolution
from longstraw.models.family import Family, Layer, by_kind, register
from longstraw.models.short_convolution import Kernels
from longstraw.precision import wide_dtype
from longstraw.state.kv import KVChain
from longstraw.state.recurrent import RecurrentChain


@dataclass(frozen=True)
class Projected:
    """What a layer projects of its tokens.

    Attributes:
        parts: queries [B, T, K, D], keys [B, T, K, D] and values [B, T, H, V].
        g_BTH: logarithms of the decays, in float32.
        beta_BTH: how much of a correction is written.
        gate_BTHV: of the output.
    """

    parts: list[torch.Tensor]
    g_BTH: torch.Tensor
    beta_BTH: torch.Tensor
    gate_BTHV: torch.Tensor


def forward(
    self: Any, hidden_states: torch.Tensor, cache: Any = None, attention_mask: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    """The stock layer's arguments and result [B, T, E]. Pieces are unpadded: no mask applies."""
    keys = (self.num_k_heads, self.head_k_dim)
    kernels = Kernels.of(self.conv1d, [keys, keys, (self.num_v_heads, self.head_v_dim)], self.activation)

    projected = project(self, hidden_states)
    out_BTHV = mix(cache.layers[self.layer_idx], projected.parts, projected.g_BTH, projected.beta_BTH, kernels)
    return combine(self, out_BTHV, projected.gate_BTHV)


def project(layer: Any, hidden_BTE: torch.Tensor) -> Projected:
    """Token by token: all that the layer's projections give."""
    if hasattr(layer, "in_proj_qkvz"):  # Qwen3-Next
        both = layer.in_proj_qkvz(hidden_BTE), layer.in_proj_ba(hidden_BTE)
        q, k, v, gate, b, a = layer.fix_query_key_value_ordering(*both)
    elif hasattr(layer, "in_proj_qkv"):  # Qwen3.5
        q, k, v = layer.in_proj_qkv(hidden_BTE).split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
        gate, b, a = layer.in_proj_z(hidden_BTE), layer.in_proj_b(hidden_BTE), layer.in_proj_a(hidden_BTE)
    else:  # OLMo Hybrid
        q, k, v = layer.q_proj(hidden_BTE), layer.k_proj(hidden_BTE), layer.v_proj(hidden_BTE)
        gate, b, a = layer.g_proj(hidden_BTE), layer.b_proj(hidden_BTE), layer.a_proj(hidden_BTE)
    rows, num, _ = hidden_BTE.shape
    parts = [x.reshape(rows, num, -1, layer.head_k_dim) for x in (q, k)]
    parts.append(v.reshape(rows, num, -1, layer.head_v_dim))
    wide = wide_dtype(hidden_BTE.dtype)
    g_BTH = -layer.A_log.to(wide).exp() * softplus(a.to(wide) + layer.dt_bias)
    beta_BTH = b.sigmoid() * 2 if getattr(layer, "allow_neg_eigval", False) else b.sigmoid()
    return Projected(parts, g_BTH, beta_BTH, gate.reshape(rows, num, -1, layer.head_v_dim))


def mix(
    piece: Any, parts: list[torch.Tensor], g_BTH: torch.Tensor, beta_BTH: torch.Tensor, kernels: Kernels
) -> torch.Tensor:
    """All that mixes tokens, head by head: the convolution and the recurrence; outputs [B, T, H, V].

    Args:
        piece: gives the tail and the state [B, H, D, V] before the piece and takes those after it.
        parts: queries, keys and values.
    """
    dtype = parts[0].dtype
    wide = wide_dtype(dtype)
    q, k, v = (part.to(wide) for part in short_convolution.convolve(piece, parts, kernels))
    q, k = delta_rule.unit(q) * q.shape[-1] ** -0.5, delta_rule.unit(k)
    state = piece.recurrent_states[0]
    g, beta = (piece.context.to_heads(x.to(wide), beta_BTH.shape[2]) for x in (g_BTH, beta_BTH))
    out = delta_rule.scan(q, k, v, g, beta, state, piece.update_recurrent_state)
    return piece.context.to_tokens(out.to(dtype), beta_BTH.shape[2])


def combine(layer: Any, out_BTHV: torch.Tensor, gate_BTHV: torch.Tensor) -> torch.Tensor:
    """Token by token: the gated norm and the output projection."""
    norm, projection = (layer.o_norm, layer.o_proj) if hasattr(layer, "o_norm") else (layer.norm, layer.out_proj)
    return projection(norm(out_BTHV, gate_BTHV).flatten(2))


def layers(config: Any) -> list[Layer]:
    """GatedDeltaNet, or attention."""
    kinds = {"linear_attention": Layer(RecurrentChain, forward, "linear_attn"), "full_attention": Layer(KVChain)}
    return by_kind(kinds, config.layer_types)


def parts(model: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The text model and the head, bare or inside a model that also takes images."""
    return getattr(model.model, "language_model", model.model), model.lm_head


register(Family(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"), layers, parts=parts))
