"""Rows of pages picked by position into one buffer, and their gradients back to the pages they came from.

Shapes: B rows, S held tokens, N queries of all rows, K chosen tokens a query, U gathered rows, E numbers a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from longstraw.pages import Page
from longstraw.pages.prefix import Prefix


class TokenSpace:
    """An address for every token that some row of a batch can see: one for a shared token, one a row for its own.

    Args:
        prefix: pages (tokens [R, S, E],), R = 1 (shared by all rows) or R = B.
        held_BSE: the tokens after them.
    """

    def __init__(self, prefix: Prefix, held_BSE: torch.Tensor) -> None:
        self.prefix = prefix
        self.held_BSE = held_BSE
        self.rows, num_held = held_BSE.shape[:2]
        context = prefix.context
        start = context.own_start
        self.first_own = min((page.start for page in prefix.pages if page.rows == self.rows), default=context.start)
        self.num_own = context.stop(num_held) - self.first_own
        self.size = self.first_own + self.rows * self.num_own
        self.spans = [  # (page, None for the held tokens; row in it; its first address; the one after its last)
            (page, row, first + row * self.num_own, first + row * self.num_own + num_tokens)
            for page, rows, first, num_tokens in (
                *((page, page.rows, page.start, page.num_tokens) for page in prefix.pages),
                *([(None, self.rows, start, num_held)] if context.counts_own else []),
            )
            for row in range(rows)
        ]
        self._owned: torch.Tensor | None = None
        if context.size > 1:
            self._owned = torch.zeros(self.size, dtype=torch.bool, device=held_BSE.device)
            for *_, low, high in self.spans:
                self._owned[low:high] = True

    def owns(self, addresses_NK: torch.Tensor) -> torch.Tensor:
        """Which of them this rank has, bool [N, K]."""
        return torch.ones_like(addresses_NK, dtype=torch.bool) if self._owned is None else self._owned[addresses_NK]

    def addresses(self, chosen_BTK: torch.Tensor) -> torch.Tensor:
        """[N, K] int64 addresses of positions; a -1 gets the address of its query's first choice."""
        position = torch.where(chosen_BTK < 0, chosen_BTK[..., :1], chosen_BTK).long().clamp(min=0)
        row = torch.arange(self.rows, device=position.device)[:, None, None]
        return torch.where(position < self.first_own, position, position + row * self.num_own).flatten(0, 1)


class Gathered:
    """What a group of queries chose, each token once.

    Attributes:
        rows_UE: the tokens, in order of address.
        places_NK: where in them each query's choices are, if they are there.
    """

    def __init__(self, space: TokenSpace, addresses_NK: torch.Tensor, seen_NK: torch.Tensor) -> None:
        device = addresses_NK.device
        hit = torch.zeros(space.size, dtype=torch.bool, device=device)
        hit[addresses_NK[seen_NK]] = True
        addresses_U = hit.nonzero()[:, 0]
        self.places_NK = (hit.cumsum(0, dtype=torch.int32) - 1).clamp_(min=0)[addresses_NK]
        self._space = space
        edges = torch.tensor([span[2:] for span in space.spans], device=device)
        bounds = torch.searchsorted(addresses_U, edges).tolist()
        self._picks: dict[Page | None, list[tuple[int, slice, torch.Tensor]]] = {}  # (row, place here, place there)
        for (page, row, first, _), (low, high) in zip(space.spans, bounds):
            if high > low:
                self._picks.setdefault(page, []).append((row, slice(low, high), addresses_U[low:high] - first))
        self.rows_UE = self._fetch(addresses_U.numel())

    def scatter(self, grad_UE: torch.Tensor, grad_held_BSE: torch.Tensor) -> None:
        """Adds the rows' gradients to their pages' cotangents, but for constant pages, and to the held tokens'."""
        prefix = self._space.prefix
        for page, picks in self._picks.items():
            if page is None:
                for row, here, there in picks:
                    grad_held_BSE[row, there] += grad_UE[here]  # no token twice
            else:
                prefix.accumulate(page, partial(_spread, page, picks, grad_UE))

    def _fetch(self, num_rows: int) -> torch.Tensor:
        held_BSE = self._space.held_BSE
        rows_UE = held_BSE.new_empty(num_rows, held_BSE.shape[-1])
        for tokens_RSE, picks in self._tokens():
            for row, here, there in picks:
                rows_UE[here] = tokens_RSE[row].index_select(0, there)
        return rows_UE

    def _tokens(self) -> Iterator[tuple[torch.Tensor, list[tuple[int, slice, torch.Tensor]]]]:
        for page, (tokens_RSE,) in self._space.prefix.stream([p for p in self._picks if p is not None]):
            yield tokens_RSE, self._picks[page]
        if None in self._picks:
            yield self._space.held_BSE, self._picks[None]


def _spread(page: Page, picks: list[tuple[int, slice, torch.Tensor]], grad_UE: torch.Tensor) -> tuple[torch.Tensor]:
    """[R, S, E] of a page's tokens: the picked rows' gradients, and zeros."""
    whole_RSE = grad_UE.new_zeros(page.rows, page.num_tokens, grad_UE.shape[1])
    for row, here, there in picks:
        whole_RSE[row, there] = grad_UE[here]
    return (whole_RSE,)
