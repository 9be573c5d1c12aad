"""LFM2, dense and with experts: gated short convolutions with attention every few layers.

A layer's channels are gated before and after a causal convolution over the last few tokens, y = c * conv(b * x) (LFM2
technical report, arXiv 2511.23404, section 2); there is no recurrence.

Shapes: B rows, T tokens, E hidden size and number of channels.
"""

from __future__ import annotations

from typing import Any

import torch

from longstraw.models.family import Family, Layer, by_kind, register
from longstraw.models.short_convolution import Kernels, convolve
from longstraw.state.convolved import ConvolvedChain
from longstraw.state.kv import KVChain


def forward(
    self: Any, hidden_states: torch.Tensor, cache: Any = None, attention_mask: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    """The stock layer's arguments and result [B, T, E]. Pieces are unpadded: no mask applies."""
    kernels = Kernels.of(self.conv, [(hidden_states.shape[-1], 1)], None)  # every channel is a head of its own

    b_BTE, c_BTE, x_BTE = self.in_proj(hidden_states).chunk(3, -1)
    (mixed_BTE1,) = convolve(cache.layers[self.layer_idx], [(b_BTE * x_BTE)[..., None]], kernels)
    mixed_BTE1 = cache.layers[self.layer_idx].context.to_tokens(mixed_BTE1, c_BTE.shape[2])
    return self.out_proj(c_BTE * mixed_BTE1[..., 0])


def layers(config: Any) -> list[Layer]:
    """A short convolution, or attention."""
    kinds = {"conv": Layer(ConvolvedChain, forward, "conv"), "full_attention": Layer(KVChain)}
    return by_kind(kinds, config.layer_types)


register(Family(("lfm2", "lfm2_moe"), layers))
