"""The reference policy of the KL term: its own resident state, with adapters off, another adapter, or a frozen copy."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from longstraw.trainer.adapters import adapter_switch
from longstraw.trainer.loading import Policy


class ReferencePolicy:
    """Scores responses under the policy as it was before training.

    Args:
        policy: as loaded; without adapters, its model is copied and the copy frozen.
        make_engine: builds an engine for a model, without prompt gradient.
    """

    def __init__(self, policy: Policy, make_engine: Any) -> None:
        self._switch = adapter_switch(policy.model) if policy.is_peft else nullcontext
        self._engine = make_engine(policy.model if policy.is_peft else copy.deepcopy(policy.model))

    def score(
        self, prompt_ids: torch.Tensor, responses: Sequence[torch.Tensor], temperature: float
    ) -> list[torch.Tensor]:
        """Log-probabilities [R_i] of each response, on the CPU. The reference's own state is released again."""
        with self._switch():
            state = self._engine.capture(prompt_ids)
            try:
                return [logp.cpu() for logp in self._engine.score(state, responses, temperature=temperature)]
            finally:
                state.release()
