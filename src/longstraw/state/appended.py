"""State that only grows: every piece appends what its tokens leave behind, in pages of one piece each.

A piece joins by `extend`: it hands over its tokens' tensors, one for each column of the chain (keys and values are one
column, latents another, index keys a third), and gets back those of all tokens that it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch

from longstraw.pages import Page, PageStore
from longstraw.pages.prefix import Prefix
from longstraw.parallel.context import Context
from longstraw.state.layer import LayerChain, PieceLayer
from longstraw.state.tail import Tail

Tensors = tuple[torch.Tensor, ...]


class AppendedChain(LayerChain):
    """One layer's grown state along one chain. Only the first column's pages collect a gradient.

    A rank whose share of a piece is padding alone has no page of it, None in its place.

    Args:
        store: where the pages go.
        grad_from: pages of pieces before this one are constants to every gradient.
        parent: the chain at whose end this one starts.

    Attributes:
        columns: kinds of the pages that a piece may write.
        piece: the layer that a piece, or a decoder, runs on: (one prefix a column, context, grows) -> AppendedPiece.
    """

    columns: ClassVar[tuple[str, ...]]
    piece: ClassVar[type[AppendedPiece]]

    def __init__(self, store: PageStore, grad_from: int = 0, parent: Self | None = None) -> None:
        self.store = store
        self.grad_from = grad_from
        self.pages: list[list[Page | None]] = [[] for _ in self.columns]
        self.num_pieces = 0
        self._before: list[list[Page | None]] = [[] for _ in self.columns]
        self._num_constant = 0
        if parent is not None:
            self._before = [before + own for before, own in zip(parent._before, parent.pages)]
            self._num_constant = parent._constant_before(parent.num_pieces)

    def fork(self) -> Self:
        return type(self)(self.store, parent=self)

    def enter(self, index: int, rows: int, context: Context, graph: bool) -> Any:
        return self.piece(self._prefixes(index, context), context)

    def decoder(self, rows: int, context: Context) -> Any:
        return self.piece(self._prefixes(self.num_pieces, context), context, grows=True)

    def commit(self, index: int, piece: AppendedPiece, start: int) -> None:
        if index != self.num_pieces:
            raise RuntimeError(f"piece {index} is committed after {self.num_pieces} pieces")
        for kind, pages, tensors in zip(self.columns, self.pages, piece.held):
            if tensors is not None:
                empty = tensors[0].shape[-2] == 0  # a rank's share may be padding alone
                pages.append(None if empty else self.store.put(kind, piece.context.own_start, tensors))
        self.num_pieces += 1

    def outputs(self, index: int, piece: AppendedPiece) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if index >= self.num_pieces:  # the chain's last piece was never committed: nothing came after it
            return []
        page = self.pages[0][index]
        cotangents = None if page is None else self.store.take_cotangent(page)
        if not self.store.context.agree(cotangents is not None):
            return []
        if cotangents is None:  # but other ranks have some, and their graphs wait for this one's
            cotangents = tuple(torch.zeros_like(written) for written in piece.written())
        return [(written, c.to(written.dtype)) for written, c in zip(piece.written(), cotangents)]

    def settle(self, index: int, piece: AppendedPiece) -> None:
        """Nothing to move: the attention's backward has already added to the pages it read."""

    def stored(self, index: int) -> Tensors:
        page = self.pages[0][index]
        return () if page is None else self.store.fetch(page)

    def truncate(self, num_pieces: int) -> None:
        for pages in self.pages:
            while len(pages) > num_pieces:
                page = pages.pop()
                if page is not None:
                    self.store.free(page)
        self.num_pieces = min(self.num_pieces, num_pieces)

    def drop_cotangents(self) -> None:
        for page in self.pages[0]:
            if page is not None:
                self.store.drop_cotangent(page)

    def _constant_before(self, index: int) -> int:
        return self._num_constant + min(self.grad_from, index)

    def _prefixes(self, index: int, context: Context) -> list[Prefix]:
        constant = self._constant_before(index)
        return [
            Prefix(self.store, before + own[:index], constant if column == 0 else 0, context)
            for column, (before, own) in enumerate(zip(self._before, self.pages))
        ]


class AppendedPiece(PieceLayer):
    """One piece's tokens behind the pages before them; or B rows of tokens that grow one by one, without a graph.

    Attributes:
        prefixes: the pages before the piece, one a column.
        context: who has the piece's tokens; this rank keeps its own.
        grows: whether it serves a decoder, over many forward passes.
        held: what the tokens left behind, one tuple of [B, ..., S, dim] a column; None before them, and for a column
            that the layer does not write.
    """

    def __init__(self, prefixes: Sequence[Prefix], context: Context, grows: bool = False) -> None:
        super().__init__()
        self.context = context
        self.prefixes = list(prefixes)
        self.grows = grows
        self.held: list[Tensors | None] = [None for _ in prefixes]
        self._tails: dict[tuple[int, int], Tail] = {}

    def extend(self, *columns: Tensors | None) -> list[Tensors | None]:
        """Takes new tokens' tensors, a tuple a column; returns those of all tokens that the layer holds.

        Without a decoder, these are the piece's own, and the forward pass ends here if nothing reads on.
        """
        if self.grows:
            self.held = [None if c is None else self._grown(place, c) for place, c in enumerate(columns)]
        else:
            self.held = [None if c is None else tuple(self.context.unpadded(t, -2) for t in c) for c in columns]
            self.complete()
        return self.held

    def written(self) -> Tensors:
        assert self.held[0] is not None
        return self.held[0]

    def stage(self) -> None:
        self.prefixes[0].stage()

    def select(self, rows: torch.Tensor) -> None:
        """Keeps the given rows."""
        for tail in self._tails.values():
            tail.select(rows)

    def _grown(self, column: int, tensors: Tensors) -> Tensors:
        return tuple(self._tails.setdefault((column, i), Tail()).append(t) for i, t in enumerate(tensors))
