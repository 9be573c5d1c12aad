"""Who makes rollouts: the protocol, and the engine as the sampler of its own policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from longstraw.config.train import TrainConfig
from longstraw.data.prompts import Prompt
from longstraw.engine.engine import Engine
from longstraw.rollout.records import Rollout
from longstraw.state.resident import ResidentState


class Sampler(Protocol):
    """Makes the rollouts of a prompt."""

    def sample(self, prompt: Prompt, state: ResidentState, sampling: dict[str, Any], version: int) -> list[Rollout]:
        """`sampling["num"]` rollouts; in their masks every token that the policy chose counts.

        Args:
            state: the captured prompt; it stays the caller's.
            sampling: keyword arguments of `Engine.sample`. The same seed has to give the same rollouts: a resumed run
                relies on it.
            version: of the policy: optimizer steps done.
        """
        ...


@dataclass
class EngineSampler:
    """Samples from the captured prompt. Raises FloatingPointError where the model's output is not finite."""

    engine: Engine

    def sample(self, prompt: Prompt, state: ResidentState, sampling: dict[str, Any], version: int) -> list[Rollout]:
        return [
            Rollout(
                draft.ids,
                torch.ones(draft.ids.shape, dtype=torch.bool),
                draft.finish_reason,
                draft.logps,
                num_chosen=len(draft.ids),
                policy_version=version,
            )
            for draft in self.engine.sample(state, **sampling)
        ]


def sampling_options(config: TrainConfig, stop_ids: Sequence[int], seed: int) -> dict[str, Any]:
    """Keyword arguments of `Engine.sample` for the rollouts of training."""
    return {
        "num": config.num_generations,
        "max_new_tokens": config.max_completion_length,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "min_p": config.min_p or 0.0,
        "repetition_penalty": config.repetition_penalty,
        "stop_ids": stop_ids,
        "seed": seed,
    }
