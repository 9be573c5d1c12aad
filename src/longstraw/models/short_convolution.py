"""The short causal convolution before a recurrence, over the tail that earlier tokens left.

Every channel has a kernel of its own over the last K tokens. Channels come grouped by the heads that they serve, in as
many parts as the layer projects (as queries, keys and values), so that a share of the heads is a share of each part.

Shapes: B rows, T tokens, S tokens with the tail before them, H heads, C channels, K kernel size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import conv1d, pad
from transformers.activations import ACT2FN


@dataclass(frozen=True)
class Kernels:
    """The kernels of a layer's heads, one entry a part.

    Attributes:
        weights: [H, C, K] each.
        biases: [H, C] each; None where the convolution has none.
        activation: name of the function after the convolution, or None.
    """

    weights: Sequence[torch.Tensor]
    biases: Sequence[torch.Tensor] | None = None
    activation: str | None = None

    @classmethod
    def of(cls, module: Any, shapes: Sequence[tuple[int, int]], activation: str | None) -> Kernels:
        """The kernels of a stock depthwise convolution over channels that are parts of (heads, channels) each."""
        sizes = [heads * channels for heads, channels in shapes]

        def parts(parameter: torch.Tensor) -> list[torch.Tensor]:
            return [part.unflatten(0, shape) for part, shape in zip(parameter.split(sizes), shapes)]

        return cls(parts(module.weight.squeeze(1)), None if module.bias is None else parts(module.bias), activation)


def convolve(piece: Any, parts_BTHC: Sequence[torch.Tensor], kernels: Kernels) -> list[torch.Tensor]:
    """Each part after the convolution, with this rank's heads of all tokens for this rank's tokens of all heads.

    Args:
        piece: gives the tail before the piece and takes the new one.
        parts_BTHC: [B, T, H, C] each.
    """
    context, num_heads = piece.context, max(part.shape[2] for part in parts_BTHC)
    parts_BTHC = [context.to_heads(part, num_heads) for part in parts_BTHC]
    weight_CK = torch.cat([context.own_heads(weight, num_heads).flatten(0, 1) for weight in kernels.weights])
    bias_C = None
    if kernels.biases is not None:
        bias_C = torch.cat([context.own_heads(bias, num_heads).flatten() for bias in kernels.biases])
    mixed_BTC = torch.cat([part.flatten(2) for part in parts_BTHC], -1)
    seen_BCS = piece.update_conv_state(mixed_BTC.transpose(1, 2), conv_kernel_size=weight_CK.shape[1])
    out_BCT = causal(seen_BCS, weight_CK, bias_C, mixed_BTC.shape[1])
    if kernels.activation is not None:
        out_BCT = ACT2FN[kernels.activation](out_BCT)
    out_BTC = out_BCT.to(mixed_BTC.dtype).transpose(1, 2)
    split = out_BTC.split([part.shape[2:].numel() for part in parts_BTHC], -1)
    return [out.unflatten(-1, part.shape[2:]) for out, part in zip(split, parts_BTHC)]


def causal(
    seen_BCS: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor | None, num_tokens: int
) -> torch.Tensor:
    """[B, C, T] of the last T = `num_tokens` tokens seen, in the weight's dtype; zeros stand before the first."""
    channels, size = weight_CK.shape
    need = num_tokens + size - 1
    have = seen_BCS.shape[-1]
    seen_BCS = pad(seen_BCS, (need - have, 0)) if have < need else seen_BCS[..., have - need :]
    return conv1d(seen_BCS.to(weight_CK.dtype), weight_CK[:, None], bias_C, groups=channels)
