"""Responses as branches of a captured prompt: scored forwards, block by block, and pulled back from last to first.

Shapes: B branches side by side, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from longstraw.engine import run
from longstraw.engine.host import ModelHost
from longstraw.engine.kept import Kept, KeptGraphs, saved_bytes
from longstraw.engine.piece import Bundle
from longstraw.engine.run import HeadOptions
from longstraw.state.resident import ResidentState

Scores = tuple[torch.Tensor, torch.Tensor]  # log-probabilities and entropies, [B, T] each


def score(
    host: ModelHost, state: ResidentState, bundles: Sequence[Bundle], options: HeadOptions, kept: KeptGraphs | None
) -> list[Scores]:
    """Log-probabilities of every bundle's targets and entropies, [B, T] each, without a graph.

    Args:
        kept: takes, under each bundle's place, what `replay` would else have to run again, as far as it fits.
    """
    context = state.store.context
    found: list[Scores] = []
    for place, bundle in enumerate(bundles):
        scores = None
        if kept is not None and context.agree(kept.left > 0, min):
            before = state.store.used()
            try:
                with saved_bytes(list(host.model.parameters())) as saved:
                    scores, branch = _score(host, state, bundle, options, graph=True)
            except MemoryError:  # the tiers' bounds have room for the pages of one bundle at a time
                kept.release()
                kept = None
            else:
                kept.keep(place, branch, saved.nbytes + state.store.used() - before)
        if scores is None:
            scores, branch = _score(host, state, bundle, options, graph=False)
            branch.release()
        found.append(scores)
    return found


def replay(
    host: ModelHost,
    state: ResidentState,
    bundle: Bundle,
    cotangents_BT: torch.Tensor,
    options: HeadOptions,
    kept: Kept | None = None,
) -> None:
    """Pulls a bundle's token cotangents back, last block first; what reaches the prompt's state is left there.

    Args:
        kept: the bundle as its scoring left it; used up, whatever happens.
    """
    branch = state.chain.fork(len(bundle.members)) if kept is None or kept.branch is None else kept.branch
    try:
        if kept is None:
            for block in bundle.blocks[:-1]:
                run.extend(host, branch, replace(block, targets=None))
        of_blocks = cotangents_BT.split([block.num_tokens for block in bundle.blocks], 1)
        for index in reversed(range(len(bundle.blocks))):
            graph = kept.hand_over() if kept else None
            run.backward(host, branch, index, bundle.blocks[index], options, of_blocks[index], graph)
            del graph
            branch.truncate(index)
    finally:
        branch.truncate(0)


def _score(
    host: ModelHost, state: ResidentState, bundle: Bundle, options: HeadOptions, graph: bool
) -> tuple[Scores, Kept]:
    """A bundle's scores, and what is kept of it: with `graph`, the last block has one."""
    branch = state.chain.fork(len(bundle.members))
    try:
        parts = [run.score(host, block, run.extend(host, branch, block), options) for block in bundle.blocks[:-1]]
        done = run.run(host, branch, branch.num_pieces, bundle.blocks[-1], graph=graph)
        parts.append(run.score(host, bundle.blocks[-1], done, options))
    except BaseException:
        branch.truncate(0)
        raise
    logps, entropies = zip(*parts)
    return (torch.cat(logps, 1), torch.cat(entropies, 1)), Kept(done if graph else None, branch)
