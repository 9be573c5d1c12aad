"""A walk through a tree, depth first: scored on the way down, pulled back limb by limb in the reverse order.

Alive at a time are the pages of one path from the root, and one piece's graph. A limb that was left behind runs once
more, without a graph, when the walk comes back through it; the last path of the way down is still there. So a place
costs a forward pass for its score, perhaps one for its pages, and one with its backward pass.

Shapes: P places of the tree, N targets of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from longstraw.engine import run
from longstraw.engine.ambient import Autocast
from longstraw.engine.capture import restore_start, thin_out
from longstraw.engine.host import ModelHost
from longstraw.engine.limbs import Limb
from longstraw.engine.piece import Piece
from longstraw.engine.run import HeadOptions
from longstraw.engine.tree import Tree
from longstraw.pages import PageStore
from longstraw.precision import wide_dtype
from longstraw.state.chain import Chain

OnTokens = Callable[[int], None]


class Path:
    """The limbs from a root to where the walk stands: of no other are there any pages.

    Args:
        limbs: the tree's, parents before their children.
        boundary_bytes: bound on carried states at the boundaries of the root's pieces; None is no bound.
    """

    def __init__(self, host: ModelHost, store: PageStore, limbs: Sequence[Limb], boundary_bytes: int | None) -> None:
        self.host = host
        self.store = store
        self.limbs = limbs
        self._boundary_bytes = boundary_bytes
        self._chains: dict[int, Chain] = {}  # of the limbs along the path, in order

    def enter(self, place: int) -> Chain:
        """The chain of a limb whose parent is on the path, at whose end it starts; what else came after it is left."""
        limb = self.limbs[place]
        while self._chains and next(reversed(self._chains)) != limb.parent:
            self.leave(next(reversed(self._chains)))
        if limb.parent is None:
            root = self.host.new_chain(self.store, limb.grad_from)
            chain = root.fork(limb.rows) if limb.rows > 1 else root
        else:
            chain = self._chains[limb.parent].fork(limb.rows)
        self._chains[place] = chain
        return chain

    def extend(self, place: int, index: int, piece: Piece) -> run.Run:
        """Runs a limb's next piece; what it leaves behind is kept, unless nothing will read it."""
        limb, chain = self.limbs[place], self._chains[place]
        if limb.is_leaf and index == len(limb.pieces) - 1:
            return run.run(self.host, chain, index, piece)
        done = run.extend(self.host, chain, piece)
        num_entered = len(limb.pieces) - limb.grad_from
        if index == 0 and limb.parent is None and chain.carried and num_entered:
            thin_out(chain, num_entered, self._boundary_bytes)
        return done

    def reach(self, place: int) -> Chain:
        """Has a limb on the path, and all its pages but those that nothing reads; runs what was left behind."""
        missing, at = [], place
        while at not in self._chains:
            missing.append(at)
            parent = self.limbs[at].parent
            if parent is None:
                break
            at = parent
        for one in reversed(missing):
            self.enter(one)
            for index in range(len(self.limbs[one].pieces) - self.limbs[one].is_leaf):
                self.extend(one, index, self.unread(one, index))
        return self._chains[place]

    def unread(self, place: int, index: int) -> Piece:
        """A limb's piece, run for its state alone."""
        return replace(self.limbs[place].pieces[index], targets=None, read_N=None)

    def leave(self, place: int) -> None:
        """Frees a limb's pages, if it is on the path: at its end, then."""
        chain = self._chains.pop(place, None)
        if chain is not None:
            chain.truncate(0)

    def close(self) -> None:
        """Frees everything; safe to call again."""
        self._chains.clear()
        self.store.close()


@dataclass
class TreeScored:
    """A tree's sequences, scored under the present parameters and ready to be pulled back once.

    Attributes:
        tree: the sequences.
        logps: log-probabilities of each sequence's scored tokens, one leaf [R_i] a sequence, float32 at least.
        entropies: of the distribution that each token is from, in nats, [R_i] each, without a gradient.
        options: temperature and head chunk that they were scored with.
        path: the limbs whose pages are alive, the root's among them.
        parameter_version: of the parameters that they were scored under.
        autocast: what they were scored under.
    """

    tree: Tree
    logps: list[torch.Tensor]
    entropies: list[torch.Tensor]
    options: HeadOptions
    path: Path
    parameter_version: int
    autocast: Autocast
    used: bool = False

    def release(self) -> None:
        """Frees what was kept for the pullback; safe to call again."""
        self.used = True
        self.path.close()


def score(path: Path, num_places: int, options: HeadOptions, on_tokens: OnTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of a tree's scored places, [P] each, zero for the others, without a graph.

    The path ends at the last limb.
    """
    host = path.host
    logps_P = torch.zeros(num_places, dtype=wide_dtype(next(host.head.parameters()).dtype), device=host.device)
    entropies_P = torch.zeros_like(logps_P)
    for place, limb in enumerate(path.limbs):
        path.enter(place)
        for index, (piece, places) in enumerate(zip(limb.pieces, limb.places)):
            done = path.extend(place, index, piece)
            if places is not None:
                logps_N, entropies_N = run.score(host, piece, done, options)
                logps_P[places], entropies_P[places] = logps_N.to(logps_P), entropies_N.to(logps_P)
            on_tokens(limb.num_tokens[index])
    return logps_P, entropies_P


def pull_back(path: Path, cotangents_P: torch.Tensor, options: HeadOptions, on_tokens: OnTokens) -> None:
    """Pulls the places' cotangents back; what several limbs leave at the fork they start from is summed there."""
    agree = path.store.context.agree
    reached: set[int | None] = set()  # limbs after which something was pulled back
    for place in reversed(range(len(path.limbs))):
        limb = path.limbs[place]
        cotangents = [None if places is None else cotangents_P[places] for places in limb.places]
        wanted = [c is not None and bool(agree(bool(c.any()))) for c in cotangents]
        later = place in reached
        if not later and not any(wanted):
            path.leave(place)
            on_tokens(sum(limb.num_tokens))
            continue
        reached.add(limb.parent)
        chain = path.reach(place)
        for index in reversed(range(len(limb.pieces))):
            later |= wanted[index]
            if later and index >= limb.grad_from:
                restore_start(path.host, chain, index, partial(path.unread, place))
                run.backward(path.host, chain, index, limb.pieces[index], options, cotangents[index])
            chain.truncate(index)
            on_tokens(limb.num_tokens[index])
        path.leave(place)


def of_sequences(tree: Tree, values_P: torch.Tensor) -> list[torch.Tensor]:
    """[R_i] a sequence, of its scored places."""
    return [values_P[places.to(values_P.device)] for places in tree.scored]


def of_places(tree: Tree, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """[P], where the values of sequences that share a place sum."""
    total_P = torch.zeros(tree.num_tokens, dtype=values[0].dtype, device=values[0].device)
    for places, of_sequence in zip(tree.scored, values):  # one by one, each place once in each: a fixed order
        total_P[places.to(total_P.device)] += of_sequence
    return total_P
