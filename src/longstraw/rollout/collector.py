"""Rollouts: for each prompt of a step capture, sample, reward; then advantages over the whole step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from longstraw.config.train import TrainConfig
from longstraw.data.prompts import Prompt
from longstraw.data.stream import PromptStream, derive_seed
from longstraw.data.text import TextCodec
from longstraw.engine.engine import Engine
from longstraw.objective import group_advantages
from longstraw.parallel.processes import Processes, in_order
from longstraw.rollout.errors import StepRefused
from longstraw.rollout.groups import Batch, Group
from longstraw.rollout.handed import own_copy
from longstraw.rollout.judge import Judged, judge
from longstraw.rollout.phases import PhaseLedger
from longstraw.rollout.rewards import RewardFunction
from longstraw.rollout.rollout_func import call_rollout
from longstraw.state.resident import ResidentState


class Reference(Protocol):
    """The reference policy of a KL term."""

    def score(
        self, prompt_ids: torch.Tensor, responses: Sequence[torch.Tensor], temperature: float
    ) -> list[torch.Tensor]:
        """Log-probabilities [R_i] of each response, on the CPU."""
        ...


class RolloutCollector:
    """Makes the batch of a step from the stream of prompts; of several processes each samples its share."""

    def __init__(
        self,
        config: TrainConfig,
        engine: Engine,
        codec: TextCodec,
        stream: PromptStream,
        rewards: Sequence[RewardFunction],
        reference: Reference | None,
        stop_ids: list[int],
        rollout_func: Callable[..., Any] | None = None,
        processes: Processes | None = None,
    ) -> None:
        self._config = config
        self._engine = engine
        self._codec = codec
        self._stream = stream
        self._rewards = rewards
        self._reference = reference
        self._stop_ids = stop_ids
        self._rollout_func = rollout_func
        self._processes = processes or Processes()

    def collect(self, position: int, trainer_state: Any, phases: PhaseLedger) -> Batch:
        """Draw prompts from `position` on until the step has its groups. On an exception every state is released.

        Every process gets the whole batch; the states in it are those of its own groups.

        Raises:
            RewardError, RolloutError: a function of the user's failed.
            StepRefused: the model's output is not finite.
            ValueError: the engine refuses a prompt.
            ProcessError: something of this in another process.
        """
        config = self._config
        batch = Batch([], position)
        drawn: list[Group] = []
        try:
            for _ in range(config.max_resampling_rounds if config.dynamic_sampling else 1):
                wanted = config.prompts_per_update - len(batch.groups)
                positions = range(batch.next_position, batch.next_position + wanted)
                drawn.clear()
                shares = self._processes.together(partial(self._draw, positions, drawn, trainer_state, phases))
                batch.next_position += wanted
                self._keep(batch, in_order(shares))
                if len(batch.groups) == config.prompts_per_update:
                    break
            self._set_advantages(batch)
            if self._reference is not None:
                with phases.timed("reference"):
                    scored = in_order(self._processes.together(lambda: self._score_reference(batch)))
                for group, logps in zip(batch.groups, scored, strict=True):
                    group.reference_logps = logps
        except BaseException:
            for group in [*batch.groups, *drawn]:
                group.release()
            raise
        for group in batch.groups:
            if not group.needs_gradient(config) and config.top_entropy_quantile == 1:
                group.release()
        return batch

    def _draw(self, positions: range, drawn: list[Group], trainer_state: Any, phases: PhaseLedger) -> dict[int, Judged]:
        """This process's share of the prompts at `positions`: captured, sampled and judged, by position.

        Args:
            drawn: receives every group as soon as there is one.
        """
        for place, position in enumerate(positions):
            if not self._processes.owns(place):
                continue
            prompt = self._stream.at(position)
            state = self._engine.capture(prompt.ids)
            try:
                group = self._sample(position, prompt, state)
            except BaseException:
                state.release()
                raise
            phases.take(self._engine.meter)
            if self._config.gradient_accumulation_steps == 1:
                group.state = state
            else:
                state.release()
            drawn.append(group)
        with phases.timed("reward"):
            return judge(self._rewards, self._config.reward_weights, drawn, self._codec, trainer_state)

    def _sample(self, place: int, prompt: Prompt, state: ResidentState) -> Group:
        config = self._config
        sampling: dict[str, Any] = {
            "num": config.num_generations,
            "max_new_tokens": config.max_completion_length,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "min_p": config.min_p or 0.0,
            "repetition_penalty": config.repetition_penalty,
            "stop_ids": self._stop_ids,
            "seed": derive_seed(config.seed, "sample", place),
        }
        columns: dict[str, list[Any]] = {}
        if self._rollout_func is None:
            try:
                drafts = self._engine.sample(state, **sampling)
            except FloatingPointError as error:
                raise StepRefused(f"{prompt.name}: {error}. Lower learning_rate, or widen model.dtype.") from error
            chosen = [torch.ones(draft.ids.shape, dtype=torch.bool) for draft in drafts]
        else:
            drafts, chosen, columns = call_rollout(
                self._rollout_func,
                prompt.name,
                self._stop_ids,
                config.num_generations,
                prompt=own_copy(prompt.prompt),
                prompt_ids=prompt.ids.tolist(),
                row=own_copy(prompt.columns),
                engine=self._engine,
                state=state,
                sampling=own_copy(sampling),
                tokenizer=self._codec.tokenizer,
            )
        return Group(
            place,
            prompt,
            [draft.ids for draft in drafts],
            [draft.finish_reason for draft in drafts],
            [draft.logps for draft in drafts] if self._rollout_func is None else None,
            [
                mask & (not config.mask_truncated_completions or draft.finish_reason == "stop")
                for draft, mask in zip(drafts, chosen, strict=True)
            ],
            num_chosen=[int(mask.sum()) for mask in chosen],
            columns=columns,
            owner=self._processes.rank,
        )

    def _keep(self, batch: Batch, judged: Sequence[Judged]) -> None:
        """Put groups into the batch, those without signal aside where they are to be replaced."""
        logged = list({entry.group.owner: entry.scores.metrics for entry in judged}.values())
        for name in dict.fromkeys(name for metrics in logged for name in metrics):
            values = [metrics[name] for metrics in logged if name in metrics]
            batch.scores.metrics[name] = sum(values) / len(values)
        for entry in judged:
            group = entry.group
            group.prompt = self._stream.at(group.position)
            batch.scores.names = entry.scores.names
            if self._config.dynamic_sampling and not group.rewards_differ:
                group.release()
                batch.num_replaced += 1
                continue
            batch.groups.append(group)
            batch.completions += entry.completions
            batch.scores.per_function += entry.scores.per_function
            for column, values in entry.scores.extra.items():
                batch.scores.extra.setdefault(column, []).extend(values)

    def _score_reference(self, batch: Batch) -> dict[int, list[torch.Tensor]]:
        assert self._reference is not None
        return {
            place: self._reference.score(group.prompt_ids, group.responses, self._config.temperature)
            for place, group in enumerate(batch.groups)
            if self._processes.owns(group.owner)
        }

    def _set_advantages(self, batch: Batch) -> None:
        if not batch.groups:
            return
        advantages = group_advantages(
            [group.rewards for group in batch.groups], scale_rewards=self._config.scale_rewards
        )
        for group, row in zip(batch.groups, advantages.tolist(), strict=True):
            group.advantages = row
