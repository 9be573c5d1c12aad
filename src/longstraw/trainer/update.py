"""The gradient of one optimizer step: every group's share, completed over processes, clipped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from longstraw.config.train import TrainConfig
from longstraw.engine.engine import Engine
from longstraw.objective import Mean, Normalizer, high_entropy_masks, merge_metrics
from longstraw.parallel.processes import Processes, in_order
from longstraw.rollout.errors import StepRefused
from longstraw.rollout.phases import PhaseLedger
from longstraw.rollout.records import Batch, Group
from longstraw.state.resident import ResidentState
from longstraw.trainer.gradient_parts import GradientParts
from longstraw.trainer.optimizer import NamedOptimizer
from longstraw.trainer.receipt import StepReceipt
from longstraw.trainer.refresh import Staleness, StateKeeper


@dataclass
class _GroupResult:
    """What a group's backward pass found.

    Attributes:
        loss: the group's share of the step's.
        metrics: of the loss.
        logps: under the present policy, on the CPU; none where no further iteration needs them.
        differences: of the sampler's log-probabilities from them, [num_tokens]; empty where none are compared.
        boundary_stride: see `ResidentState`.
    """

    loss: float
    metrics: dict[str, Mean]
    logps: list[torch.Tensor]
    differences: torch.Tensor
    boundary_stride: int | None


@dataclass
class _Share:
    """What one process did in a step.

    Attributes:
        results: by place in the batch.
        staleness: of the states that were used.
        reached: indices of the parameters that got a gradient.
        held: states in hand, by place; gone by the time that others hear of the share.
    """

    results: dict[int, _GroupResult] = field(default_factory=dict)
    staleness: Staleness = field(default_factory=Staleness)
    reached: set[int] = field(default_factory=set)
    held: dict[int, ResidentState] = field(default_factory=dict)

    def release(self) -> None:
        while self.held:
            self.held.popitem()[1].release()


@dataclass
class StepGradient:
    """Takes gradients of batches; of several processes each takes those of its own groups.

    Attributes:
        config: loss, clipping, iterations, temperature.
        engine: over the trained model, with the processes' mesh.
        optimizer: over its parameters.
    """

    config: TrainConfig
    engine: Engine
    optimizer: NamedOptimizer
    processes: Processes

    def __post_init__(self) -> None:
        self._loss = self.config.policy_loss()
        self._states = StateKeeper(self.config, self.engine)

    def take(self, batch: Batch, iteration: int, receipt: StepReceipt) -> None:
        """Take the gradient of the step's loss; clip it. `.grad` must be empty; after an exception it is again.

        A group in which no scored token has an advantage contributes nothing; without a KL term it is left out before
        any work. It still counts in the normaliser.

        Args:
            iteration: how often the batch was used before. With more to come, the first one's log-probabilities are
                kept as the old ones.
            receipt: is told what was found.
        Raises:
            StepRefused: loss or gradient is not finite.
            ProcessError: something failed in another process.
        """
        own, phases = _Share(), receipt.phases
        parts = GradientParts(self.engine) if self.config.log_gradient_parts else None
        try:
            if self.config.top_entropy_quantile < 1:
                self._choose_tokens(batch, iteration, phases, own)
            shares = self.processes.together(lambda: self._own_share(batch, iteration, phases, own, parts))
            self.engine.reduce_gradients()
            reached = set().union(*(share.reached for share in shares))
            for index, parameter in enumerate(self.optimizer.parameters.values()):
                if index not in reached:
                    parameter.grad = None  # a sum over processes that have none is no gradient
            receipt.sides = parts.metrics() if parts is not None else {}
            receipt.grad_norm = norm = self.optimizer.clip(self.config.max_grad_norm)
            if norm != norm or norm in (float("inf"), float("-inf")):
                raise StepRefused(
                    f"the gradient's norm is {norm}. Lower learning_rate, or look at the last completions."
                )
        except BaseException:
            own.release()
            self.optimizer.zero_grad()
            raise
        for place, result in (item for share in shares for item in share.results.items()):
            for rollout, logp in zip(batch.groups[place].rollouts, result.logps):
                rollout.old_logps = logp if rollout.old_logps is None else rollout.old_logps
        results = in_order([share.results for share in shares])
        receipt.loss = sum(result.loss for result in results)
        receipt.num_skipped = len(batch.groups) - len(results)
        receipt.means = merge_metrics(result.metrics for result in results)
        receipt.logp_differences = torch.cat([torch.empty(0), *(result.differences for result in results)])
        if self.config.boundary_bytes is not None:
            strides = [result.boundary_stride for result in results if result.boundary_stride is not None]
            receipt.boundary_stride = max(strides, default=None)
        receipt.staleness = sum((share.staleness for share in shares), start=Staleness())

    def _choose_tokens(self, batch: Batch, iteration: int, phases: PhaseLedger, own: _Share) -> None:
        """Score every response, and have each group know which of its tokens are the step's highest in entropy."""

        def entropies() -> dict[int, list[torch.Tensor]]:
            found = {}
            for place, group in enumerate(batch.groups):
                if not self.processes.owns(group.owner):
                    continue
                own.held[place] = state = self._states.take(group, iteration, own.staleness)
                _, scored = self.engine.score_with_entropies(state, group.responses, self.config.temperature)
                phases.take(self.engine.meter)
                found[place] = [entropy.cpu() for entropy in scored]
                if self.config.gradient_accumulation_steps > 1:
                    own.held.pop(place).release()
                elif not group.needs_gradient(self.config):
                    self._states.put_back(group, own.held.pop(place), iteration)
            return found

        spread = [entropy for group in in_order(self.processes.together(entropies)) for entropy in group]
        masks = [rollout.mask for rollout in batch.rollouts]
        chosen = high_entropy_masks(spread, masks, self.config.top_entropy_quantile)
        for rollout, mask in zip(batch.rollouts, chosen, strict=True):
            rollout.policy_mask = mask

    def _own_share(
        self, batch: Batch, iteration: int, phases: PhaseLedger, share: _Share, parts: GradientParts | None
    ) -> _Share:
        normalizer = batch.normalizer
        for place, group in enumerate(batch.groups):
            if self.processes.owns(group.owner) and group.needs_gradient(self.config):
                if place in share.held:
                    state = share.held.pop(place)
                else:
                    counted = self.config.top_entropy_quantile < 1  # when its tokens were chosen
                    state = self._states.take(group, iteration, Staleness() if counted else share.staleness)
                try:
                    share.results[place] = self._group_gradient(group, state, normalizer, phases, parts)
                except BaseException:
                    state.release()
                    raise
                self._states.put_back(group, state, iteration)
        parameters = enumerate(self.optimizer.parameters.values())
        share.reached = {index for index, parameter in parameters if parameter.grad is not None}
        return share

    def _group_gradient(
        self,
        group: Group,
        state: ResidentState,
        normalizer: Normalizer,
        phases: PhaseLedger,
        parts: GradientParts | None,
    ) -> _GroupResult:
        measured: dict[str, Mean] = {}

        def objective(logps: list[torch.Tensor]) -> torch.Tensor:
            value, metrics = group.loss(self._loss, logps, normalizer)
            measured.update(metrics)
            return value

        try:
            phases.take(self.engine.meter)
            outcome = self.engine.backward(
                state,
                group.responses,
                objective,
                temperature=self.config.temperature,
                keep_response_side=parts is not None,
            )
            phases.take(self.engine.meter)
        except FloatingPointError as error:
            raise StepRefused(f"{group.prompt.name}: {error}") from error
        if not _all_finite(self.engine.host.model):
            raise StepRefused(
                f"{group.prompt.name}: its gradient is not finite, although its loss is ({float(outcome.loss):g}). Set "
                "model.dtype to float32, or lower learning_rate."
            )
        if parts is not None:
            assert outcome.response_side is not None
            parts.add(outcome.response_side)
        pairs = zip(outcome.entropies, group.rollouts, strict=True)
        scored = [entropy.cpu()[rollout.mask] for entropy, rollout in pairs]
        measured["entropy"] = Mean(sum(float(entropy.sum()) for entropy in scored), sum(map(len, scored)))
        logps = [logp.cpu() for logp in outcome.logps]
        differences = [
            (logp - rollout.sampled_logps).abs()
            for logp, rollout in zip(logps, group.rollouts, strict=True)
            if rollout.old_logps is None and rollout.sampled_logps is not None
        ]
        return _GroupResult(
            float(outcome.loss),
            {name: Mean(float(mean.total), mean.count) for name, mean in measured.items()},
            logps if self.config.num_iterations > 1 else [],
            torch.cat(differences) if differences else torch.empty(0),
            state.boundary_stride,
        )


def _all_finite(model: Any) -> bool:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return all(bool(torch.isfinite(norm)) for norm in torch._foreach_norm(gradients)) if gradients else True
