"""Who holds what of a prompt: the one object through which a rank asks the others for their part.

Today one process holds everything, and every method is the identity. Over several ranks the methods stand for this:
tokens of a piece are dealt to ranks in contiguous shares; each rank runs its share and owns the pages that it wrote.
Queries travel to the pages, heads are traded for tokens where a recurrence has to see all of them, and whatever a rank
decides from what it measured itself is agreed on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class Context:
    """One process that holds everything: every method is the identity.

    Attributes:
        rank: this process's place, from 0.
        size: how many share a prompt.
    """

    rank = 0
    size = 1

    def share(self, num_tokens: int) -> slice:
        """Which of a piece's tokens this rank runs and owns the state of."""
        return slice(0, num_tokens)

    def gather(self, own: torch.Tensor, dim: int) -> torch.Tensor:
        """All tokens of a piece along `dim`, from every rank's share."""
        return own

    def place(self, own: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's share among zeros for the others' tokens along `dim`, to be written to."""
        return own

    def merge(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For this rank's queries, their attention to what all ranks own, from what each found for all queries.

        Args:
            out: [B, H, T, D], all of the piece's queries over the tokens that this rank owns.
            lse: [B, H, T], their log-sum-exp; -inf for a query that sees none of them.
        """
        return out, lse

    def scatter_sum(self, partial: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's tokens along `dim` of a sum over ranks; the reverse of `gather`."""
        return partial

    def to_heads(self, own: torch.Tensor) -> torch.Tensor:
        """All tokens of this rank's heads from this rank's tokens of all heads, [B, T, H, ...]; differentiable."""
        return own

    def own_heads(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's heads of what belongs to heads and not to tokens, [H, ...]."""
        return parameter

    def to_tokens(self, own: torch.Tensor) -> torch.Tensor:
        """The reverse of `to_heads`."""
        return own

    def agree(self, found: int, choose: Callable[..., int] = max) -> int:
        """What all ranks go on with: `choose` (`max` or `min`) of what each of them found; True and False count too."""
        return found


ALONE = Context()
