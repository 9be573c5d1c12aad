"""State of fixed size that every piece replaces: recurrent matrices, convolution tails, attention windows.

A piece starts from leaves that collect a gradient and ends with new tensors. States at piece boundaries are stored as
pages, so that they may rest off the device.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from longstraw.pages import Page, PageStore
from longstraw.parallel.context import Context
from longstraw.state.layer import LayerChain, PieceLayer

Tensors = tuple[torch.Tensor, ...]


class CarriedPiece(PieceLayer):
    """A piece layer of `rows` rows whose state is carried: `start` (as many rows, or one for all) becomes `end`."""

    def __init__(self, start: Tensors | None, rows: int) -> None:
        super().__init__()
        self.start = start
        self.end: Tensors | None = None
        self._rows = rows
        self.rewind()

    def written(self) -> Tensors:
        assert self.end is not None
        return self.end

    def select(self, rows: torch.Tensor) -> None:
        """Keeps the given rows."""
        if self.end is not None:
            self.end = tuple(t[rows] for t in self.end)

    def _start_of_rows(self) -> Tensors | None:
        return None if self.start is None else tuple(t.expand(self._rows, *t.shape[1:]) for t in self.start)


class CarriedChain(LayerChain):
    """A carried state along one chain.

    Args:
        store: where the states at piece boundaries go.
        kind: their kind in the accounting.
        grad_from: the state before this piece is a constant to every gradient, and so is every earlier one; of the
            states at piece boundaries only later ones are kept (every `stride`-th of them), and the last two.
        parent: the chain at whose end this one starts.
    """

    def __init__(self, store: PageStore, kind: str, grad_from: int = 0, parent: CarriedChain | None = None) -> None:
        self.store = store
        self.kind = kind
        self.grad_from = grad_from
        self.parent = parent
        self.num_pieces = 0
        self.stride = 1
        self._states: dict[int, Page] = {}  # by the piece that starts from it
        self._cotangents: dict[int, Tensors] = {}

    @abstractmethod
    def piece(self, start: Tensors | None, rows: int) -> Any:
        """A piece layer of `rows` rows that starts from `start` (as many rows, or one for all; None: no token yet)."""

    def start_of(self, index: int) -> Tensors | None:
        if index == 0:
            return self.parent.start_of(self.parent.num_pieces) if self.parent is not None else None
        if index not in self._states:
            raise RuntimeError(f"the {self.kind} state before piece {index} was not kept")
        return self.store.fetch(self._states[index])

    def constant_at(self, index: int) -> bool:
        """Whether the state before piece `index` is a constant to every gradient."""
        if index == 0 and self.parent is not None:
            return self.parent.constant_at(self.parent.num_pieces)
        return index <= self.grad_from

    def enter(self, index: int, rows: int, context: Context, graph: bool) -> Any:
        start = self.start_of(index)
        if start is not None and graph and not self.constant_at(index):
            if index and not self._keeps(index):  # a graph that is kept outlives this page
                start = tuple(t.clone() for t in start)
            start = tuple(t.detach().requires_grad_() for t in start)
        return self._piece(start, rows, context)

    def commit(self, index: int, piece: CarriedPiece, start: int) -> None:
        if index != self.num_pieces:
            raise RuntimeError(f"piece {index} is committed after {self.num_pieces} pieces")
        assert piece.end is not None
        self._put(index + 1, start, piece.end)
        self.num_pieces += 1
        self.forget(index - 1)  # the last piece keeps both its ends

    def has_start(self, index: int) -> bool:
        """Whether the state before piece `index` is at hand."""
        return index == 0 or index in self._states

    def restore(self, index: int, piece: CarriedPiece, start: int) -> None:
        if index + 1 not in self._states:
            assert piece.end is not None
            self._put(index + 1, start, piece.end)

    def stored(self, index: int) -> Tensors:
        return self.store.fetch(self._states[index + 1])

    def has_end(self, index: int) -> bool:
        """Whether the state after piece `index` is at hand."""
        return index + 1 in self._states

    def state_nbytes(self, index: int) -> int:
        """Bytes of the state before piece `index`, which has to be at hand."""
        return self._states[index].nbytes

    def forget(self, index: int) -> None:
        """Drops the state before piece `index`, which no sweep enters again, unless it is kept for the next one."""
        if index in self._states and not self._keeps(index) and index < self.num_pieces - 1:
            self.store.free(self._states.pop(index))

    def outputs(self, index: int, piece: CarriedPiece) -> list[tuple[torch.Tensor, torch.Tensor]]:
        assert piece.end is not None
        cotangents = self._cotangents.pop(index + 1, None)
        if not self.store.context.agree(cotangents is not None):
            return []
        if cotangents is None:  # but other ranks have some, and their graphs wait for this one's
            cotangents = tuple(torch.zeros_like(end) for end in piece.end)
        return [(end, c.to(end.dtype)) for end, c in zip(piece.end, cotangents) if end.requires_grad]

    def settle(self, index: int, piece: CarriedPiece) -> None:
        if piece.start is None or not piece.start[0].requires_grad:
            return
        gradients = tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in piece.start)
        if index == 0 and self.parent is not None:
            self.parent.add_cotangent(self.parent.num_pieces, gradients)
        else:
            self.add_cotangent(index, gradients)

    def add_cotangent(self, index: int, gradients: Sequence[torch.Tensor]) -> None:
        """Adds to the cotangent of the state before piece `index`, in float32 at least."""
        wide = [g if g.dtype == torch.float64 else g.float() for g in gradients]
        if index in self._cotangents:
            for total, gradient in zip(self._cotangents[index], wide):
                total.add_(gradient)
        else:
            self._cotangents[index] = tuple(g.clone() for g in wide)

    def _piece(self, start: Tensors | None, rows: int, context: Context) -> Any:
        piece = self.piece(start, rows)
        piece.context = context
        return piece

    def _keeps(self, index: int) -> bool:
        return index >= self.grad_from and (index - self.grad_from) % self.stride == 0

    def _put(self, index: int, start: int, state: Tensors) -> None:
        self._states[index] = self.store.put(self.kind, start, state, token_dim=None)

    def decoder(self, rows: int, context: Context) -> Any:
        return self._piece(self.start_of(self.num_pieces), rows, context)

    def truncate(self, num_pieces: int) -> None:
        for index in [i for i in self._states if i > num_pieces]:
            self.store.free(self._states.pop(index))
        self.num_pieces = min(self.num_pieces, num_pieces)

    def drop_cotangents(self) -> None:
        self._cotangents.clear()
