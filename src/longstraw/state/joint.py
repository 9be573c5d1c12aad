"""A decoder layer with two mixers side by side, a recurrence and then attention, and the state of both."""

from __future__ import annotations

from typing import Any

import torch

from longstraw.pages import PageStore
from longstraw.parallel.context import Context
from longstraw.state.kv import KVChain
from longstraw.state.layer import LayerChain, PieceLayer
from longstraw.state.recurrent import RecurrentChain


class JointChain(LayerChain):
    """The chains of a layer's recurrence and of its attention, in the order in which they run.

    Attributes:
        parts: the two chains.
    """

    def __init__(
        self, store: PageStore, grad_from: int = 0, parts: tuple[LayerChain, LayerChain] | None = None
    ) -> None:
        self.parts = parts or (RecurrentChain(store, grad_from), KVChain(store, grad_from))
        self._store = store

    def fork(self) -> JointChain:
        recurrent, attention = self.parts
        return JointChain(self._store, parts=(recurrent.fork(), attention.fork()))

    def enter(self, index: int, rows: int, context: Context, graph: bool) -> JointPiece:
        return JointPiece(*(part.enter(index, rows, context, graph) for part in self.parts))

    def commit(self, index: int, piece: JointPiece, start: int) -> None:
        for part, one in zip(self.parts, piece.parts):
            part.commit(index, one, start)

    def outputs(self, index: int, piece: JointPiece) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [pair for part, one in zip(self.parts, piece.parts) for pair in part.outputs(index, one)]

    def settle(self, index: int, piece: JointPiece) -> None:
        for part, one in zip(self.parts, piece.parts):
            part.settle(index, one)

    def restore(self, index: int, piece: JointPiece, start: int) -> None:
        for part, one in zip(self.parts, piece.parts):
            part.restore(index, one, start)

    def stored(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for part in self.parts for tensor in part.stored(index))

    def decoder(self, rows: int, context: Context) -> JointPiece:
        return JointPiece(*(part.decoder(rows, context) for part in self.parts))

    def truncate(self, num_pieces: int) -> None:
        for part in self.parts:
            part.truncate(num_pieces)

    def drop_cotangents(self) -> None:
        for part in self.parts:
            part.drop_cotangents()


class JointPiece(PieceLayer):
    """The piece layers of both parts behind one place in the cache.

    Attributes:
        recurrent: the recurrence's piece layer, which its forward asks for.
        attention: the attention's, which the stock forward updates.
    """

    def __init__(self, recurrent: Any, attention: Any) -> None:
        self.recurrent, self.attention = recurrent, attention
        self.parts = (recurrent, attention)

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values go to the attention's part."""
        return self.attention.update(*args, **kwargs)

    @property
    def last(self) -> bool:  # type: ignore[override]
        """The layer's state is whole when the attention's is."""
        return self.attention.last

    @last.setter
    def last(self, last: bool) -> None:
        self.attention.last = last

    @property
    def next_layer(self) -> Any:
        """What the attention stages once it has written."""
        return self.attention.next_layer

    @next_layer.setter
    def next_layer(self, layer: Any) -> None:
        self.attention.next_layer = layer

    def written(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for part in self.parts for tensor in part.written())

    def rewind(self) -> None:
        for part in self.parts:
            part.rewind()

    def stage(self) -> None:
        for part in self.parts:
            part.stage()

    def select(self, rows: torch.Tensor) -> None:
        for part in self.parts:
            part.select(rows)
