"""Graphs that are kept from a piece's first run under one budget, so that the pullback need not run it again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from longstraw.engine.run import Run
from longstraw.parallel.context import ALONE, Context
from longstraw.state.chain import Chain


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


@dataclass
class Kept:
    """A segment that ran with a graph; or a bundle as its scoring left it.

    Attributes:
        run: the graph: the segment's, or the bundle's last block's.
        branch: a bundle's chain, with the pages of all its blocks but the last; None for a segment.
    """

    run: Run | None
    branch: Chain | None = None

    def hand_over(self) -> Run | None:
        """The graph, the first time: nothing but its one pullback may keep it alive."""
        done, self.run = self.run, None
        return done

    def release(self) -> None:
        self.run = None
        if self.branch is not None:
            self.branch.truncate(0)


class KeptGraphs:
    """What is kept of a prompt's segments or of a group's bundles, by their place.

    Args:
        budget: bytes for graphs, and for a bundle's pages on any tier; 0 keeps nothing.
        context: ranks keep the same, or one would wait for another's recomputation.
    """

    def __init__(self, budget: int = 0, context: Context = ALONE) -> None:
        self.left = budget
        self.context = context
        self._kept: dict[int, tuple[Kept, int]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, place: int) -> bool:
        return place in self._kept

    def keep(self, place: int, kept: Kept, nbytes: int) -> bool:
        """Takes what holds `nbytes`, if there is room; releases it otherwise."""
        if not self.context.agree(nbytes <= self.left, min):
            kept.release()
            return False
        self.put(place, kept, nbytes)
        return True

    def put(self, place: int, kept: Kept, nbytes: int) -> None:
        """Takes what holds `nbytes`, whatever the room."""
        self.left -= nbytes
        self._kept[place] = kept, nbytes

    def take(self, place: int) -> Kept | None:
        """Hands something over for its one pullback; its bytes are free again once that is done."""
        kept, nbytes = self._kept.pop(place, (None, 0))
        self.left += nbytes
        return kept

    def release(self) -> None:
        for place in list(self._kept):
            kept = self.take(place)
            assert kept is not None
            kept.release()


class LastSegments:
    """Which of a prompt's segments are run with a graph: as many of the last as fit into a budget.

    The first segment that gradients flow into is run with a graph to measure one; the sweep, which goes backwards, then
    frees the kept ones before it has to rebuild any.

    Args:
        kept: has the budget and takes the graphs.
        grad_from: the first segment that gradients flow into.
        num_segments: all of them.
    """

    def __init__(self, kept: KeptGraphs, grad_from: int, num_segments: int) -> None:
        self._kept = kept
        self._grad_from = grad_from
        self._num_segments = num_segments
        self._first_kept = num_segments  # as long as none was measured

    def wants(self, index: int) -> bool:
        """Whether segment `index` is to run with a graph."""
        measured = index == self._grad_from and self._kept.left > 0
        return measured or self._grad_from <= self._first_kept <= index

    def built(self, index: int, done: Run, nbytes: int) -> None:
        """Takes a segment's graph, which holds `nbytes`, and keeps it if it is one to keep."""
        if index == self._grad_from:
            num_kept = min(self._num_segments - self._grad_from, self._kept.left // max(1, nbytes))
            self._first_kept = self._num_segments - self._kept.context.agree(num_kept, min)
        if index >= self._first_kept:
            self._kept.put(index, Kept(done), nbytes)
