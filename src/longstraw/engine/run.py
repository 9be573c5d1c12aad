"""Where a piece runs: the only caller of the model's forward, for state, for scores, for a token, for a gradient.

Shapes: B rows, T tokens, E hidden size, N targets: B T, or as many as a piece reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

from longstraw.attention.deterministic import deterministic
from longstraw.engine.host import ModelHost
from longstraw.engine.piece import Piece
from longstraw.objective import logprobs
from longstraw.parallel.context import Context
from longstraw.precision import wide_dtype
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
        cache = chain.enter(index, context, graph=graph, output_read=piece.targets is not None)
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
    """Log-probabilities of a piece's targets and entropies, of their shape each, from its output."""
    assert done.hidden_BTE is not None and piece.targets is not None
    read = _Read(piece, done.context)
    hidden_NE, targets_N = read.hidden(done.hidden_BTE.detach()), read.own(piece.targets)
    logps_N, entropies_N = logprobs.score(host.head, hidden_NE, targets_N, options.temperature, options.chunk)
    return read.everyone(logps_N), read.everyone(entropies_N)


def backward(
    host: ModelHost,
    chain: Chain,
    index: int,
    piece: Piece,
    options: HeadOptions,
    cotangents: torch.Tensor | None = None,
    kept: Run | None = None,
) -> None:
    """The one pullback: adds a piece's parameter gradients to `.grad` and passes on what reached its starting state.

    Args:
        chain: holds the cotangents that later pieces left for piece `index`; they are consumed.
        cotangents: gradient of the loss with respect to the log-probability of each of the piece's targets, of their
            shape; zero where nothing is scored, None for a piece without targets.
        kept: the piece as it ran with a graph, if it was kept; otherwise it is run again.
    """
    done = kept or run(host, chain, index, piece, graph=True)
    pairs = chain.outputs(index, done.cache)
    if cotangents is not None:
        assert done.hidden_BTE is not None and piece.targets is not None
        read = _Read(piece, done.context)
        gradient_NE = logprobs.hidden_gradient(
            host.head,
            read.hidden(done.hidden_BTE),
            read.own(piece.targets),
            read.own(cotangents),
            options.temperature,
            options.chunk,
        )
        pairs.append((done.hidden_BTE, read.spread(gradient_NE, done.hidden_BTE)))
    pairs = [(tensor, cotangent) for tensor, cotangent in pairs if tensor.requires_grad]
    if pairs:
        tensors, cotangents = zip(*pairs)
        torch.autograd.backward(tensors, cotangents)
    chain.settle(index, done.cache)


class _Read:
    """What of a piece's output is read for its targets, on this rank."""

    def __init__(self, piece: Piece, context: Context) -> None:
        self._context = context
        self._shape = (-1, context.deal(piece.ids_BT).shape[1])
        self._places_N: torch.Tensor | None = None  # in the output of this rank's tokens
        self._mine_N: torch.Tensor | None = None  # which of the targets are read from them
        if piece.read_N is not None:
            row, token = piece.read_N // piece.num_tokens, piece.read_N % piece.num_tokens
            token = token - (context.own_start - context.start)
            self._mine_N = (token >= 0) & (token < self._shape[1])
            self._places_N = (row * self._shape[1] + token)[self._mine_N]

    def hidden(self, hidden_BTE: torch.Tensor) -> torch.Tensor:
        """[N, E], what each of this rank's targets is predicted from."""
        hidden_NE = hidden_BTE.flatten(0, 1)
        return hidden_NE if self._places_N is None else hidden_NE[self._places_N]

    def own(self, of_targets: torch.Tensor) -> torch.Tensor:
        """[N] of this rank's targets, from what all targets have."""
        return self._context.deal(of_targets).flatten() if self._mine_N is None else of_targets[self._mine_N]

    def everyone(self, own_N: torch.Tensor) -> torch.Tensor:
        """What all targets have, from what each rank's have."""
        if self._mine_N is None:
            return self._context.collect(own_N.view(self._shape))
        all_N = own_N.new_zeros(self._mine_N.shape)
        all_N[self._mine_N] = own_N
        return self._context.sum(all_N)

    def spread(self, gradient_NE: torch.Tensor, hidden_BTE: torch.Tensor) -> torch.Tensor:
        """The gradient [B, T, E] of the output from that of what was read; one that was read twice sums."""
        if self._places_N is None:
            return gradient_NE.view(hidden_BTE.shape)
        sums_NE = gradient_NE.new_zeros(hidden_BTE.shape, dtype=wide_dtype(gradient_NE.dtype)).flatten(0, 1)
        with deterministic():
            sums_NE.index_add_(0, self._places_N, gradient_NE.to(sums_NE.dtype))
        return sums_NE.to(gradient_NE.dtype).view(hidden_BTE.shape)
