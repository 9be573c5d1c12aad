"""A prompt, ragged responses and an objective that couples them, drawn from a seed; and one engine step on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from families import VOCAB
from reference import gradients

import longstraw

Objective = Callable[[list[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Group:
    prompt: torch.Tensor
    responses: list[torch.Tensor]
    objective: Objective


def group(num_prompt: int = 75, lengths: Sequence[int] = (1, 9, 6), seed: int = 1) -> Group:
    """The objective: clipped ratios to stale log-probabilities, normalised by all tokens, plus the group's spread."""
    generator = torch.Generator().manual_seed(seed)

    def draw(num: int) -> torch.Tensor:
        return torch.randint(0, VOCAB, (num,), generator=generator)

    prompt, responses = draw(num_prompt), [draw(num) for num in lengths]
    shift = [torch.rand(num, generator=generator, dtype=torch.float64) * 0.6 - 0.3 for num in lengths]
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    total = max(1, sum(lengths))

    def objective(logps: list[torch.Tensor]) -> torch.Tensor:
        loss = logps[0].new_zeros(())
        for logp, move, advantage in zip(logps, shift, advantages):
            ratio = (logp - logp.detach() - move.to(logp)).exp()
            loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / total
        return loss + 0.1 * torch.stack([logp.sum() for logp in logps]).var(correction=0)

    return Group(prompt, responses, objective)


def engine_step(
    model: Any, what: Group, temperature: float = 1.0, **options: Any
) -> tuple[Any, dict[str, torch.Tensor]]:
    """(outcome, gradients by parameter name) of capture and backward, from empty gradients."""
    model.zero_grad(set_to_none=True)
    engine = longstraw.Engine(model, **options)
    with engine.capture(what.prompt) as state:
        outcome = engine.backward(state, what.responses, what.objective, temperature)
    found = gradients(model)
    model.zero_grad(set_to_none=True)
    return outcome, found
