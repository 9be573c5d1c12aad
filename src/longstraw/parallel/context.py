"""Who holds what of a prompt: the one object through which a rank asks the others for their part.

The tokens of a piece are dealt to the ranks in contiguous shares of one size, the last ones filled up with padding that
nothing reads. A rank runs its share and owns the pages that its tokens write. Queries travel to the pages, heads are
traded for tokens where a recurrence has to see all of them, and what a rank decides from what it measured itself is
agreed on. A decoded token runs on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Self

import torch


class Context:
    """One process that holds everything: of all methods the identity. `ranks.RankContext` is the other kind.

    Attributes:
        rank: this process's place, from 0.
        size: how many share a prompt.
        start: absolute position of the first token of the piece.
        num_tokens: tokens of the piece.
        dealt: whether the piece's tokens are dealt to the ranks; otherwise each runs them all.
    """

    rank = 0
    size = 1
    start = 0
    num_tokens = 0
    dealt = True

    def of(self, start: int, num_tokens: int) -> Self:
        """For a piece whose tokens are dealt to the ranks."""
        return self._for(start, num_tokens, True)

    def decoding(self, start: int) -> Self:
        """For tokens from position `start` on that every rank runs."""
        return self._for(start, 0, False)

    @property
    def counts_own(self) -> bool:
        """Whether this rank counts the tokens that it runs: where every rank runs the same ones, one does."""
        return self.dealt or self.rank == 0

    @property
    def own_start(self) -> int:
        """Absolute position of the first token that this rank runs."""
        return self.start

    def stop(self, num_held: int) -> int:
        """Absolute position of the token after the last of the piece, of which this rank holds `num_held`."""
        return self.start + num_held

    def deal(self, all_BT: torch.Tensor) -> torch.Tensor:
        """This rank's share of what the piece's tokens have, padded with zeros."""
        return all_BT

    def collect(self, own_BT: torch.Tensor) -> torch.Tensor:
        """The reverse of `deal`: what all tokens of the piece have, without the padding."""
        return own_BT

    def unpadded(self, own: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's tokens along `dim`, without the padding."""
        return own

    def gather(self, own: torch.Tensor, dim: int) -> torch.Tensor:
        """Every rank's share along `dim`, padding included."""
        return own

    def gather_keys(self, own: torch.Tensor) -> torch.Tensor:
        """As `gather`, of keys or values [B, K, share, D], and differentiable."""
        return own

    def all_unpadded(self, everyone: torch.Tensor, dim: int) -> torch.Tensor:
        """Of what `gather` returned, all tokens of the piece, without the padding."""
        return everyone

    def until_own(self, everyone: torch.Tensor, dim: int) -> torch.Tensor:
        """Of what `gather` returned, the tokens up to the last that this rank runs, padding included."""
        return everyone

    def merge(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For this rank's queries, their attention to what all ranks own, from what each found for all queries.

        Args:
            out: [B, H, T, D], all of the piece's queries over the tokens that this rank owns.
            lse: [B, H, T], their log-sum-exp; -inf for a query that sees none of them.
        """
        return out, lse

    def offers(self, found_BTK: torch.Tensor) -> torch.Tensor:
        """[B, share, all ranks' K]: for this rank's queries, the candidates that each rank found for all queries."""
        return found_BTK

    def scatter_sum(self, partial: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's share along `dim` of a sum over ranks; the transpose of `gather`."""
        return partial

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, on each of them."""
        return partial

    def to_heads(self, own: torch.Tensor, num_heads: int) -> torch.Tensor:
        """All tokens of this rank's heads from this rank's tokens of all heads, [B, T, H, ...]; differentiable.

        Args:
            num_heads: of the layer; some tensors have fewer, each of which serves as many of those in a row.
        """
        return own

    def own_heads(self, parameter: torch.Tensor, num_heads: int) -> torch.Tensor:
        """This rank's heads of what belongs to heads and not to tokens, [H, ...]."""
        return parameter

    def to_tokens(self, own: torch.Tensor, num_heads: int) -> torch.Tensor:
        """The reverse of `to_heads`, for a tensor of all `num_heads` heads."""
        return own

    def agree(self, found: int, choose: Callable[..., int] = max) -> int:
        """What all ranks go on with: `choose` (`max` or `min`) of what each of them found; True and False count too."""
        return found

    def _for(self, start: int, num_tokens: int, dealt: bool) -> Self:
        other = copy(self)
        other.start, other.num_tokens, other.dealt = start, num_tokens, dealt
        return other


ALONE = Context()
