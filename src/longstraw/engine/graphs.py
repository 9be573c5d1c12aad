"""Graphs of pieces that are kept from their first run, so that the pullback need not rebuild them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import Cache


@dataclass
class PieceGraph:
    """A piece that ran with autograd: its live layers, and its hidden states [B, T, E] if something reads them."""

    cache: Cache
    hidden_BTE: torch.Tensor | None


@dataclass
class SavedBytes:
    """Bytes that graphs built inside `saved_bytes` keep alive, parameters excepted."""

    nbytes: int = 0
    _seen: set[int] = field(default_factory=set)

    def count(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.nbytes += storage.nbytes()
        return tensor


@contextmanager
def saved_bytes(parameters: list[torch.nn.Parameter]) -> Iterator[SavedBytes]:
    """Measures what the graphs built inside keep alive."""
    saved = SavedBytes(_seen={p.untyped_storage().data_ptr() for p in parameters})
    with torch.autograd.graph.saved_tensors_hooks(saved.count, lambda tensor: tensor):
        yield saved


class SegmentGraphs:
    """Which of a prompt's segments keep their graph: as many of the last as fit into a budget.

    The first segment that gradients flow into is run with a graph to measure one; the sweep, which goes backwards, then
    frees the kept ones before it has to rebuild any.

    Args:
        budget: bytes; 0 keeps none.
        first_live: the first segment that gradients flow into.
        num_segments: all of them.
    """

    def __init__(self, budget: int, first_live: int, num_segments: int) -> None:
        self.left = budget
        self._first_live = first_live
        self._num_segments = num_segments
        self._first_kept = num_segments if budget else num_segments + 1
        self.kept: dict[int, PieceGraph] = {}

    def builds(self, index: int) -> bool:
        """Whether segment `index` is to run with a graph."""
        measured = self.left > 0 and index == self._first_live
        return measured or self._first_live <= self._first_kept <= index < self._num_segments

    def built(self, index: int, graph: PieceGraph, nbytes: int) -> None:
        """Takes a segment's graph, which holds `nbytes`, and keeps it if it is one to keep."""
        if index == self._first_live:
            num_kept = min(self._num_segments - self._first_live, self.left // max(1, nbytes))
            self._first_kept = self._num_segments - num_kept
        if index >= self._first_kept:
            self.kept[index] = graph
            self.left -= nbytes

    def take(self, index: int) -> PieceGraph | None:
        """Hands a kept graph over for its one pullback."""
        return self.kept.pop(index, None)
