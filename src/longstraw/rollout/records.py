"""Rollouts: one record a response; the group of those to one prompt; the batch of groups of one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from longstraw.config.train import TrainConfig
from longstraw.data.prompts import Prompt
from longstraw.objective import Mean, Normalizer, PolicyLoss
from longstraw.rollout.rewards import Reward
from longstraw.state.resident import ResidentState


@dataclass
class Rollout:
    """A response to a prompt and what is known about it.

    Attributes:
        ids: int64 [R], on the CPU.
        mask: bool [R], True where a token is scored.
        finish_reason: "stop" or "length".
        sampled_logps: [R], log-probabilities as the sampler had them; None where it has none.
        num_chosen: tokens that the policy chose: all but those of tools and environments.
        policy_version: optimizer steps done by the policy that sampled.
        columns: what a rollout function said besides, by name.
        completion: as the reward functions saw it: text, messages or ids.
        rewards: by reward function; None where it left the response out.
        reward: their weighted sum; None where no function scored the response.
        extra: what reward functions gave to `log_extra`, by column.
        advantage: 0 where there is no reward.
        old_logps: [R] under the policy that sampled, once known; None means "the current policy".
        reference_logps: [R], with a KL term.
        policy_mask: bool [R], True where a scored token's policy term counts; None where every one does.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    finish_reason: str
    sampled_logps: torch.Tensor | None = None
    num_chosen: int = 0
    policy_version: int = 0
    columns: dict[str, Any] = field(default_factory=dict)
    completion: Any = None
    rewards: dict[str, Reward] = field(default_factory=dict)
    reward: Reward = None
    extra: dict[str, Any] = field(default_factory=dict)
    advantage: float = 0.0
    old_logps: torch.Tensor | None = None
    reference_logps: torch.Tensor | None = None
    policy_mask: torch.Tensor | None = None


@dataclass
class Group:
    """The rollouts of one prompt.

    Attributes:
        position: the prompt's place in the stream.
        prompt: the prompt.
        rollouts: in the order they were sampled.
        state: the prompt's resident state while it is kept.
        captured_in: the iteration over the rollouts in which it was captured.
        owner: the process that sampled the rollouts and takes their gradient.
    """

    position: int
    prompt: Prompt
    rollouts: list[Rollout]
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
    def responses(self) -> list[torch.Tensor]:
        """int64 [R_i] each."""
        return [rollout.ids for rollout in self.rollouts]

    @property
    def rewards_differ(self) -> bool:
        return len({rollout.reward for rollout in self.rollouts if rollout.reward is not None}) > 1

    @property
    def has_signal(self) -> bool:
        """Whether some scored token has an advantage other than 0."""
        return any(rollout.advantage != 0 and bool(rollout.mask.any()) for rollout in self.rollouts)

    def needs_gradient(self, config: TrainConfig) -> bool:
        """Whether anything of the loss depends on the group's log-probabilities."""
        return self.has_signal or config.beta > 0

    def loss(
        self, loss: PolicyLoss, logps: Sequence[torch.Tensor], normalizer: Normalizer
    ) -> tuple[torch.Tensor, dict[str, Mean]]:
        """The group's share of the step's loss, and what to log about it.

        Args:
            logps: [R_i] each, under the policy.
            normalizer: of the optimizer step that the group belongs to.
        """

        def values(name: str) -> list[torch.Tensor] | None:
            found = [getattr(rollout, name) for rollout in self.rollouts]
            if any(value is None for value in found):
                return None
            return [value.to(logp.device) for value, logp in zip(found, logps, strict=True)]

        return loss(
            logps,
            [rollout.advantage for rollout in self.rollouts],
            normalizer,
            old_logps=values("old_logps"),
            masks=values("mask"),
            ref_logps=values("reference_logps"),
            policy_masks=values("policy_mask"),
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
        reward_names: of the reward functions, in their order.
        reward_metrics: means of what reward functions gave to `log_metric`.
    """

    groups: list[Group]
    next_position: int
    num_replaced: int = 0
    reward_names: list[str] = field(default_factory=list)
    reward_metrics: dict[str, float] = field(default_factory=dict)

    @property
    def rollouts(self) -> list[Rollout]:
        """Of all groups."""
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def num_tokens(self) -> int:
        """Of prompts and responses, each prompt counted once."""
        return sum(len(group.prompt.ids) for group in self.groups) + sum(len(rollout.ids) for rollout in self.rollouts)

    @property
    def normalizer(self) -> Normalizer:
        """Counts over all groups, those without signal included."""
        return Normalizer.from_masks(rollout.mask for rollout in self.rollouts)

    def release(self) -> None:
        for group in self.groups:
            group.release()
