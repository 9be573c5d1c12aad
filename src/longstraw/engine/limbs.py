"""Limbs: a tree as it runs, each edge a chain of pieces that starts at its parent's end.

Edges at whose ends nothing starts run side by side with their siblings where they are short, as responses do. A token
that nothing scored comes after does not run at all.

Shapes: B rows, T tokens, N targets, P places of the tree.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longstraw.engine.piece import Piece, side_by_side
from longstraw.engine.tree import Edge, Tree


@dataclass(frozen=True)
class Limb:
    """An edge; or leaves that start at one place, side by side.

    Attributes:
        parent: the limb at whose end it starts, by place in the plan; None where sequences begin.
        pieces: in order.
        places: the tree's places that each piece's targets are, [N]; None for a piece without targets.
        rows: edges that run side by side.
        is_leaf: nothing starts at its end.
        grad_from: pieces before this one are constants to every gradient.
        num_tokens: tokens of each piece, padding excepted.
    """

    parent: int | None
    pieces: list[Piece]
    places: list[torch.Tensor | None]
    rows: int
    is_leaf: bool
    grad_from: int
    num_tokens: list[int]


def plan(tree: Tree, num_constant: int, segment_tokens: int, block_tokens: int, device: torch.device) -> list[Limb]:
    """A tree's limbs, parents before their children, depth first: leaves, then the lighter subtrees.

    The heaviest path comes last, so that a walk back finds its pages where the walk down left them.

    Args:
        num_constant: so many of the common prompt's first tokens are constants.
        segment_tokens: tokens a piece where none of them is read.
        block_tokens: tokens a piece elsewhere.
    """
    return _Plan(tree, num_constant, segment_tokens, block_tokens, device).limbs()


class _Reads:
    """What is predicted, in the order of the places that predict it."""

    def __init__(self, tree: Tree) -> None:
        targets = (tree.scored_P & (tree.before_P >= 0)).nonzero()[:, 0]
        order = tree.before_P[targets].argsort(stable=True)
        self._targets = targets[order]
        self._read = tree.before_P[self._targets]

    def within(self, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Places that are predicted from the places `first` to `stop`, [N], and how far from `first` each one is read.

        The last place before a fork is read once for each child that is scored.
        """
        begin, end = torch.searchsorted(self._read, torch.tensor([first, stop])).tolist()
        return self._targets[begin:end], self._read[begin:end] - first


class _Plan:
    """See `plan`.

    Attributes:
        num_run: of each edge, how many tokens run.
        after: running edges that start at each edge's end; those under None begin sequences.
        weight: of each edge, the tokens that run in it and after it.
    """

    def __init__(
        self, tree: Tree, num_constant: int, segment_tokens: int, block_tokens: int, device: torch.device
    ) -> None:
        self.tree = tree
        self.reads = _Reads(tree)
        self.num_constant = num_constant
        self.segment_tokens = segment_tokens
        self.block_tokens = block_tokens
        self.device = device
        self.num_run = [0] * len(tree.edges)
        self.weight = [0] * len(tree.edges)
        self.after: dict[int | None, list[int]] = {}
        for number, edge in reversed(list(enumerate(tree.edges))):
            after = self.after.get(number, [])
            after.reverse()
            _, read = self.reads.within(edge.first, edge.stop)
            self.num_run[number] = len(edge) if after else int(read[-1]) + 1 if len(read) else 0
            self.weight[number] = self.num_run[number] + sum(self.weight[child] for child in after)
            if self.num_run[number]:
                self.after.setdefault(edge.parent, []).append(number)
        self.after.get(None, []).reverse()

    def limbs(self) -> list[Limb]:
        limbs: list[Limb] = []
        waiting: list[tuple[list[int], int | None]] = [(numbers, None) for numbers in reversed(self._starting(None))]
        while waiting:
            numbers, parent = waiting.pop()
            waiting += [(after, len(limbs)) for after in reversed(self._starting(numbers[0]))]
            limbs.append(self._limb(numbers, parent))
        return limbs

    def _starting(self, number: int | None) -> list[list[int]]:
        """The edges that start at an edge's end, those that run side by side together."""
        after = self.after.get(number, [])
        leaves = [child for child in after if child not in self.after]
        groups = side_by_side([self.num_run[leaf] for leaf in leaves], self.block_tokens)
        inner = sorted((child for child in after if child in self.after), key=self.weight.__getitem__)
        return [[leaves[i] for i in group] for group in groups] + [[child] for child in inner]

    def _limb(self, numbers: list[int], parent: int | None) -> Limb:
        edges, lengths = [self.tree.edges[number] for number in numbers], [self.num_run[number] for number in numbers]
        constant = self.num_constant if parent is None else 0
        if len(numbers) > 1:
            cuts, num_tokens = [slice(0, max(lengths))], [sum(lengths)]
        else:
            read = self.reads.within(edges[0].first, edges[0].stop)[1].tolist()
            cuts = [*self._cuts(read, 0, constant), *self._cuts(read, constant, lengths[0])]
            num_tokens = [tokens.stop - tokens.start for tokens in cuts]
        cut = [self._piece(edges, lengths, tokens) for tokens in cuts]
        return Limb(
            parent=parent,
            pieces=[piece for piece, _ in cut],
            places=[places for _, places in cut],
            rows=len(numbers),
            is_leaf=numbers[0] not in self.after,
            grad_from=sum(tokens.stop <= constant for tokens in cuts),
            num_tokens=num_tokens,
        )

    def _cuts(self, read: Sequence[int], first: int, stop: int) -> list[slice]:
        """Pieces of an edge's tokens from `first` to `stop`, of which those in `read` are read."""
        cuts = []
        while first < stop:
            ahead = bisect_left(read, first)
            unread = min(stop, read[ahead] if ahead < len(read) else stop) - first
            if unread >= min(self.block_tokens, stop - first):
                num = min(unread, self.segment_tokens)
            else:
                num = min(self.block_tokens, stop - first)
            cuts.append(slice(first, first + num))
            first += num
        return cuts

    def _piece(self, edges: list[Edge], lengths: list[int], tokens: slice) -> tuple[Piece, torch.Tensor | None]:
        """A piece of edges side by side, and the places that it predicts."""
        ids_BT = torch.zeros(len(edges), tokens.stop - tokens.start, dtype=torch.long)
        targets, read = [], []
        for row, (edge, length) in enumerate(zip(edges, lengths)):
            first, stop = edge.first + tokens.start, edge.first + min(tokens.stop, length)
            ids_BT[row, : stop - first] = self.tree.ids_P[first:stop]
            of_row, at = self.reads.within(first, stop)
            targets.append(of_row)
            read.append(at + row * ids_BT.shape[1])
        ids_BT, start, places = ids_BT.to(self.device), edges[0].start + tokens.start, torch.cat(targets)
        if not len(places):
            return Piece(ids_BT, start), None
        predicted = self.tree.ids_P[places].to(self.device)
        return Piece(ids_BT, start, predicted, torch.cat(read).to(self.device)), places.to(self.device)
