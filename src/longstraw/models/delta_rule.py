"""The gated delta rule in chunks, from any state: what GatedDeltaNet and Kimi Delta Attention compute.

With a state S of key size by value size, a decay g <= 0 that is one number a head (Gated Delta Networks, arXiv
2412.06464, section 3) or one a key channel (Kimi Linear, arXiv 2510.26692, section 3):

    S' = diag(exp(g_t)) S_{t-1}        S_t = S' + beta_t k_t (v_t - S'^T k_t)^T        o_t = S_t^T q_t

Within a chunk the corrections v_t - S'^T k_t solve a triangular system (Parallelizing Linear Transformers with the
Delta Rule, arXiv 2406.06484, section 3); from chunk to chunk there is the state.

Shapes: B rows, T tokens, K key heads, R value heads a key head, H = K R value heads, D key size, V value size, n chunks
of L tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

from longstraw.precision import in_its_own_precision

_CHUNK = 64  # a power of two


def unit(tensor: torch.Tensor) -> torch.Tensor:
    """Vectors of the last dimension at length one, as the stock models make them."""
    return tensor * torch.rsqrt(tensor.square().sum(-1, keepdim=True) + 1e-6)


@in_its_own_precision
def scan(
    q_BTKD: torch.Tensor,
    k_BTKD: torch.Tensor,
    v_BTHV: torch.Tensor,
    g: torch.Tensor,
    beta_BTH: torch.Tensor,
    start_BHDV: torch.Tensor | None,
    leave: Callable[[torch.Tensor], Any],
) -> torch.Tensor:
    """Outputs [B, T, H, V] of the recurrence from `start_BHDV`, or from zero; all of one floating dtype.

    Args:
        q_BTKD: queries as they multiply the state: normalised and scaled.
        g: logarithms of the decays, [B, T, H], or [B, T, H, D] with as many key heads as value heads.
        leave: takes the state [B, H, D, V] after the last token, before what only the outputs need is computed.
    """
    num, heads = k_BTKD.shape[1:3]
    length = min(_CHUNK, 1 << (num - 1).bit_length())

    def chunks(tensor: torch.Tensor) -> torch.Tensor:
        """[B, T, heads, X] -> [B, K, R, n, L, X], padded with zeros, which leave the state as it is."""
        tensor = pad(tensor, (0, 0, 0, 0, 0, -num % length))
        return tensor.unflatten(1, (-1, length)).unflatten(3, (heads, -1)).permute(0, 3, 4, 1, 2, 5)

    q, k, v, beta = (chunks(tensor) for tensor in (q_BTKD, k_BTKD, v_BTHV, beta_BTH[..., None]))
    grown = chunks(g if g.dim() == 4 else g[..., None]).cumsum(-2)
    last = grown[..., -1:, :]
    if g.dim() == 4:
        products = DecayedKeys(k, grown).products
    else:
        decay = _decay_between(grown)

        def products(rows: torch.Tensor) -> torch.Tensor:
            return (rows @ k.transpose(-1, -2)) * decay

    system = beta * products(k)
    right = torch.cat([beta * v, beta * k * grown.exp()], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], -1)

    writes = (k * (last - grown).exp()).transpose(-1, -2)
    fade = last.exp().transpose(-1, -2)
    if start_BHDV is None:
        state = v.new_zeros(*v.shape[:3], k.shape[-1], v.shape[-1])
    else:
        state = start_BHDV.to(v.dtype).unflatten(1, (heads, -1))
    starts, corrections = [], []
    for index in range(v.shape[3]):
        starts.append(state)
        corrections.append(values[:, :, :, index] - keys[:, :, :, index] @ state)
        state = fade[:, :, :, index] * state + writes[:, :, :, index] @ corrections[-1]
    leave(state.flatten(1, 2))

    out = (q * grown.exp()) @ torch.stack(starts, 3) + products(q) @ torch.stack(corrections, 3)
    return out.permute(0, 3, 4, 1, 2, 5).flatten(3, 4).flatten(1, 2)[:, :num]


def _decay_between(grown: torch.Tensor) -> torch.Tensor:
    """[..., L, L] of exp(grown_l - grown_m) for m <= l, zero elsewhere, from [..., L, 1]."""
    seen = torch.ones(*grown.shape[-2:-1] * 2, dtype=torch.bool, device=grown.device).tril()
    return (grown - grown.transpose(-1, -2)).masked_fill(~seen, float("-inf")).exp()


class DecayedKeys:
    """Keys that queries of the same chunk multiply with the decay between the two, a number a channel.

    The decay of a pair splits into one factor a side only from a token between the two, or it overflows. So: blocks of
    one token, and block by block doubled, the lower left quarter split at the last token of the first half, where no
    exponent is above zero. No tensor of all pairs and channels is made.

    Args:
        keys: [..., L, D], L a power of two.
        grown: [..., L, D], running sums of the logarithms of the decays along L.
    """

    def __init__(self, keys: torch.Tensor, grown: torch.Tensor) -> None:
        self.keys = keys
        self._levels = []  # block size; decays since the border, of the rows; keys with their decays until the border
        size = 1
        while size < keys.shape[-2]:
            early, late = grown.unflatten(-2, (-1, 2, size)).unbind(-3)
            border = early[..., -1:, :]
            across = keys.unflatten(-2, (-1, 2, size))[..., 0, :, :] * (border - early).exp()
            self._levels.append((size, (late - border).exp(), across.transpose(-1, -2)))
            size *= 2

    def products(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., L, L] of sum_d rows_ld keys_md exp(grown_ld - grown_md) for m <= l, zero elsewhere."""
        blocks = (rows * self.keys).sum(-1)[..., None, None]  # [..., L / size, size, size], here of one token
        for size, decay, across in self._levels:
            quarter = (rows.unflatten(-2, (-1, 2, size))[..., 1, :, :] * decay) @ across
            first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
            upper = torch.cat([first, torch.zeros_like(first)], -1)
            blocks = torch.cat([upper, torch.cat([quarter, second], -1)], -2)
        return blocks[..., 0, :, :]
