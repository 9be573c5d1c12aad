"""The one pullback: rebuild a piece's graph from the state at its start, pull its cotangents back, release it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longstraw.engine.graphs import PieceGraph
from longstraw.engine.host import ModelHost
from longstraw.objective import logprobs
from longstraw.state.chain import Chain


@dataclass
class Targets:
    """What a piece's tokens are scored on.

    Attributes:
        ids_BT: the token that each position predicts.
        cotangents_BT: gradient of the loss with respect to its log-probability; zero where nothing is scored.
        temperature: divides the logits.
        chunk: tokens whose logits exist at a time.
    """

    ids_BT: torch.Tensor
    cotangents_BT: torch.Tensor
    temperature: float
    chunk: int


def build(host: ModelHost, chain: Chain, index: int, ids_BT: torch.Tensor, output_read: bool) -> PieceGraph:
    """Runs a piece with autograd from the state at its start."""
    with torch.enable_grad():
        cache = chain.enter(index, graph=True, output_read=output_read)
        return PieceGraph(cache, host.forward(ids_BT, chain.starts[index], cache))


def pull_back(
    host: ModelHost,
    chain: Chain,
    index: int,
    ids_BT: torch.Tensor,
    targets: Targets | None = None,
    kept: PieceGraph | None = None,
) -> None:
    """Adds the piece's parameter gradients to `.grad` and passes on the cotangents of the state it started from.

    Args:
        chain: holds the cotangents that later pieces left for piece `index`; they are consumed.
        ids_BT: the piece's tokens.
        targets: its scored tokens; None when nothing reads the piece's output, as in a prompt.
        kept: the piece's graph, if it was kept; otherwise it is rebuilt.
    """
    graph = kept or build(host, chain, index, ids_BT, output_read=targets is not None)
    pairs = chain.outputs(index, graph.cache)
    if targets is not None:
        assert graph.hidden_BTE is not None
        gradient = logprobs.pull_back(
            host.head,
            graph.hidden_BTE.flatten(0, 1),
            targets.ids_BT.flatten(),
            targets.cotangents_BT.flatten(),
            targets.temperature,
            targets.chunk,
        )
        pairs.append((graph.hidden_BTE, gradient.view(graph.hidden_BTE.shape)))
    pairs = [(tensor, cotangent) for tensor, cotangent in pairs if tensor.requires_grad]
    if pairs:
        tensors, cotangents = zip(*pairs)
        torch.autograd.backward(tensors, cotangents)
    chain.settle(index, graph.cache)
