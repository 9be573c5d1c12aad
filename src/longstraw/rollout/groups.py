"""A group: the responses to one prompt and what is known about them; a batch: the groups of one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from longstraw.config.train import TrainConfig
from longstraw.data.prompts import Prompt
from longstraw.objective import Normalizer
from longstraw.rollout.rewards import Reward, RewardScores
from longstraw.state.resident import ResidentState


@dataclass
class Group:
    """The responses to one prompt and what is known about them.

    Attributes:
        position: the prompt's place in the stream.
        prompt: the prompt.
        responses: int64 [R_i] each, on the CPU.
        finish_reasons: "stop" or "length", one a response.
        sampled_logps: [R_i] each, the sampler's own log-probabilities; None where a `rollout_func` made the responses.
        masks: bool [R_i] each, True where a token is scored.
        num_chosen: tokens that the policy chose, one a response: all but those of tools and environments.
        columns: what a rollout function said besides, one value a response.
        rewards: weighted sums; None where no function scored the response.
        advantages: one a response; 0 where it has no reward.
        old_logps: [R_i] each under the policy that sampled, once known; None means "the current policy".
        reference_logps: [R_i] each, with a KL term.
        policy_masks: bool [R_i] each, True where a scored token's policy term counts; None where every one does.
        state: the prompt's resident state while it is kept.
        captured_in: the iteration over the responses in which it was captured.
        owner: the process that sampled the responses and takes their gradient.
    """

    position: int
    prompt: Prompt
    responses: list[torch.Tensor]
    finish_reasons: list[str]
    sampled_logps: list[torch.Tensor] | None
    masks: list[torch.Tensor]
    num_chosen: list[int] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    rewards: list[Reward] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    old_logps: list[torch.Tensor] | None = None
    reference_logps: list[torch.Tensor] | None = None
    policy_masks: list[torch.Tensor] | None = None
    state: ResidentState | None = None
    captured_in: int = 0
    owner: int = 0

    def __getstate__(self) -> dict[str, Any]:
        """Between processes it travels without its state, and without the prompt, which every process has."""
        return {**self.__dict__, "state": None, "prompt": None}

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

    def needs_gradient(self, config: TrainConfig) -> bool:
        """Whether anything of the loss depends on the group's log-probabilities."""
        return self.has_signal or config.beta > 0

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
