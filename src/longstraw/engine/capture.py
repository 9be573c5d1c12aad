"""Capture: the prompt runs once, segment by segment, and what its responses need is kept."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from longstraw.engine import run
from longstraw.engine.host import ModelHost
from longstraw.engine.kept import LastSegments, saved_bytes
from longstraw.engine.piece import Piece
from longstraw.state.chain import Chain
from longstraw.state.resident import ResidentState


@torch.no_grad()
def capture(
    host: ModelHost,
    state: ResidentState,
    segments: list[slice],
    boundary_bytes: int | None,
    on_tokens: Callable[[int], None],
) -> None:
    """Fills a state that has no token yet.

    Args:
        segments: of the prompt but for its last token.
        boundary_bytes: bound on carried states at segment boundaries; None is no bound.
        on_tokens: called after every segment with the tokens that ran so far.
    """
    chain = state.chain
    with_graph = LastSegments(state.kept, state.grad_from, len(segments))
    for index, tokens in enumerate(segments):
        piece = Piece(state.prompt_ids[None, tokens].to(host.device), tokens.start)
        if with_graph.wants(index):
            with saved_bytes(list(host.model.parameters())) as saved:
                done = run.run(host, chain, index, piece, graph=True)
            with_graph.built(index, done, saved.nbytes)
            chain.commit(done.cache, piece.num_tokens)
            del done  # a graph that is not kept is gone before the next one is built
        else:
            run.extend(host, chain, piece)
        if index == 0 and chain.carried and state.grad_from < len(segments):
            state.boundary_stride = thin_out(chain, len(segments) - state.grad_from, boundary_bytes)
        on_tokens(tokens.stop)


def extend(
    host: ModelHost, state: ResidentState, ids: torch.Tensor, segment_tokens: int, on_tokens: Callable[[int], None]
) -> None:
    """Grows a fork by token ids; again the last token is left to the branches.

    Args:
        on_tokens: called after every piece with the tokens that ran so far.
    """
    first, grown = state.chain.stop, torch.cat([state.prompt_ids, ids])
    for start in range(first, len(grown) - 1, segment_tokens):
        stop = min(start + segment_tokens, len(grown) - 1)
        run.extend(host, state.chain, Piece(grown[None, start:stop].to(host.device), start))
        on_tokens(stop - first)
    state.prompt_ids = grown


def segment(host: ModelHost, state: ResidentState, index: int) -> Piece:
    """A segment of a captured prompt, to be run again."""
    start, stop = state.chain.starts[index : index + 2]
    return Piece(state.prompt_ids[None, start:stop].to(host.device), start)


def restore_start(host: ModelHost, chain: Chain, index: int, piece_of: Callable[[int], Piece]) -> None:
    """Has the state before piece `index` at hand, recomputed from the nearest that was kept.

    Args:
        piece_of: the chain's pieces, without targets, to be run again.
    """
    for before in range(chain.nearest_start(index), index):
        chain.restore(before, run.run(host, chain, before, piece_of(before)).cache)


def thin_out(chain: Chain, num_pieces: int, boundary_bytes: int | None) -> int:
    """`Chain.thin_out`, with a warning where the bound is too small. Returns the stride; 1 without a bound."""
    if boundary_bytes is None:
        return 1
    stride, needed = chain.thin_out(boundary_bytes, num_pieces)
    if needed > boundary_bytes:
        warnings.warn(
            f"boundary_bytes={boundary_bytes:,} holds too few states at segment boundaries for a prompt of "
            f"{num_pieces} segments: the sweep needs {needed:,} bytes at the least and takes them. Raise "
            "boundary_bytes, or segment_tokens, so that there are fewer boundaries",
            stacklevel=8,
        )
    return stride
