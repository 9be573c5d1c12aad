"""Which scored bundles are kept, as their scoring left them, so that replay need not run them again."""

from __future__ import annotations

from longstraw.engine import branches
from longstraw.engine.branches import Bundle, KeptBranch, Scored
from longstraw.engine.graphs import saved_bytes
from longstraw.engine.host import ModelHost
from longstraw.state.resident import ResidentState


class KeptBundles:
    """Bundles in the order of their scoring, as far as a budget goes.

    Args:
        budget: bytes for graphs, and for pages on any tier; 0 keeps nothing.
    """

    def __init__(self, budget: int = 0) -> None:
        self._left = budget
        self._kept: dict[int, KeptBranch] = {}

    def score(
        self, host: ModelHost, state: ResidentState, place: int, bundle: Bundle, temperature: float, chunk: int
    ) -> Scored:
        """See `branches.score`; keeps the bundle under its place if it fits."""
        if self._left > 0:
            before = state.store.used()
            try:
                with saved_bytes(list(host.model.parameters())) as saved:
                    scored, branch = branches.score_and_keep(host, state, bundle, temperature, chunk)
            except MemoryError:  # the tiers' bounds have room for the pages of one bundle at a time
                self.release()
                self._left = 0
            else:
                cost = saved.nbytes + state.store.used() - before
                if cost <= self._left:
                    self._left -= cost
                    self._kept[place] = branch
                else:
                    branch.release()
                return scored
        return branches.score(host, state, bundle, temperature, chunk)

    def take(self, place: int) -> KeptBranch | None:
        """Hands a bundle over for its one replay."""
        return self._kept.pop(place, None)

    def release(self) -> None:
        while self._kept:
            self._kept.popitem()[1].release()
