"""Trajectories as a tree: what several of them begin with is one and the same.

A place is a token after all tokens before it; sequences that begin alike share places. Places are numbered depth first,
so that a run of tokens without a branching, an edge, has consecutive numbers.

Shapes: P places, R scored tokens of a sequence.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from longstraw.engine.ids import mask, token_ids


@dataclass(frozen=True)
class Edge:
    """Tokens that follow one another without a branching between them.

    Attributes:
        first: its first place.
        stop: the place after its last.
        start: absolute position of its first token.
        parent: the edge at whose end it begins, by number; None where a sequence begins.
    """

    first: int
    stop: int
    start: int
    parent: int | None

    def __len__(self) -> int:
        return self.stop - self.first


@dataclass(frozen=True, eq=False)
class Tree:
    """Sequences that share what they begin with. Made by `Tree.from_sequences`; `Engine.backward_tree` takes it.

    Attributes:
        ids_P: the token of each place, on the CPU.
        before_P: the place before each; -1 where a sequence begins.
        scored_P: whether a sequence scores the place.
        scored: the places that each sequence scores, [R] each, in order.
        edges: every place is in one of them; parents before their children.
        longest: tokens of the longest sequence.
    """

    ids_P: torch.Tensor
    before_P: torch.Tensor
    scored_P: torch.Tensor
    scored: list[torch.Tensor]
    edges: list[Edge]
    longest: int

    @classmethod
    def from_sequences(cls, sequences: Sequence[Any], masks: Sequence[Any]) -> Tree:
        """Finds what sequences share: everything up to the first token in which they differ.

        Sequences may be equal, begin with one another, or share nothing.

        Args:
            sequences: [S_i] token ids each, at least one. The engine that runs them knows the vocabulary.
            masks: [S_i] each, which tokens are scored: true and false, or 1 and 0. The first token of a sequence can
                not be: nothing predicts it. A place that only some of its sequences score is in their vectors alone. A
                sequence without a scored token has an empty vector.

        Raises:
            ValueError: no sequence, not as many masks, an empty sequence, a shape or values that do not fit, or a
                sequence whose first token is scored.
        """
        if isinstance(sequences, torch.Tensor) and sequences.dim() == 1:
            raise ValueError("sequences is one tensor of ids: pass a list with one tensor of ids a sequence")
        if len(sequences) == 0:
            raise ValueError("sequences is empty: pass at least one sequence")
        if len(masks) != len(sequences):
            raise ValueError(f"{len(masks)} masks for {len(sequences)} sequences: pass one a sequence")
        with torch.inference_mode(False), torch.device("cpu"):  # whatever the caller is under
            ids = [_sequence(f"sequences[{i}]", values) for i, values in enumerate(sequences)]
            wanted = [mask(f"masks[{i}]", values, len(ids[i])) for i, values in enumerate(masks)]
            for i, chosen in enumerate(wanted):
                if chosen[0]:
                    raise ValueError(f"masks[{i}] scores the first token of its sequence, which nothing predicts")
            return _grown(ids, wanted)

    @property
    def num_tokens(self) -> int:
        """Distinct places: what is run, but for tokens that nothing scored comes after, as each trajectory's last."""
        return len(self.ids_P)

    @property
    def num_prompt(self) -> int:
        """Tokens that all sequences begin with, up to the first that is scored."""
        root, *others = self.edges
        if any(edge.parent is None for edge in others):
            return 0
        scored = self.scored_P[: root.stop].nonzero()
        return int(scored[0]) if len(scored) else len(root)


def _sequence(what: str, values: Any) -> torch.Tensor:
    ids = token_ids(what, values)
    if not len(ids):
        raise ValueError(f"{what} is empty: a sequence needs at least one token, such as the tokenizer's bos")
    if bool((ids < 0).any()):
        raise ValueError(f"{what} holds id {int(ids[ids < 0][0])}: ids are not negative; was it padded with a label?")
    return ids


def _grown(sequences: list[torch.Tensor], masks: list[torch.Tensor]) -> Tree:
    """In sorted order a sequence shares with those before it what it shares with the last; the rest of it is new."""
    keys = [ids.numpy().astype(">i8").tobytes() for ids in sequences]  # bytes that sort as the numbers do
    order = sorted(range(len(sequences)), key=keys.__getitem__)
    del keys
    scored: list[torch.Tensor] = [torch.empty(0, dtype=torch.long) for _ in sequences]
    ids_parts, before_parts = [], []
    last, path, num_places = sequences[order[0]][:0], torch.empty(0, dtype=torch.long), 0
    for i in order:
        ids = sequences[i]
        shared = _num_shared(last, ids)
        new = torch.arange(num_places, num_places + len(ids) - shared)
        path = torch.cat([path[:shared], new])
        ids_parts.append(ids[shared:])
        before_parts.append(torch.cat([torch.tensor([-1]), path])[shared : len(ids)])
        scored[i] = path[masks[i]]
        last, num_places = ids, num_places + len(new)
    before = torch.cat(before_parts)
    scored_P = torch.zeros(num_places, dtype=torch.bool)
    scored_P[torch.cat(scored)] = True
    return Tree(torch.cat(ids_parts), before, scored_P, scored, _edges(before), max(map(len, sequences)))


def _num_shared(one: torch.Tensor, other: torch.Tensor) -> int:
    num = min(len(one), len(other))
    differ = (one[:num] != other[:num]).nonzero()
    return int(differ[0]) if len(differ) else num


def _edges(before_P: torch.Tensor) -> list[Edge]:
    """An edge begins where a sequence does, and at every place that shares the one before it with another."""
    after_P = before_P[before_P >= 0].bincount(minlength=len(before_P))  # how many places come after each
    begins = (before_P < 0) | (after_P[before_P.clamp(0)] > 1)
    firsts = begins.nonzero()[:, 0].tolist()
    edges: list[Edge] = []
    for first, stop in zip(firsts, [*firsts[1:], len(before_P)]):
        last = int(before_P[first])
        parent = None if last < 0 else bisect_right(firsts, last) - 1
        start = 0 if parent is None else edges[parent].start + len(edges[parent])
        edges.append(Edge(first, stop, start, parent))
    return edges
