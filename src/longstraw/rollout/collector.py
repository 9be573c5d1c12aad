"""Rollouts: for each prompt of a step capture, sample, reward; then advantages over the whole step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from longstraw.config.train import TrainConfig
from longstraw.data.prompts import Prompt
from longstraw.data.stream import PromptStream, derive_seed
from longstraw.engine.engine import Engine
from longstraw.objective import group_advantages
from longstraw.parallel.processes import Processes, in_order
from longstraw.rollout.errors import StepRefused
from longstraw.rollout.judge import Judge
from longstraw.rollout.phases import PhaseLedger
from longstraw.rollout.records import Batch, Group, Rollout
from longstraw.rollout.samplers import Sampler, sampling_options
from longstraw.state.resident import ResidentState


@dataclass
class RolloutCollector:
    """Makes the batch of a step from the stream of prompts; of several processes each samples its share.

    Attributes:
        engine: captures the prompts.
        stop_ids: ids that end a response.
        score_reference: of prompt ids, responses and temperature, the log-probabilities [R_i] of each response under
            the reference policy, on the CPU; None without a KL term.
    """

    config: TrainConfig
    engine: Engine
    sampler: Sampler
    judge: Judge
    stream: PromptStream
    stop_ids: list[int]
    score_reference: Callable[..., list[torch.Tensor]] | None
    processes: Processes

    def collect(self, position: int, trainer_state: Any, phases: PhaseLedger) -> Batch:
        """Draw prompts from `position` on until the step has its groups. On an exception every state is released.

        Every process gets the whole batch; the states in it are those of its own groups.

        Raises:
            RewardError, RolloutError: a function of the user's failed.
            StepRefused: the model's output is not finite.
            ValueError: the engine refuses a prompt.
            ProcessError: something of this in another process.
        """
        config = self.config
        batch = Batch([], position, reward_names=[function.name for function in self.judge.functions])
        drawn: list[Group] = []
        try:
            for _ in range(config.max_resampling_rounds if config.dynamic_sampling else 1):
                wanted = config.prompts_per_update - len(batch.groups)
                positions = range(batch.next_position, batch.next_position + wanted)
                drawn.clear()
                shares = self.processes.together(partial(self._draw, positions, drawn, trainer_state, phases))
                batch.next_position += wanted
                self._keep(batch, in_order([groups for groups, _ in shares]), [metrics for _, metrics in shares])
                if len(batch.groups) == config.prompts_per_update:
                    break
            if batch.groups:
                rewards = [[rollout.reward for rollout in group.rollouts] for group in batch.groups]
                advantages = group_advantages(rewards, scale_rewards=config.scale_rewards)
                for rollout, advantage in zip(batch.rollouts, advantages.flatten().tolist(), strict=True):
                    rollout.advantage = advantage
            if self.score_reference is not None:
                with phases.timed("reference"):
                    scored = in_order(self.processes.together(lambda: self._score_reference(batch)))
                for group, logps in zip(batch.groups, scored, strict=True):
                    for rollout, logp in zip(group.rollouts, logps, strict=True):
                        rollout.reference_logps = logp
        except BaseException:
            for group in [*batch.groups, *drawn]:
                group.release()
            raise
        for group in batch.groups:
            if not group.needs_gradient(config) and config.top_entropy_quantile == 1:
                group.release()
        return batch

    def _draw(
        self, positions: range, drawn: list[Group], trainer_state: Any, phases: PhaseLedger
    ) -> tuple[dict[int, Group], dict[str, float]]:
        """This process's share of the prompts at `positions`: captured, sampled and judged.

        Args:
            drawn: receives every group as soon as there is one.
        Returns:
            Groups by position; means of what their reward functions gave to `log_metric`.
        """
        config = self.config
        for place, position in enumerate(positions):
            if not self.processes.owns(place):
                continue
            prompt = self.stream.at(position)
            state = self.engine.capture(prompt.ids)
            try:
                rollouts = self._sample(position, prompt, state, trainer_state.global_step)
            except BaseException:
                state.release()
                raise
            phases.take(self.engine.meter)
            group = Group(position, prompt, rollouts, owner=self.processes.rank)
            if config.gradient_accumulation_steps == 1:
                group.state = state
            else:
                state.release()
            drawn.append(group)
        with phases.timed("reward"):
            metrics = self.judge(drawn, trainer_state)
        return {group.position: group for group in drawn}, metrics

    def _sample(self, position: int, prompt: Prompt, state: ResidentState, version: int) -> list[Rollout]:
        seed = derive_seed(self.config.seed, "sample", position)
        sampling = sampling_options(self.config, self.stop_ids, seed)
        try:
            rollouts = self.sampler.sample(prompt, state, sampling, version)
        except FloatingPointError as error:
            raise StepRefused(f"{prompt.name}: {error}. Lower learning_rate, or widen model.dtype.") from error
        if self.config.mask_truncated_completions:
            for rollout in rollouts:
                rollout.mask &= rollout.finish_reason == "stop"
        return rollouts

    def _keep(self, batch: Batch, groups: Sequence[Group], logged: Sequence[dict[str, float]]) -> None:
        """Put groups into the batch, those without signal aside where they are to be replaced."""
        for name in dict.fromkeys(name for metrics in logged for name in metrics):
            values = [metrics[name] for metrics in logged if name in metrics]
            batch.reward_metrics[name] = sum(values) / len(values)
        for group in groups:
            group.prompt = self.stream.at(group.position)
            if self.config.dynamic_sampling and not group.rewards_differ:
                group.release()
                batch.num_replaced += 1
            else:
                batch.groups.append(group)

    def _score_reference(self, batch: Batch) -> dict[int, list[torch.Tensor]]:
        assert self.score_reference is not None
        return {
            place: self.score_reference(group.prompt_ids, group.responses, self.config.temperature)
            for place, group in enumerate(batch.groups)
            if self.processes.owns(group.owner)
        }
