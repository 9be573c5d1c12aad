"""A prompt over ranks: `Context` on a process group, gloo or NCCL.

Every exchange is of equal parts, and sums are taken in the order of ranks: the same number of ranks gives the same
bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from longstraw.parallel.context import Context


class RankContext(Context):
    """See `Context`.

    Args:
        group: the ranks that share a prompt.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    @property
    def share(self) -> int:
        """Tokens that each rank runs, padding included."""
        return -(-self.num_tokens // self.size)

    @property
    def own_start(self) -> int:
        return self.start + (self.rank * self.share if self.dealt else 0)

    def stop(self, num_held: int) -> int:
        return self.start + (self.num_tokens if self.dealt else num_held)

    def deal(self, all_BT: torch.Tensor) -> torch.Tensor:
        padded = pad(all_BT, (0, self.size * self.share - self.num_tokens))
        return padded[:, self.rank * self.share : (self.rank + 1) * self.share]

    def collect(self, own_BT: torch.Tensor) -> torch.Tensor:
        return self.gather(own_BT, 1)[:, : self.num_tokens]

    def unpadded(self, own: torch.Tensor, dim: int) -> torch.Tensor:
        if not self.dealt:
            return own
        num = min(max(self.num_tokens - self.rank * self.share, 0), self.share)
        return own if num == own.shape[dim] else own.narrow(dim, 0, num)

    def gather(self, own: torch.Tensor, dim: int) -> torch.Tensor:
        if not self.dealt:
            return own
        return torch.cat(self._gathered(own).unbind(0), dim)

    def gather_keys(self, own: torch.Tensor) -> torch.Tensor:
        return _Gather.apply(own, self) if self.dealt else own

    def all_unpadded(self, everyone: torch.Tensor, dim: int) -> torch.Tensor:
        return everyone.narrow(dim, 0, self.num_tokens) if self.dealt else everyone

    def until_own(self, everyone: torch.Tensor, dim: int) -> torch.Tensor:
        return everyone.narrow(dim, 0, (self.rank + 1) * self.share) if self.dealt else everyone

    def merge(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.dealt:
            outs, lses = (self._dealt(x, 2) for x in (out, lse))
        else:
            outs, lses = self._gathered(out), self._gathered(lse)
        total = lses.logsumexp(0)
        weights = (lses - total).exp()
        merged = outs[0] * weights[0, ..., None]
        for one, weight in zip(outs[1:], weights[1:]):
            merged = merged + one * weight[..., None]
        return merged, total

    def offers(self, found_BTK: torch.Tensor) -> torch.Tensor:
        everyone = self._dealt(found_BTK, 1) if self.dealt else self._gathered(found_BTK)
        return torch.cat(everyone.unbind(0), -1)

    def scatter_sum(self, partial: torch.Tensor, dim: int) -> torch.Tensor:
        if not self.dealt:
            return partial
        parts = self._dealt(partial, dim)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        total = partial.clone()
        dist.all_reduce(total, dist.ReduceOp.SUM, self._group)
        return total

    def to_heads(self, own: torch.Tensor, num_heads: int) -> torch.Tensor:
        spread = self._spread(own, 2, num_heads)
        if not self.dealt:
            return spread.chunk(self.size, 2)[self.rank]
        return _Exchange.apply(spread, self, 2, 1)[:, : self.num_tokens]

    def own_heads(self, parameter: torch.Tensor, num_heads: int) -> torch.Tensor:
        return self._spread(parameter, 0, num_heads).chunk(self.size, 0)[self.rank]

    def to_tokens(self, own: torch.Tensor, num_heads: int) -> torch.Tensor:
        if not self.dealt:
            return torch.cat(self._gathered(own).unbind(0), 2)[:, :, :num_heads]
        missing = self.size * self.share - self.num_tokens
        padded = pad(own, (0, 0) * (own.dim() - 2) + (0, missing))
        return _Exchange.apply(padded, self, 1, 2)[:, :, :num_heads]

    def agree(self, found: int, choose: Callable[..., int] = max) -> int:
        value = torch.tensor([int(found)], dtype=torch.int64, device=self._device())
        dist.all_reduce(value, dist.ReduceOp.MAX if choose is max else dist.ReduceOp.MIN, self._group)
        return int(value)

    def exchanged(self, x: torch.Tensor, from_dim: int, to_dim: int) -> torch.Tensor:
        """Each rank's part along `from_dim` to that rank; what arrives is laid side by side along `to_dim`."""
        return torch.cat(self._dealt(x, from_dim).unbind(0), to_dim)

    def _dealt(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """[size, ...]: what every rank has for this one, which is its part along `dim`."""
        parts = torch.stack(x.chunk(self.size, dim)).contiguous()
        arrived = torch.empty_like(parts)
        dist.all_to_all_single(arrived, parts, group=self._group)
        return arrived

    def _gathered(self, own: torch.Tensor) -> torch.Tensor:
        """[size, ...] of every rank's tensor."""
        everyone = own.new_empty(self.size * own.shape[0], *own.shape[1:])
        dist.all_gather_into_tensor(everyone, own.contiguous(), group=self._group)
        return everyone.unflatten(0, (self.size, -1))

    def _spread(self, x: torch.Tensor, dim: int, num_heads: int) -> torch.Tensor:
        """As many heads along `dim` as ranks can take in equal parts: each one's own, or those of the whole layer,
        filled up with zeros, where they are fewer."""
        if x.shape[dim] % self.size == 0:
            return x
        x = x.repeat_interleave(num_heads // x.shape[dim], dim)
        return pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, -num_heads % self.size))

    def _device(self) -> torch.device:
        backend = dist.get_backend(self._group)
        return torch.device("cuda" if backend == dist.Backend.NCCL else "cpu")


class _Exchange(torch.autograd.Function):
    """All-to-all between two dimensions; its transpose is the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, context: RankContext, from_dim: int, to_dim: int) -> torch.Tensor:
        ctx.context, ctx.dims = context, (to_dim, from_dim)
        return context.exchanged(x, from_dim, to_dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return ctx.context.exchanged(grads[0], *ctx.dims), None, None, None


class _Gather(torch.autograd.Function):
    """Every rank's keys or values [B, K, share, D] along the tokens; each rank's gradient of them adds up."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, context: RankContext) -> torch.Tensor:
        ctx.context = context
        return context.gather(own, 2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return ctx.context.scatter_sum(grads[0], 2), None
