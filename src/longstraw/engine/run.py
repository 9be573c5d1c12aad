"""Where a piece runs: the only caller of the model's forward, for state, for scores, for a token, for a gradient.

Shapes: B rows, T tokens, E hidden size, N = B T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

from longstraw.engine.host import ModelHost
from longstraw.engine.piece import Piece
from longstraw.objective import logprobs
from longstraw.parallel.context import Context
from longstraw.state.chain import Chain


@dataclass
class Run:
    """A piece that ran, with or without a graph.

    Attributes:
        cache: the layers that it ran on, which hold what its tokens leave behind.
        context: whose its tokens are.
        hidden_BTE: the output of this rank's tokens; None where nothing reads it.
    """

    cache: Cache
    context: Context
    hidden_BTE: torch.Tensor | None


@dataclass(frozen=True)
class HeadOptions:
    """How hidden states become log-probabilities.

    Attributes:
        temperature: divides the logits.
        chunk: tokens whose logits exist at a time.
    """

    temperature: float
    chunk: int


def run(host: ModelHost, chain: Chain, index: int, piece: Piece, *, graph: bool = False) -> Run:
    """Runs piece `index` of a chain from the state at its start; the chain stays as it is.

    Args:
        graph: with autograd, so that `backward` can pull it back.
    """
    context = chain.context.of(piece.start, piece.num_tokens)
    with torch.set_grad_enabled(graph):
        cache = chain.enter(index, context, graph=graph, output_read=piece.targets_BT is not None)
        return Run(cache, context, host.forward(context.deal(piece.ids_BT), context.own_start, cache))


def extend(host: ModelHost, chain: Chain, piece: Piece) -> Run:
    """Runs a piece at a chain's end, without a graph, and appends what it leaves behind."""
    done = run(host, chain, chain.num_pieces, piece)
    chain.commit(done.cache, piece.num_tokens)
    return done


@torch.no_grad()
def decode(host: ModelHost, cache: Cache, piece: Piece) -> torch.Tensor:
    """Logits [B, V] after one more token a row, which the decoding cache takes in."""
    hidden_B1E = host.forward(piece.ids_BT, piece.start, cache)
    assert hidden_B1E is not None
    return host.head(hidden_B1E[:, 0])


@torch.no_grad()
def score(host: ModelHost, piece: Piece, done: Run, options: HeadOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a piece's targets and entropies, [B, T] each, from its output."""
    assert done.hidden_BTE is not None and piece.targets_BT is not None
    targets_BT = done.context.deal(piece.targets_BT)
    hidden_NE, targets_N = done.hidden_BTE.detach().flatten(0, 1), targets_BT.flatten()
    logps_N, entropies_N = logprobs.score(host.head, hidden_NE, targets_N, options.temperature, options.chunk)
    logps_BT, entropies_BT = (done.context.collect(found.view(targets_BT.shape)) for found in (logps_N, entropies_N))
    return logps_BT, entropies_BT


def backward(
    host: ModelHost,
    chain: Chain,
    index: int,
    piece: Piece,
    options: HeadOptions,
    cotangents_BT: torch.Tensor | None = None,
    kept: Run | None = None,
) -> None:
    """The one pullback: adds a piece's parameter gradients to `.grad` and passes on what reached its starting state.

    Args:
        chain: holds the cotangents that later pieces left for piece `index`; they are consumed.
        cotangents_BT: gradient of the loss with respect to the log-probability of each of the piece's targets; zero
            where nothing is scored, None for a piece without targets.
        kept: the piece as it ran with a graph, if it was kept; otherwise it is run again.
    """
    done = kept or run(host, chain, index, piece, graph=True)
    pairs = chain.outputs(index, done.cache)
    if cotangents_BT is not None:
        assert done.hidden_BTE is not None and piece.targets_BT is not None
        gradient_NE = logprobs.hidden_gradient(
            host.head,
            done.hidden_BTE.flatten(0, 1),
            done.context.deal(piece.targets_BT).flatten(),
            done.context.deal(cotangents_BT).flatten(),
            options.temperature,
            options.chunk,
        )
        pairs.append((done.hidden_BTE, gradient_NE.view(done.hidden_BTE.shape)))
    pairs = [(tensor, cotangent) for tensor, cotangent in pairs if tensor.requires_grad]
    if pairs:
        tensors, cotangents = zip(*pairs)
        torch.autograd.backward(tensors, cotangents)
    chain.settle(index, done.cache)
