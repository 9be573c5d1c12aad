"""The contract between one layer's state and the engine.

A chain is a run of pieces: the prompt's segments, or the blocks of a branch that starts where the prompt ends. In each
layer a chain keeps what its tokens leave behind. For every piece the engine asks the layer's chain for a piece layer
(a transformers cache layer), runs the model's forward pass over it, and then either

- `commit`s what the piece wrote, without a graph, or
- collects `outputs`, the (tensor, cotangent) pairs that the piece's graph is pulled back from, and afterwards has the
  gradients of the piece's starting state moved to where the piece before will find them (`settle`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from longstraw.parallel.context import ALONE, Context


class PieceComplete(Exception):
    """Raised by the last layer once a prompt piece has left its state there: nothing reads what would follow."""


class LayerChain(ABC):
    """One layer's state along one chain."""

    @abstractmethod
    def fork(self) -> LayerChain:
        """A branch that starts at this chain's end and never changes it."""

    @abstractmethod
    def enter(self, index: int, rows: int, context: Context, graph: bool) -> Any:
        """A cache layer for piece `index`, which starts from the state that piece `index - 1` left.

        Args:
            rows: batch rows of the piece.
            context: who has its tokens.
            graph: the piece will be pulled back: the starting state has to collect a gradient.
        """

    @abstractmethod
    def commit(self, index: int, piece: Any, start: int) -> None:
        """Keeps what piece `index`, whose first token stands at position `start`, wrote, detached."""

    @abstractmethod
    def outputs(self, index: int, piece: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What the piece wrote, paired with the cotangents that later pieces left for it; these are consumed."""

    @abstractmethod
    def settle(self, index: int, piece: Any) -> None:
        """After the pullback: adds the gradient of the piece's starting state to the cotangent of the piece before."""

    def restore(self, index: int, piece: Any, start: int) -> None:  # noqa: B027  (append-only state has nothing to do)
        """Takes back the state after piece `index`, committed before but not kept; arguments as in `commit`."""

    @abstractmethod
    def stored(self, index: int) -> tuple[torch.Tensor, ...]:
        """What `commit` kept of piece `index`, in the order of `PieceLayer.written`."""

    @abstractmethod
    def decoder(self, rows: int, context: Context) -> Any:
        """A piece layer that carries on from the chain's end over any number of forward passes, without a graph.

        It has `select(rows)`, which keeps the given rows only.
        """

    @abstractmethod
    def truncate(self, num_pieces: int) -> None:
        """Forgets every piece from `num_pieces` on."""

    @abstractmethod
    def drop_cotangents(self) -> None:
        """Forgets cotangents that were not consumed, as after a step that failed."""


class PieceLayer:
    """What all piece layers share. A piece runs on each of them once: most of a cache layer's bookkeeping is void."""

    is_compileable = False
    is_sliding = False
    writes = True  # its tokens leave a state behind
    last = False  # set on the last layer of a piece whose output nothing reads
    next_layer: PieceLayer | None = None
    context: Context = ALONE  # who has the piece's tokens

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0  # positions are always passed, so that nothing depends on it

    def get_max_length(self) -> int:
        return -1

    def written(self) -> tuple[torch.Tensor, ...]:
        """What the piece wrote, but for what collects no gradient (index keys)."""
        raise NotImplementedError

    def refuse_window(self, window: int | None) -> None:
        """Raises where an attention asks for a window and its layer's state has none.

        Raises:
            ValueError: names the window.
        """
        if window is not None:
            raise ValueError(
                f"the model's attention asks for a window of {window} tokens in a layer that is served as one without: "
                "its family in longstraw/models has to give the layer a WindowChain"
            )

    def rewind(self) -> None:
        """Goes back to the starting state, before the layer is computed once more."""

    def stage(self) -> None:
        """Starts bringing what the layer will read first, while the one before computes."""

    def complete(self) -> None:
        """Called when the layer's state is written, before the bulk of its work."""
        if self.last:
            raise PieceComplete
        if self.next_layer is not None and not self.next_layer.last:
            self.next_layer.stage()
