"""Rollouts: for each prompt of a step capture, sample, reward; then advantages over the whole step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from longstraw.engine.engine import Engine
from longstraw.engine.sample import Draft
from longstraw.objective import Normalizer, combine_rewards, group_advantages
from longstraw.state.resident import ResidentState
from longstraw.training.config import TrainConfig
from longstraw.training.data import Prompt, PromptStream, derive_seed
from longstraw.training.phases import PhaseLedger
from longstraw.training.reference import ReferencePolicy
from longstraw.training.rewards import Reward, RewardFunction, RewardScores, score
from longstraw.training.text import TextCodec


@dataclass
class Group:
    """The responses to one prompt and what is known about them.

    Attributes:
        position: the prompt's place in the stream.
        prompt: the prompt.
        responses: int64 [R_i] each, on the CPU.
        finish_reasons: "stop" or "length", one a response.
        sampled_logps: [R_i] each, the sampler's own log-probabilities.
        masks: bool [R_i] each, True where a token is scored.
        rewards: weighted sums; None where no function scored the response.
        advantages: one a response; 0 where it has no reward.
        old_logps: [R_i] each under the policy that sampled, once known; None means "the current policy".
        reference_logps: [R_i] each, with a KL term.
        state: the prompt's resident state while it is kept.
    """

    position: int
    prompt: Prompt
    responses: list[torch.Tensor]
    finish_reasons: list[str]
    sampled_logps: list[torch.Tensor]
    masks: list[torch.Tensor]
    rewards: list[Reward] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    old_logps: list[torch.Tensor] | None = None
    reference_logps: list[torch.Tensor] | None = None
    state: ResidentState | None = None

    @property
    def prompt_ids(self) -> torch.Tensor:
        """int64 [P]."""
        return torch.from_numpy(self.prompt.ids).long()

    @property
    def rewards_differ(self) -> bool:
        given = {reward for reward in self.rewards if reward is not None}
        return len(given) > 1

    @property
    def has_signal(self) -> bool:
        """Whether some scored token has an advantage other than 0."""
        return any(
            advantage != 0 and bool(mask.any()) for advantage, mask in zip(self.advantages, self.masks, strict=True)
        )

    def release(self) -> None:
        """Free the prompt's state, if it is kept."""
        if self.state is not None:
            self.state.release()
            self.state = None


@dataclass
class Batch:
    """The groups of one optimizer step, or of several with `num_iterations` above 1.

    Attributes:
        groups: in the order they were drawn.
        next_position: where the stream goes on.
        num_replaced: groups that dynamic sampling put aside.
        scores: what the reward functions returned for `groups`, sample by sample.
        completions: as the reward functions saw them.
    """

    groups: list[Group]
    next_position: int
    num_replaced: int = 0
    scores: RewardScores = field(default_factory=lambda: RewardScores([], []))
    completions: list[Any] = field(default_factory=list)

    @property
    def normalizer(self) -> Normalizer:
        """Counts over all groups, those without signal included."""
        return Normalizer.from_masks(mask for group in self.groups for mask in group.masks)

    def release(self) -> None:
        for group in self.groups:
            group.release()


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
    ) -> None:
        self._config = config
        self._engine = engine
        self._codec = codec
        self._stream = stream
        self._rewards = rewards
        self._reference = reference
        self._stop_ids = stop_ids

    def collect(self, position: int, trainer_state: Any, phases: PhaseLedger) -> Batch:
        """Draw prompts from `position` on until the step has its groups. On an exception every state is released.

        Raises:
            RewardError: a reward function failed.
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
        config = self._config
        for offset in range(num_prompts):
            prompt = self._stream.at(position + offset)
            state = self._engine.capture(torch.from_numpy(prompt.ids).long())
            try:
                drafts = self._engine.sample(
                    state,
                    num=config.num_generations,
                    max_new_tokens=config.max_completion_length,
                    temperature=config.temperature,
                    top_p=config.top_p,
                    top_k=config.top_k,
                    min_p=config.min_p or 0.0,
                    repetition_penalty=config.repetition_penalty,
                    stop_ids=self._stop_ids,
                    seed=derive_seed(config.seed, "sample", position + offset),
                )
            except BaseException:
                state.release()
                raise
            phases.take(self._engine.meter)
            group = _group_of(position + offset, prompt, drafts, config.mask_truncated_completions)
            if config.gradient_accumulation_steps == 1:
                group.state = state
            else:
                state.release()
            yield group

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
    samples = [(group, ids.tolist()) for group in groups for ids in group.responses]
    names = dict.fromkeys(name for group in groups for name in group.prompt.columns)
    return score(
        rewards,
        prompts=[group.prompt.prompt for group, _ in samples],
        completions=completions,
        completion_ids=[ids for _, ids in samples],
        columns={name: [group.prompt.columns.get(name) for group, _ in samples] for name in names},
        trainer_state=trainer_state,
        step=trainer_state.global_step + 1,
    )


def _group_of(position: int, prompt: Prompt, drafts: Sequence[Draft], mask_truncated: bool) -> Group:
    masks = [
        torch.full(draft.ids.shape, not (mask_truncated and draft.finish_reason == "length"), dtype=torch.bool)
        for draft in drafts
    ]
    return Group(
        position,
        prompt,
        [draft.ids for draft in drafts],
        [draft.finish_reason for draft in drafts],
        [draft.logps for draft in drafts],
        masks,
    )
