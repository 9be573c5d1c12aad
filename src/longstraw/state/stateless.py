"""A layer that leaves nothing behind, as one of perceptrons or experts alone."""

from __future__ import annotations

from typing import Any

import torch

from longstraw.pages import PageStore
from longstraw.parallel.context import Context
from longstraw.state.layer import LayerChain, PieceLayer


class StatelessChain(LayerChain):
    """Nothing, along any chain."""

    def __init__(self, store: PageStore, grad_from: int = 0) -> None:
        """Takes what every chain takes, and keeps none of it."""

    def fork(self) -> StatelessChain:
        return self

    def enter(self, index: int, rows: int, context: Context, graph: bool) -> StatelessPiece:
        return StatelessPiece()

    def commit(self, index: int, piece: Any, start: int) -> None:
        """Nothing to keep."""

    def outputs(self, index: int, piece: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return []

    def settle(self, index: int, piece: Any) -> None:
        """Nothing to move."""

    def stored(self, index: int) -> tuple[torch.Tensor, ...]:
        return ()

    def decoder(self, rows: int, context: Context) -> StatelessPiece:
        return StatelessPiece()

    def truncate(self, num_pieces: int) -> None:
        """Nothing to forget."""

    def drop_cotangents(self) -> None:
        """Nothing to forget."""


class StatelessPiece(PieceLayer):
    """Reads and writes nothing; staging passes through to the layer after it."""

    writes = False

    def written(self) -> tuple[torch.Tensor, ...]:
        return ()

    def stage(self) -> None:
        if self.next_layer is not None and not self.next_layer.last:
            self.next_layer.stage()

    def select(self, rows: torch.Tensor) -> None:
        """Nothing to keep."""
