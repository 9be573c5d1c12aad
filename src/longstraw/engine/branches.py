"""Responses as branches of a captured prompt: packing, scoring and replay.

A branch starts with the prompt's last token, whose output predicts the first response token. Shapes: B branches side by
side, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longstraw.engine.graphs import PieceGraph
from longstraw.engine.host import ModelHost
from longstraw.engine.pullback import Targets, build, pull_back
from longstraw.objective import logprobs
from longstraw.state.chain import Chain
from longstraw.state.resident import ResidentState


@dataclass
class Bundle:
    """Branches that run in one batch: several that fit into a block together, or a long one alone.

    Attributes:
        members: their places in the group.
        inputs_BT: what each position reads: the prompt's last token, then the response but for its last.
        targets_BT: what it predicts: the response. Shorter responses are padded on the right, where nothing reads.
        lengths: tokens of each response.
        blocks: slices of T.
    """

    members: list[int]
    inputs_BT: torch.Tensor
    targets_BT: torch.Tensor
    lengths: list[int]
    blocks: list[slice]


def pack(
    last_prompt_id: int, responses: Sequence[torch.Tensor], block_tokens: int, device: torch.device
) -> list[Bundle]:
    """Packs branches by length, so that each bundle's padded tokens fit into `block_tokens`.

    A response that does not fit is a bundle of its own, cut into blocks. Empty responses are in none.
    """
    order = sorted((i for i, r in enumerate(responses) if r.numel()), key=lambda i: responses[i].numel(), reverse=True)
    groups: list[list[int]] = []
    for i in order:
        longest = responses[groups[-1][0]].numel() if groups else 0
        if groups and (len(groups[-1]) + 1) * longest <= block_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    return [_bundle(last_prompt_id, responses, members, block_tokens, device) for members in groups]


def _bundle(
    last_prompt_id: int,
    responses: Sequence[torch.Tensor],
    members: list[int],
    block_tokens: int,
    device: torch.device,
) -> Bundle:
    lengths = [responses[i].numel() for i in members]
    targets = torch.full((len(members), max(lengths)), last_prompt_id)
    for row, i in enumerate(members):
        targets[row, : lengths[row]] = responses[i]
    first = torch.full((len(members), 1), last_prompt_id)
    inputs = torch.cat([first, targets[:, :-1]], 1)
    starts = range(0, max(lengths), block_tokens)
    blocks = [slice(start, min(start + block_tokens, max(lengths))) for start in starts]
    return Bundle(members, inputs.to(device), targets.to(device), lengths, blocks)


@dataclass
class KeptBranch:
    """A bundle as its scoring left it: the pages of all its blocks but the last, and the last one's graph."""

    chain: Chain
    graph: PieceGraph | None

    def hand_over(self) -> PieceGraph | None:
        """The graph, the first time: nothing but its one pullback may keep it alive."""
        graph, self.graph = self.graph, None
        return graph

    def release(self) -> None:
        self.graph = None
        self.chain.truncate(0)


Scored = tuple[torch.Tensor, torch.Tensor]


def score(host: ModelHost, state: ResidentState, bundle: Bundle, temperature: float, chunk: int) -> Scored:
    """Log-probabilities [B, T] of a bundle's targets and entropies [B, T], block by block, without a graph."""
    branch = state.chain.fork(len(bundle.members))
    try:
        parts = _score_all_but_last(host, branch, bundle, temperature, chunk)
        with torch.no_grad():
            last = bundle.blocks[-1]
            hidden_BTE = host.forward(bundle.inputs_BT[:, last], branch.stop, branch.enter(branch.num_pieces))
            parts.append(_score(host, hidden_BTE, bundle.targets_BT[:, last], temperature, chunk))
    finally:
        branch.truncate(0)
    return _joined(parts)


def score_and_keep(
    host: ModelHost, state: ResidentState, bundle: Bundle, temperature: float, chunk: int
) -> tuple[Scored, KeptBranch]:
    """As `score`, keeping what `replay` would else have to run again."""
    branch = state.chain.fork(len(bundle.members))
    try:
        parts = _score_all_but_last(host, branch, bundle, temperature, chunk)
        last = bundle.blocks[-1]
        graph = build(host, branch, branch.num_pieces, bundle.inputs_BT[:, last], output_read=True)
        parts.append(_score(host, graph.hidden_BTE, bundle.targets_BT[:, last], temperature, chunk))
    except BaseException:
        branch.truncate(0)
        raise
    return _joined(parts), KeptBranch(branch, graph)


def replay(
    host: ModelHost,
    state: ResidentState,
    bundle: Bundle,
    cotangents_BT: torch.Tensor,
    temperature: float,
    chunk: int,
    kept: KeptBranch | None = None,
) -> None:
    """Pulls a bundle's token cotangents back, last block first; what reaches the prompt's state is left there.

    Args:
        kept: the bundle as `score_and_keep` left it; used up, whatever happens.
    """
    branch = kept.chain if kept else state.chain.fork(len(bundle.members))
    try:
        if kept is None:
            with torch.no_grad():
                for index, block in enumerate(bundle.blocks[:-1]):
                    cache = branch.enter(index, output_read=False)
                    host.forward(bundle.inputs_BT[:, block], branch.starts[index], cache)
                    branch.commit(cache, block.stop - block.start)
        for index in reversed(range(len(bundle.blocks))):
            block = bundle.blocks[index]
            targets = Targets(bundle.targets_BT[:, block], cotangents_BT[:, block], temperature, chunk)
            graph = kept.hand_over() if kept else None
            pull_back(host, branch, index, bundle.inputs_BT[:, block], targets, graph)
            del graph
            branch.truncate(index)
    finally:
        branch.truncate(0)


@torch.no_grad()
def _score_all_but_last(host: ModelHost, branch: Chain, bundle: Bundle, temperature: float, chunk: int) -> list[Scored]:
    """Leaves their pages in the branch."""
    parts = []
    for index, block in enumerate(bundle.blocks[:-1]):
        cache = branch.enter(index)
        hidden_BTE = host.forward(bundle.inputs_BT[:, block], branch.starts[index], cache)
        parts.append(_score(host, hidden_BTE, bundle.targets_BT[:, block], temperature, chunk))
        branch.commit(cache, block.stop - block.start)
    return parts


def _joined(parts: list[Scored]) -> Scored:
    logps, entropies = zip(*parts)
    return torch.cat(logps, 1), torch.cat(entropies, 1)


@torch.no_grad()
def _score(
    host: ModelHost, hidden_BTE: torch.Tensor | None, targets_BT: torch.Tensor, temperature: float, chunk: int
) -> Scored:
    assert hidden_BTE is not None
    hidden_NE = hidden_BTE.detach().flatten(0, 1)
    logps_N, entropies_N = logprobs.score(host.head, hidden_NE, targets_BT.flatten(), temperature, chunk)
    return logps_N.view(targets_BT.shape), entropies_N.view(targets_BT.shape)
