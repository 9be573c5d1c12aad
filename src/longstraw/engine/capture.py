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
            state.boundary_stride = _thin_out(chain, len(segments) - state.grad_from, boundary_bytes)
        on_tokens(tokens.stop)


def segment(host: ModelHost, state: ResidentState, index: int) -> Piece:
    """A segment of a captured prompt, to be run again."""
    start, stop = state.chain.starts[index : index + 2]
    return Piece(state.prompt_ids[None, start:stop].to(host.device), start)


def restore_start(host: ModelHost, state: ResidentState, index: int) -> None:
    """Has the state before segment `index` at hand, recomputed from the nearest that was kept."""
    for before in range(state.chain.nearest_start(index), index):
        state.chain.restore(before, run.run(host, state.chain, before, segment(host, state, before)).cache)


def _thin_out(chain: Chain, num_pieces: int, boundary_bytes: int | None) -> int:
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
