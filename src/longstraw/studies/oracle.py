"""The oracle of staleness: the same responses on a kept state and on a freshly captured one, under the same parameters.

Its two measures are those of the LongStraw paper (arXiv:2607.14952): the loss, and the mean absolute difference of
log-probabilities. It costs a capture; `Engine.drift` is the cheap probe.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longstraw.engine.engine import Engine
from longstraw.objective import Normalizer, PolicyLoss
from longstraw.rollout.records import Group
from longstraw.state.resident import ResidentState


@dataclass(frozen=True)
class Comparison:
    """What a group's responses look like from two states of its prompt.

    Attributes:
        loss_kept: the group's share of the step's loss on the kept state.
        loss_fresh: the same on the fresh one.
        logp_difference: mean absolute difference of the log-probabilities, over scored tokens; 0 where there are none.
    """

    loss_kept: float
    loss_fresh: float
    logp_difference: float


@torch.no_grad()
def compare(
    engine: Engine,
    group: Group,
    kept: ResidentState,
    fresh: ResidentState,
    normalizer: Normalizer,
    loss: PolicyLoss,
    temperature: float,
) -> Comparison:
    """Score the group's responses on both states. Changes neither.

    Args:
        group: with advantages, and with old log-probabilities unless its responses are on policy.
        normalizer: of the optimizer step that the group belongs to.
    """
    losses, scored = [], []
    for state in (kept, fresh):
        logps = [logp.cpu() for logp in engine.score(state, group.responses, temperature)]
        losses.append(float(group.loss(loss, logps, normalizer)[0]))
        scored.append(torch.cat([logp[rollout.mask] for logp, rollout in zip(logps, group.rollouts, strict=True)]))
    difference = (scored[0] - scored[1]).abs()
    return Comparison(losses[0], losses[1], float(difference.mean()) if difference.numel() else 0.0)
