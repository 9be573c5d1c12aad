"""How far a resident state is from what the present parameters would leave: a cheap probe, without a fresh capture."""

from __future__ import annotations

import torch

from longstraw.engine import run
from longstraw.engine.capture import segment
from longstraw.engine.host import ModelHost
from longstraw.state.resident import ResidentState


@torch.no_grad()
def probe(host: ModelHost, state: ResidentState, num_segments: int, seed: int) -> float:
    """Relative L2 distance of recomputed segments from the stored ones, averaged over layers and segments.

    Each segment is run once from the stored state at its start, so the figure is how much one segment's state moves
    where what precedes it does not: 0 right after capture (to rounding), and growing with every update. It costs
    `num_segments` of the capture's segments.

    Args:
        num_segments: drawn at random among those of which both ends were kept; at most all.
        seed: of the draw.
    """
    chain = state.chain
    if not chain.num_pieces:
        return 0.0
    at_hand = [
        index
        for index in range(chain.num_pieces)
        if all(layer.has_start(index) and layer.has_end(index) for layer in chain.carried)
    ]
    order = torch.randperm(len(at_hand), generator=torch.Generator().manual_seed(seed))
    distances = []
    for index in sorted(at_hand[i] for i in order[:num_segments].tolist()):
        done = run.run(host, chain, index, segment(host, state, index))
        for layer, piece in zip(chain.layers, done.cache.layers):
            distances.append(_relative(piece.written(), layer.stored(index)))
    return float(torch.stack(distances).mean())


def _relative(found: tuple[torch.Tensor, ...], stored: tuple[torch.Tensor, ...]) -> torch.Tensor:
    difference = sum((f.double() - s.double()).square().sum() for f, s in zip(found, stored))
    norm = sum(s.double().square().sum() for s in stored)
    return torch.as_tensor(difference / norm).nan_to_num(0.0).sqrt().cpu()  # 0 / 0: a window of one token is empty
