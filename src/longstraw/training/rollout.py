"""Rollouts: for each prompt of a step capture, sample, reward; then advantages over the whole step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from longstraw.engine.engine import Engine
from longstraw.objective import combine_rewards, group_advantages
from longstraw.state.resident import ResidentState
from longstraw.training.config import TrainConfig
from longstraw.training.data import Prompt, PromptStream, derive_seed
from longstraw.training.errors import StepRefused
from longstraw.training.groups import Batch, Group
from longstraw.training.phases import PhaseLedger
from longstraw.training.reference import ReferencePolicy
from longstraw.training.rewards import RewardFunction, RewardScores, score
from longstraw.training.rollout_func import call_rollout
from longstraw.training.text import TextCodec


class RolloutCollector:
    """Makes the batch of a step from the stream of prompts."""

    def __init__(
        self,
        config: TrainConfig,
        engine: Engine,
        codec: TextCodec,
        stream: PromptStream,
        rewards: Sequence[RewardFunction],
        reference: ReferencePolicy | None,
        stop_ids: list[int],
        rollout_func: Callable[..., Any] | None = None,
    ) -> None:
        self._config = config
        self._engine = engine
        self._codec = codec
        self._stream = stream
        self._rewards = rewards
        self._reference = reference
        self._stop_ids = stop_ids
        self._rollout_func = rollout_func

    def collect(self, position: int, trainer_state: Any, phases: PhaseLedger) -> Batch:
        """Draw prompts from `position` on until the step has its groups. On an exception every state is released.

        Raises:
            RewardError, RolloutError: a function of the user's failed.
            StepRefused: the model's output is not finite.
            ValueError: the engine refuses a prompt.
        """
        config = self._config
        batch = Batch([], position)
        drawn: list[Group] = []
        try:
            for _ in range(config.max_resampling_rounds if config.dynamic_sampling else 1):
                wanted = config.prompts_per_update - len(batch.groups)
                drawn = []
                for group in self._draw(batch.next_position, wanted, phases):
                    drawn.append(group)
                batch.next_position += wanted
                self._reward_and_keep(batch, drawn, trainer_state, phases)
                if len(batch.groups) == config.prompts_per_update:
                    break
            self._set_advantages(batch)
            if self._reference is not None:
                with phases.timed("reference"):
                    for group in batch.groups:
                        group.reference_logps = self._reference.score(
                            group.prompt_ids, group.responses, config.temperature
                        )
        except BaseException:
            for group in [*batch.groups, *drawn]:
                group.release()
            raise
        for group in batch.groups:
            if not group.has_signal and self._reference is None:
                group.release()
        return batch

    def _draw(self, position: int, num_prompts: int, phases: PhaseLedger) -> Iterator[Group]:
        for place in range(position, position + num_prompts):
            prompt = self._stream.at(place)
            state = self._engine.capture(prompt.ids)
            try:
                group = self._sample(place, prompt, state)
            except BaseException:
                state.release()
                raise
            phases.take(self._engine.meter)
            if self._config.gradient_accumulation_steps == 1:
                group.state = state
            else:
                state.release()
            yield group

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
                prompt=prompt.prompt,
                prompt_ids=prompt.ids.tolist(),
                row=prompt.columns,
                engine=self._engine,
                state=state,
                sampling=sampling,
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
        )

    def _reward_and_keep(self, batch: Batch, drawn: list[Group], trainer_state: Any, phases: PhaseLedger) -> None:
        completions = [
            completion
            for group in drawn
            for completion in self._codec.decode_completions(
                group.prompt.prompt, [ids.tolist() for ids in group.responses]
            )
        ]
        begin = time.perf_counter()
        scores = score_groups(self._rewards, drawn, completions, trainer_state)
        phases.add("reward", time.perf_counter() - begin)
        totals = combine_rewards(scores.per_function, self._config.reward_weights).tolist()
        size = self._config.num_generations
        for index, group in enumerate(drawn):
            samples = slice(index * size, (index + 1) * size)
            group.rewards = [None if total != total else total for total in totals[samples]]
            if self._config.dynamic_sampling and not group.rewards_differ:
                group.release()
                batch.num_replaced += 1
                continue
            batch.groups.append(group)
            batch.completions += completions[samples]
            batch.scores.per_function += scores.per_function[samples]
            for column, values in scores.extra.items():
                batch.scores.extra.setdefault(column, []).extend(values[samples])
        batch.scores.names = scores.names
        batch.scores.metrics |= scores.metrics

    def _set_advantages(self, batch: Batch) -> None:
        if not batch.groups:
            return
        advantages = group_advantages(
            [group.rewards for group in batch.groups], scale_rewards=self._config.scale_rewards
        )
        for group, row in zip(batch.groups, advantages.tolist(), strict=True):
            group.advantages = row


def score_groups(
    rewards: Sequence[RewardFunction], groups: Sequence[Group], completions: Sequence[Any], trainer_state: Any
) -> RewardScores:
    """Call the reward functions on all responses of the groups; every prompt and column is repeated for its group."""
    samples = [(group, index, ids.tolist()) for group in groups for index, ids in enumerate(group.responses)]
    names = dict.fromkeys(name for group in groups for name in [*group.prompt.columns, *group.columns])

    def column(name: str) -> list[Any]:
        return [
            group.columns[name][index] if name in group.columns else group.prompt.columns.get(name)
            for group, index, _ in samples
        ]

    return score(
        rewards,
        prompts=[group.prompt.prompt for group, _, _ in samples],
        completions=completions,
        completion_ids=[ids for _, _, ids in samples],
        columns={name: column(name) for name in names},
        trainer_state=trainer_state,
        step=trainer_state.global_step + 1,
    )
