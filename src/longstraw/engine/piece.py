"""Pieces: runs of tokens that go through the model at once. A prompt is cut into segments, responses into blocks.

Shapes: B rows, T tokens, N targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Piece:
    """A segment of a prompt, a block of responses, or their next tokens.

    Attributes:
        ids_BT: token ids.
        start: absolute position of the first of the T.
        targets: [B, T], the token that each position predicts; or, with `read_N`, [N], the tokens that those predict.
            None where nothing reads the piece's output.
        read_N: flat places in [B, T] that are read, in order; one that several tokens follow is there for each. None
            for every place.
    """

    ids_BT: torch.Tensor
    start: int
    targets: torch.Tensor | None = None
    read_N: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.ids_BT.shape[1]

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


def cut_prompt(num_tokens: int, segment_tokens: int, num_constant: int) -> list[slice]:
    """Segments of a prompt's first `num_tokens` tokens, cut where gradients begin, after `num_constant`."""
    return [
        slice(start, min(start + segment_tokens, last))
        for first, last in ((0, num_constant), (num_constant, num_tokens))
        for start in range(first, last, segment_tokens)
    ]


@dataclass(frozen=True)
class Bundle:
    """Branches that run side by side: several that fit into a block together, or a long one alone.

    A branch reads the prompt's last token, then the response but for its last, and predicts the response. Shorter
    responses are padded on the right, where nothing reads.

    Attributes:
        members: the responses' places in the group.
        lengths: tokens of each response.
        blocks: the pieces, in order.
    """

    members: list[int]
    lengths: list[int]
    blocks: list[Piece]

    def padded(self, of_members: Sequence[torch.Tensor]) -> torch.Tensor:
        """[B, T] of one [R_i] tensor a response of the whole group; zeros where a row is padded."""
        padded_BT = of_members[0].new_zeros(len(self.members), max(self.lengths))
        for member, values in self.rows_of(padded_BT):
            values.copy_(of_members[member])
        return padded_BT

    def rows_of(self, padded_BT: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """(member, [R]) views of each response's part of [B, T]."""
        return [(m, padded_BT[row, :n]) for row, (m, n) in enumerate(zip(self.members, self.lengths))]


def pack(
    prompt_ids: torch.Tensor, responses: Sequence[torch.Tensor], block_tokens: int, device: torch.device
) -> list[Bundle]:
    """Packs branches by length, so that each bundle's padded tokens fit into `block_tokens`.

    A response that does not fit is a bundle of its own, cut into blocks. Empty responses are in none.
    """
    wanted = [i for i, r in enumerate(responses) if r.numel()]
    groups = side_by_side([responses[i].numel() for i in wanted], block_tokens)
    return [_bundle(prompt_ids, responses, [wanted[i] for i in group], block_tokens, device) for group in groups]


def side_by_side(lengths: Sequence[int], block_tokens: int) -> list[list[int]]:
    """Groups rows, by their places, so that each group, padded to its longest, fits into `block_tokens`.

    Longest first; a row that does not fit is a group of its own.
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= block_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _bundle(
    prompt_ids: torch.Tensor,
    responses: Sequence[torch.Tensor],
    members: list[int],
    block_tokens: int,
    device: torch.device,
) -> Bundle:
    last_id, start = int(prompt_ids[-1]), prompt_ids.numel() - 1
    lengths = [responses[i].numel() for i in members]
    targets = torch.full((len(members), max(lengths)), last_id)
    for row, i in enumerate(members):
        targets[row, : lengths[row]] = responses[i]
    inputs = torch.cat([torch.full((len(members), 1), last_id), targets[:, :-1]], 1).to(device)
    targets = targets.to(device)
    blocks = [
        Piece(inputs[:, first : first + block_tokens], start + first, targets[:, first : first + block_tokens])
        for first in range(0, max(lengths), block_tokens)
    ]
    return Bundle(members, lengths, blocks)
