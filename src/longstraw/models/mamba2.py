"""Mamba-2 with attention every few layers, in Bamba, Granite 4 and Nemotron-H, or beside it in Falcon-H1.

The recurrence of a head (Mamba-2, arXiv 2405.21060, section 2), with a state S of head size by state size:

    S_t = exp(a dt_t) S_{t-1} + dt_t x_t b_t^T        y_t = S_t c_t + d x_t        a = -exp(a_log)

It runs in chunks (section 6 there): within a chunk as masked products of all pairs, from chunk to chunk as a state. The
stock models leave this road for single tokens and write into their state; here every piece takes it, out of place.

Shapes: B rows, T tokens, E hidden size, I inner size, G groups of heads that share b and c, R heads a group, H = G R
heads of size P, N state size, n chunks of L tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad, silu, softplus

from longstraw.models import short_convolution
from longstraw.models.family import Family, Layer, by_kind, register
from longstraw.models.heads import parts_with_scaled_head
from longstraw.models.short_convolution import Kernels
from longstraw.precision import in_its_own_precision, wide_dtype
from longstraw.state.joint import JointChain
from longstraw.state.kv import KVChain
from longstraw.state.recurrent import RecurrentChain
from longstraw.state.stateless import StatelessChain

_CHUNK = 64


@dataclass(frozen=True)
class Heads:
    """What belongs to the heads and not to tokens.

    Attributes:
        kernels: of the convolution over x [H, P], b [G, N] and c [G, N].
        a_log_H: logarithm of the decay rate.
        d_H: weight of the skip connection.
    """

    kernels: Kernels
    a_log_H: torch.Tensor
    d_H: torch.Tensor


def forward(
    self: Any, hidden_states: torch.Tensor, cache: Any = None, attention_mask: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    """The stock mixer's arguments and result [B, T, E]. Pieces are unpadded: no mask applies."""
    shapes = [(self.num_heads, self.head_dim), *[(self.n_groups, self.ssm_state_size)] * 2]
    heads = Heads(Kernels.of(self.conv1d, shapes, self.activation), self.A_log, self.D)

    piece = cache.layers[self.layer_idx]
    gate_BTI, parts_BTHC, dt_BTH = project(self, hidden_states, shapes)
    y_BTHP = mix(getattr(piece, "recurrent", piece), parts_BTHC, dt_BTH, heads)
    return combine(self, y_BTHP.flatten(2), gate_BTI, hidden_states.dtype)


def project(
    mixer: Any, hidden_BTE: torch.Tensor, shapes: list[tuple[int, int]]
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Token by token: the gate [B, T, I], the parts x, b and c of `shapes`, and the steps dt [B, T, H] (float32)."""
    if hasattr(mixer, "mup_vector"):  # Falcon-H1
        projected = mixer.in_proj(hidden_BTE * mixer.ssm_in_multiplier) * mixer.mup_vector
    else:
        projected = mixer.in_proj(hidden_BTE)
    sizes = [heads * channels for heads, channels in shapes]
    gate_BTI, *parts, dt_BTH = projected.split([mixer.intermediate_size, *sizes, mixer.num_heads], -1)
    dt_BTH = softplus(dt_BTH + mixer.dt_bias.to(dt_BTH.dtype))
    least, most = mixer.time_step_limit
    dt_BTH = dt_BTH.clamp(least, most).to(wide_dtype(dt_BTH.dtype))
    return gate_BTI, [part.unflatten(-1, shape) for part, shape in zip(parts, shapes)], dt_BTH


def mix(piece: Any, parts_BTHC: list[torch.Tensor], dt_BTH: torch.Tensor, heads: Heads) -> torch.Tensor:
    """All that mixes tokens, head by head: the convolution and the recurrence; outputs [B, T, H, P] in float32.

    Args:
        piece: gives the tail and the state [B, H, P, N] before the piece and takes those after it.
        parts_BTHC: x [B, T, H, P], b [B, T, G, N] and c [B, T, G, N].
    """
    wide = dt_BTH.dtype
    x_BTHP, b_BTGN, c_BTGN = (part.to(wide) for part in short_convolution.convolve(piece, parts_BTHC, heads.kernels))
    num_heads = dt_BTH.shape[2]
    a_log_H, d_H = (piece.context.own_heads(x, num_heads) for x in (heads.a_log_H, heads.d_H))
    dt_BTH, a_H = piece.context.to_heads(dt_BTH, num_heads), -a_log_H.to(wide).exp()
    y_BTHP = scan(x_BTHP, dt_BTH, a_H, b_BTGN, c_BTGN, piece.recurrent_states[0], piece.update_recurrent_state)
    return piece.context.to_tokens(y_BTHP + d_H[:, None] * x_BTHP, num_heads)


def combine(mixer: Any, y_BTI: torch.Tensor, gate_BTI: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Token by token: the gated norm, or the gate alone where there is no norm, and the output projection."""
    gated_BTI = mixer.norm(y_BTI, gate_BTI) if getattr(mixer, "mamba_rms_norm", True) else y_BTI * silu(gate_BTI)
    return mixer.out_proj(gated_BTI.to(dtype))


@in_its_own_precision
def scan(
    x_BTHP: torch.Tensor,
    dt_BTH: torch.Tensor,
    a_H: torch.Tensor,
    b_BTGN: torch.Tensor,
    c_BTGN: torch.Tensor,
    start_BHPN: torch.Tensor | None,
    leave: Callable[[torch.Tensor], Any],
) -> torch.Tensor:
    """Outputs S_t c_t [B, T, H, P] of the recurrence from `start_BHPN`, or from zero; all of one floating dtype.

    Args:
        leave: takes the state [B, H, P, N] after the last token, before what only the outputs need is computed.
    """
    groups, num = b_BTGN.shape[2], x_BTHP.shape[1]
    length = min(_CHUNK, num)

    def chunks(tensor: torch.Tensor, per_group: bool = False) -> torch.Tensor:
        """[B, T, heads, ...] -> [B, n, L, G, R, ...], padded with zeros, which leave the state as it is."""
        tensor = pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, -num % length))
        tensor = tensor.unflatten(1, (-1, length))
        return tensor if per_group else tensor.unflatten(3, (groups, -1))

    x = chunks(x_BTHP * dt_BTH[..., None])
    b, c = chunks(b_BTGN, per_group=True), chunks(c_BTGN, per_group=True)
    log_decay = chunks(dt_BTH * a_H).movedim(2, -1)  # [B, n, G, R, L]

    until_end = pad(log_decay.flip(-1).cumsum(-1).flip(-1)[..., 1:], (0, 1))
    written = torch.einsum("znlgs,znlgrp->zngrps", b, x * until_end.exp().movedim(-1, 2)[..., None])
    total = log_decay.sum(-1).exp()[..., None, None]
    state = torch.zeros_like(written[:, 0]) if start_BHPN is None else start_BHPN.to(x.dtype).unflatten(1, (groups, -1))
    starts = []
    for index in range(written.shape[1]):
        starts.append(state)
        state = total[:, index] * state + written[:, index]
    leave(state.flatten(1, 2))

    pairs = torch.einsum("znlgs,znmgs->znglm", c, b)[:, :, :, None] * _decay_between(log_decay)
    y = torch.einsum("zngrlm,znmgrp->znlgrp", pairs, x)
    read = torch.einsum("znlgs,zngrps->znlgrp", c, torch.stack(starts, 1))
    y = y + read * log_decay.cumsum(-1).exp().movedim(-1, 2)[..., None]
    return y.flatten(3, 4).flatten(1, 2)[:, :num]


def _decay_between(log_decay: torch.Tensor) -> torch.Tensor:
    """[..., L, L]: the decay of what token m wrote until token l >= m reads it, zero elsewhere, from [..., L].

    Sums of the steps between, not differences of running sums: those lose the small steps behind a large one.
    """
    length = log_decay.shape[-1]
    seen = torch.ones(length, length, dtype=torch.bool, device=log_decay.device).tril()
    steps = log_decay[..., None].expand(*log_decay.shape, length).masked_fill(~seen.tril(-1), 0)
    return steps.cumsum(-2).masked_fill(~seen, float("-inf")).exp()


MAMBA2 = Layer(RecurrentChain, forward, "mamba")


def layers(config: Any) -> list[Layer]:
    """Mamba-2 or attention, each with perceptrons or experts behind it."""
    return by_kind({"linear_attention": MAMBA2, "full_attention": Layer(KVChain)}, config.layers_block_type)


def nemotron_layers(config: Any) -> list[Layer]:
    """One mixer a layer: Mamba-2, attention, perceptrons or experts, the last two without state."""
    stateless = Layer(StatelessChain)
    kinds = {"linear_attention": Layer(RecurrentChain, forward, "mixer"), "full_attention": Layer(KVChain)}
    return by_kind(kinds | {"moe": stateless, "mlp": stateless}, config.layers_block_type)


def falcon_layers(config: Any) -> list[Layer]:
    """Mamba-2 and attention side by side in every layer."""
    return [Layer(JointChain, forward, "mamba")] * config.num_hidden_layers


register(Family(("bamba",), layers))
register(Family(("granitemoehybrid",), layers, parts=parts_with_scaled_head(divisor="logits_scaling")))
register(Family(("nemotron_h",), nemotron_layers))
register(Family(("falcon_h1",), falcon_layers, parts=parts_with_scaled_head(multiplier="lm_head_multiplier")))
