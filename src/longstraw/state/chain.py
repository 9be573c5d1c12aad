"""A chain of pieces over all layers: the prompt, or a branch that starts at its end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from transformers.cache_utils import Cache

from longstraw.parallel.context import ALONE, Context
from longstraw.state.carried import CarriedChain
from longstraw.state.layer import LayerChain


class Chain:
    """Every layer's state along one run of tokens.

    Args:
        layers: one layer chain a model layer, all of them at the same piece.
        start: absolute position of the first token.
        rows: batch rows of every piece.
        context: who holds what of it.
    """

    def __init__(self, layers: Sequence[LayerChain], start: int = 0, rows: int = 1, context: Context = ALONE) -> None:
        self.context = context
        self.layers = list(layers)
        self.rows = rows
        parts = [part for layer in self.layers for part in getattr(layer, "parts", (layer,))]
        self.carried = [part for part in parts if isinstance(part, CarriedChain)]
        self.starts = [start]  # position of the first token of every piece, and of the token after the last

    @property
    def num_pieces(self) -> int:
        return len(self.starts) - 1

    @property
    def stop(self) -> int:
        """Absolute position of the token after the last."""
        return self.starts[-1]

    def fork(self, rows: int) -> Chain:
        """A branch of `rows` rows that starts where this chain ends; this chain never changes through it."""
        return Chain([layer.fork() for layer in self.layers], self.stop, rows, self.context)

    def enter(
        self, index: int, context: Context | None = None, *, graph: bool = False, output_read: bool = True
    ) -> Cache:
        """The cache that piece `index` runs on.

        Args:
            context: of the piece; by default one that every rank runs whole.
            graph: the piece will be pulled back. Call with autograd enabled.
            output_read: something reads the piece's hidden states. Otherwise the last layer with a state stops the
                forward pass with `PieceComplete` as soon as its state is written.
        """
        context = context or self.context.decoding(self.starts[index])
        pieces = [layer.enter(index, self.rows, context, graph) for layer in self.layers]
        for piece in [piece for piece in pieces if piece.writes][-1:]:
            piece.last = not output_read
        for one, after in pairwise(pieces):
            one.next_layer = after
        return Cache(layers=pieces)

    def decoder(self, rows: int) -> Cache:
        """A cache that carries on from the chain's end, token by token, without a graph."""
        context = self.context.decoding(self.stop)
        return Cache(layers=[layer.decoder(rows, context) for layer in self.layers])

    def commit(self, cache: Cache, num_tokens: int) -> None:
        """Appends the piece that has just run on `cache`."""
        index = self.num_pieces
        for layer, piece in zip(self.layers, cache.layers):
            layer.commit(index, piece, self.stop)
        self.starts.append(self.stop + num_tokens)

    def thin_out(self, nbytes: int, num_pieces: int) -> tuple[int, int]:
        """Has carried states kept at so few boundaries that they, and those a sweep restores at a time, fit.

        Keeping every s-th of n boundaries holds n/s states, and restoring the s - 1 between two holds s more, at the
        price of one more forward pass (Griewank and Walther, "Revolve", ACM TOMS 26:1, 2000, for the general trade).
        Call it after the first piece.

        Args:
            nbytes: bound on the states at piece boundaries.
            num_pieces: pieces that a sweep will enter.

        Returns:
            s: the smallest that fits; where none does, the one that needs the least.
            The bytes that it needs.
        """
        state = sum(layer.state_nbytes(1) for layer in self.carried)
        needs = {
            stride: (-(-num_pieces // stride) + (stride if stride > 1 else 0)) * state
            for stride in range(1, max(2, num_pieces + 1))
        }
        fitting = [stride for stride, need in needs.items() if need <= nbytes]
        chosen = min(fitting) if fitting else min(needs, key=lambda stride: needs[stride])
        for layer in self.carried:
            layer.stride = chosen
        return chosen, needs[chosen]

    def keep_last_states(self) -> None:
        """Has carried states kept at the chain's end alone: nothing will be pulled back through it."""
        for layer in self.carried:
            layer.stride = sys.maxsize

    def nearest_start(self, index: int) -> int:
        """The last piece up to `index` whose starting state is at hand."""
        while not all(layer.has_start(index) for layer in self.carried):
            index -= 1
        return index

    def restore(self, index: int, cache: Cache) -> None:
        """Takes back the carried state after piece `index`, which has just run on `cache` once more."""
        for layer, piece in zip(self.layers, cache.layers):
            layer.restore(index, piece, self.starts[index])

    def forget_start(self, index: int) -> None:
        """Drops a restored starting state of piece `index`."""
        for layer in self.carried:
            layer.forget(index)

    def outputs(self, index: int, cache: Cache) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(tensor, cotangent) of everything that piece `index` wrote and later pieces read; consumes the cotangents."""
        return [pair for layer, piece in zip(self.layers, cache.layers) for pair in layer.outputs(index, piece)]

    def settle(self, index: int, cache: Cache) -> None:
        """After the pullback of piece `index`: passes on the gradient of the state it started from."""
        for layer, piece in zip(self.layers, cache.layers):
            layer.settle(index, piece)

    def truncate(self, num_pieces: int) -> None:
        """Forgets every piece from `num_pieces` on."""
        for layer in self.layers:
            layer.truncate(num_pieces)
        del self.starts[num_pieces + 1 :]

    def drop_cotangents(self) -> None:
        for layer in self.layers:
            layer.drop_cotangents()


def select_rows(cache: Cache, rows: torch.Tensor) -> None:
    """Keeps the given rows of a decoding cache."""
    piece: Any
    for piece in cache.layers:
        piece.select(rows)
