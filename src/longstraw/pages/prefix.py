"""The pages before a piece: which they are, where they end, and which of them are constants to every gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from longstraw.pages.store import PageStore
from longstraw.pages.table import Page
from longstraw.parallel.context import ALONE, Context


class Prefix:
    """What a piece's tokens see before themselves, and where the gradient of that goes.

    Args:
        store: holds the pages; each page's tensors have one row, shared by all rows of the piece, or as many as it.
        pages: in the order of their tokens; None where this rank has none.
        num_constant: so many of the first pages are constants: no gradient is computed for them.
        context: who has the piece's tokens, and the pages that this rank has not; None for one process, where the piece
            follows the last page.
    """

    def __init__(
        self,
        store: PageStore,
        pages: Sequence[Page | None] = (),
        num_constant: int = 0,
        context: Context | None = None,
    ) -> None:
        self.pages = [page for page in pages if page is not None]
        if context is None:
            context = ALONE.decoding(self.pages[-1].stop if self.pages else 0)
        self.context = context
        self._store = store
        self._constant = {page.number for page in pages[:num_constant] if page is not None}

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
