"""The pages before a piece: which they are, where they end, and which of them are constants to every gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from longstraw.pages.store import PageStore
from longstraw.pages.table import Page
from longstraw.parallel.context import Context


class Prefix:
    """What a piece's tokens see before themselves, and where the gradient of that goes.

    Args:
        store: holds the pages; each page's tensors have one row, shared by all rows of the piece, or as many as it.
        pages: in the order of their tokens.
        num_constant: so many of the first pages are constants: no gradient is computed for them.
    """

    def __init__(self, store: PageStore, pages: Sequence[Page] = (), num_constant: int = 0) -> None:
        self.pages = list(pages)
        self._store = store
        self._constant = {page.number for page in self.pages[:num_constant]}

    @property
    def context(self) -> Context:
        """Whose pages these are, and who owns the others."""
        return self._store.context

    @property
    def stop(self) -> int:
        """Absolute position of the token after the last; 0 where there is none."""
        return self.pages[-1].stop if self.pages else 0

    def stage(self) -> None:
        """Starts bringing the first page, which `stream` will begin with."""
        if self.pages:
            self._store.stage(self.pages[0])

    def stream(self, among: Sequence[Page] | None = None) -> Iterator[tuple[Page, tuple[torch.Tensor, ...]]]:
        """Each page with its tensors, in order, while the next one is on its way.

        Args:
            among: those of the pages that are wanted; None for all.
        """
        return self._store.stream(self.pages if among is None else among)

    def accumulate(self, page: Page, gradients: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Adds to a page's cotangent what `gradients` returns; it is not called for a constant page."""
        if page.number not in self._constant:
            self._store.accumulate(page, gradients())
