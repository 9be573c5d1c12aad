"""Multi-head latent attention: GLM-5 with sparse attention and shared indexers, DeepSeek-V3.2, and without an indexer
DeepSeek-V3, GLM-4.7-Flash and Youtu.

The stock attention expands the latents of all tokens to keys and values and slices a mask of all pairs. Its forward,
and nothing else of the model, is replaced while the engine runs. Projections, norms and rotary embedding are the stock
modules and functions, so adapters on them work.

Shapes: B rows, T tokens, H heads, D head size without position, R rotary size, V value size, C latent rank, E = C + R.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from longstraw.attention import indexer, latent, sparse
from longstraw.attention.scores import Scores
from longstraw.models.family import Family, Layer, register
from longstraw.precision import wide_dtype
from longstraw.state.latent import LatentChain, LatentPiece

Tensors = tuple[torch.Tensor, ...]


def layers(config: Any) -> list[Layer]:
    """Latents in every layer; what a layer's indexer adds follows from what it writes.

    Raises:
        ValueError: the first layer shares a choice that no layer before it made.
    """
    if (getattr(config, "indexer_types", None) or ["full"])[0] == "shared":
        raise ValueError('indexer_types starts with "shared": the first layer needs an indexer of its own ("full")')
    return [Layer(LatentChain, forward)] * config.num_hidden_layers


def indexer_parameters(backbone: torch.nn.Module) -> list[str]:
    """Names of the indexers' parameters: choosing tokens has no gradient, in the stock model as here."""
    return [name for name, _ in backbone.named_parameters() if ".indexer." in name]


def forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Tensors | None = None,
    cache: Any = None,
    prev_topk_indices: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor | None, ...]:
    """The stock attention's arguments and results; chosen positions travel on to the layers that share them."""
    piece: LatentPiece = cache.layers[self.layer_idx]
    residual = None
    if self.q_lora_rank is None:
        q = self.q_proj(hidden_states)
    else:
        residual = self.q_a_layernorm(self.q_a_proj(hidden_states))
        q = self.q_b_proj(residual)
    q_BTHD, q_BTHR = q.unflatten(-1, (-1, self.qk_head_dim)).split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
    compressed = self.kv_a_proj_with_mqa(hidden_states)
    latent_BTC, rope_BTR = compressed.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
    interleaved = getattr(self.config, "rope_interleave", True)
    q_BTHR, rope_BT1R = _rotate(self, q_BTHR, rope_BTR[:, :, None], position_embeddings, interleaved)
    latents_BTE = torch.cat([self.kv_a_layernorm(latent_BTC), rope_BT1R[:, :, 0]], -1)

    chooser = getattr(self, "indexer", None)
    if chooser is None:
        held_BSE, keys_BSD = piece.write(latents_BTE, None)
        chosen_BTK = prev_topk_indices
    else:
        query_BTHD, weights_BTH, keys_BTD = _index(self, hidden_states, residual, position_embeddings)
        held_BSE, keys_BSD = piece.write(latents_BTE, keys_BTD)
        assert keys_BSD is not None
        chosen_BTK = piece.chosen
        if chosen_BTK is None:
            chosen_BTK = indexer.choose(query_BTHD, weights_BTH, keys_BSD, piece.index_prefix, chooser.index_topk)
        if torch.is_grad_enabled():  # the layer may be computed once more, for its backward pass
            piece.chosen = chosen_BTK

    w_k_HDC, w_v_HVC = piece.weights or _expansion(self, hidden_states.dtype)
    if piece.grows:
        piece.weights = (w_k_HDC, w_v_HVC)
    inputs = (q_BTHD, q_BTHR, w_k_HDC, w_v_HVC, held_BSE)
    scores = Scores(self.scaling)
    if chosen_BTK is not None:
        out_BTHV = sparse.attend(*inputs, chosen_BTK, piece.prefix, scores)
    else:
        out_BTHV = (latent.decode if piece.grows else latent.attend)(*inputs, piece.prefix, scores)
    out = self.o_proj(out_BTHV.flatten(2))
    return (out, None, chosen_BTK) if hasattr(self, "skip_topk") else (out, None)


@torch.no_grad()
def _index(attention: Any, hidden_states: torch.Tensor, residual: Any, position_embeddings: Tensors | None) -> Tensors:
    """The indexer's queries [B, T, H, D], head weights [B, T, H] with the scales in them, and keys [B, T, D]."""
    chooser = attention.indexer
    sizes = [chooser.qk_rope_head_dim, chooser.head_dim - chooser.qk_rope_head_dim]
    q_rope, q_pass = chooser.wq_b(residual).unflatten(-1, (chooser.n_heads, chooser.head_dim)).split(sizes, -1)
    k_rope, k_pass = chooser.k_norm(chooser.wk(hidden_states))[:, :, None].split(sizes, -1)
    interleaved = attention.config.model_type in _INTERLEAVED_INDEXER
    q_rope, k_rope = _rotate(attention, q_rope, k_rope, position_embeddings, interleaved)
    weights = chooser.weights_proj(hidden_states.to(chooser.weights_proj.weight.dtype)).to(torch.float32)
    weights = weights * (chooser.n_heads**-0.5 * chooser.softmax_scale)
    return torch.cat([q_rope, q_pass], -1), weights, torch.cat([k_rope, k_pass], -1)[:, :, 0]


def _rotate(
    attention: Any, q: torch.Tensor, k: torch.Tensor, position_embeddings: Tensors | None, interleaved: bool
) -> Tensors:
    """Rotary embedding of [B, T, H, R] and [B, T, 1, R] by the stock functions of the attention's own module.

    Without position embeddings the two stay as they are, as in Kimi Linear.
    """
    if position_embeddings is None:
        return q, k
    name = "apply_rotary_pos_emb_interleave" if interleaved else "apply_rotary_pos_emb"
    return getattr(sys.modules[type(attention).__module__], name)(q, k, *position_embeddings, unsqueeze_dim=2)


def _expansion(attention: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """W_k [H, D, C] and W_v [H, V, C] of `kv_b_proj`, adapters included, in float32 at least.

    The module is applied to the unit vectors, so that gradients reach its adapters in their own way. What its base
    layer returns is widened first: a small adapter would drown in the rounding of bfloat16 weights.

    Raises:
        ValueError: an expansion with a bias: it is not a matrix.
    """
    linear = attention.kv_b_proj
    _refuse_bias(linear)
    base = getattr(linear, "base_layer", linear)
    wide = wide_dtype(dtype)
    widened = base.register_forward_hook(lambda module, inputs, output: output.to(wide))
    try:
        weights_CA = linear(torch.eye(attention.kv_lora_rank, dtype=dtype, device=base.weight.device))
    finally:
        widened.remove()
    head = attention.qk_nope_head_dim + attention.v_head_dim
    weights_HAC = weights_CA.T.unflatten(0, (-1, head))
    return tuple(weights_HAC.split([attention.qk_nope_head_dim, attention.v_head_dim], 1))


def _refuse_bias(linear: torch.nn.Module) -> None:
    if any(name.endswith("bias") for name, _ in linear.named_parameters()):
        raise ValueError("kv_b_proj has a bias, which the latent attention does not apply: train its adapter without")


_INTERLEAVED_INDEXER = ("glm_moe_dsa",)  # DeepSeek-V3.2 rotates its index keys in halves

register(
    Family(
        model_types=("glm_moe_dsa", "deepseek_v32", "deepseek_v3", "glm4_moe_lite", "youtu"),
        layers=layers,
        without_gradient=indexer_parameters,
    )
)
