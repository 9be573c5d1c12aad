"""The gradient of one optimizer step: every group's share, completed over ranks, clipped; and the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from longstraw.engine.engine import Engine
from longstraw.objective import Mean, Normalizer, PolicyLoss, merge_metrics
from longstraw.state.resident import ResidentState
from longstraw.training.config import TrainConfig
from longstraw.training.errors import StepRefused
from longstraw.training.groups import Batch, Group
from longstraw.training.optimizer import NamedOptimizer
from longstraw.training.phases import PhaseLedger
from longstraw.training.refresh import Staleness, StateKeeper


@dataclass
class Gradient:
    """What `accumulate` found; the gradient itself is in `.grad`.

    Attributes:
        loss: of the whole step.
        norm: of the gradient, before clipping.
        num_skipped: groups left out for want of any signal.
        metrics: by TRL's names; how far the sampler's log-probabilities are from the engine's; how stale states were.
    """

    loss: float
    norm: float
    num_skipped: int
    metrics: dict[str, float]


def accumulate(
    batch: Batch,
    config: TrainConfig,
    engine: Engine,
    states: StateKeeper,
    loss: PolicyLoss,
    optimizer: NamedOptimizer,
    phases: PhaseLedger,
    iteration: int,
) -> Gradient:
    """Take the gradient of the step's loss; clip it. `.grad` must be empty; after an exception it is again.

    A group in which no scored token has an advantage contributes nothing; without a KL term it is left out before any
    work. It still counts in the normaliser.

    Args:
        states: hands out the prompts' states.
        iteration: how often the batch was used before. With more to come, the first one's log-probabilities are kept
            as the old ones.
    Raises:
        StepRefused: loss or gradient is not finite.
    """
    normalizer = batch.normalizer
    total, parts, differences, staleness = 0.0, [], [], Staleness()
    num_skipped = 0
    try:
        for group in batch.groups:
            if not group.has_signal and config.beta == 0:
                num_skipped += 1
                continue
            state = states.take(group, iteration, staleness)
            try:
                share, metrics, logps = _group_gradient(group, state, normalizer, config, engine, loss, phases)
            except BaseException:
                state.release()
                raise
            states.put_back(group, state, iteration)
            total += share
            parts.append(metrics)
            if group.old_logps is None and group.sampled_logps is not None:
                differences += [
                    (ours.cpu() - sampled).abs() for ours, sampled in zip(logps, group.sampled_logps, strict=True)
                ]
            if group.old_logps is None and config.num_iterations > 1:
                group.old_logps = [logp.cpu() for logp in logps]
        engine.reduce_gradients()
        norm = optimizer.clip(config.max_grad_norm)
        if norm != norm or norm in (float("inf"), float("-inf")):
            raise StepRefused(f"the gradient's norm is {norm}. Lower learning_rate, or look at the last completions.")
    except BaseException:
        optimizer.zero_grad()
        raise
    averages = {name: float(mean) for name, mean in merge_metrics(parts).items()}
    if differences:
        gathered = torch.cat(differences)
        if gathered.numel():
            averages["sampling/sampling_logp_difference/mean"] = float(gathered.mean())
            averages["sampling/sampling_logp_difference/max"] = float(gathered.max())
    return Gradient(total, norm, num_skipped, averages | staleness.metrics())


def _group_gradient(
    group: Group,
    state: ResidentState,
    normalizer: Normalizer,
    config: TrainConfig,
    engine: Engine,
    loss: PolicyLoss,
    phases: PhaseLedger,
) -> tuple[float, dict[str, Mean], list[torch.Tensor]]:
    """The group's share of the loss, its metrics, and its log-probabilities."""
    measured: dict[str, Mean] = {}
    try:
        phases.take(engine.meter)
        outcome = engine.backward(
            state, group.responses, _objective(group, normalizer, loss, measured), temperature=config.temperature
        )
        phases.take(engine.meter)
    except FloatingPointError as error:
        raise StepRefused(f"{group.prompt.name}: {error}") from error
    if not _all_finite(engine.host.model):
        raise StepRefused(
            f"{group.prompt.name}: its gradient is not finite, although its loss is ({float(outcome.loss):g}). Set "
            "model.dtype to "
            "float32, or lower learning_rate."
        )
    return float(outcome.loss), measured, outcome.logps


def _objective(
    group: Group, normalizer: Normalizer, loss: PolicyLoss, measured: dict[str, Mean]
) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    def objective(logps: list[torch.Tensor]) -> torch.Tensor:
        masks = [mask.to(logp.device) for mask, logp in zip(group.masks, logps, strict=True)]
        value, metrics = loss(
            logps, group.advantages, normalizer, old_logps=group.old_logps, masks=masks, ref_logps=group.reference_logps
        )
        measured.update(metrics)
        return value

    return objective


def _all_finite(model: Any) -> bool:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return all(bool(torch.isfinite(norm)) for norm in torch._foreach_norm(gradients)) if gradients else True
