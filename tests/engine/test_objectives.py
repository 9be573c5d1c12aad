"""Any differentiable function of the group's log-probabilities, at any temperature, gets its exact gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from families import build
from group import Group, engine_step, group

import longstraw

pytestmark = pytest.mark.usefixtures("float64_inside")
PIECES = dict(segment_tokens=11, block_tokens=8)
EXACT = 1e-11
WHAT = group(num_prompt=31, lengths=(4, 9, 2))

OBJECTIVES: dict[str, Callable[[list[torch.Tensor]], torch.Tensor]] = {
    "one token": lambda logps: logps[1][3],
    "one response": lambda logps: logps[1].exp().sum(),
    "not all tokens": lambda logps: logps[0][1:].sum() + logps[1][:2].sum() - logps[2].mean(),
    "coupled": lambda logps: torch.stack([x.sum() for x in logps]).softmax(0)[0],
    "ratios of whole sequences": lambda logps: sum((x - x.detach() + 0.1).mean().exp() for x in logps) / 3,
    "shape [1]": lambda logps: torch.cat(logps).sum()[None],
    "in float32": lambda logps: torch.cat(logps).float().sum(),
    "twice the same": lambda logps: logps[0].sum() * logps[0].mean() + logps[2].sum(),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective(name: str) -> None:
    model, what = build("llama"), Group(WHAT.prompt, WHAT.responses, OBJECTIVES[name])
    loss, _, expected = reference.step(model, what.prompt, what.responses, lambda x: what.objective(x).reshape(()))
    outcome, found = engine_step(model, what, **PIECES)
    assert outcome.loss.shape == () and not outcome.loss.requires_grad
    torch.testing.assert_close(outcome.loss, loss, rtol=EXACT, atol=EXACT)
    reference.assert_same_gradients(found, expected, EXACT)


def test_a_leaf_itself_may_be_the_loss() -> None:
    model, what = build("llama"), Group(WHAT.prompt, [WHAT.responses[0][:1]], lambda logps: logps[0])
    _, _, expected = reference.step(model, what.prompt, what.responses, lambda logps: logps[0].sum())
    reference.assert_same_gradients(engine_step(model, what, **PIECES)[1], expected, EXACT)


def test_cotangents_are_what_the_objective_says() -> None:
    model, what = build("llama"), Group(WHAT.prompt, WHAT.responses, lambda logps: 3 * logps[0].sum() - logps[2].sum())
    outcome, _ = engine_step(model, what, **PIECES)
    assert [c.unique().tolist() for c in outcome.cotangents] == [[3.0], [0.0], [-1.0]]
    assert all(not x.requires_grad for x in outcome.logps)


def test_a_zero_gradient_is_zero_and_costs_no_replay() -> None:
    """Equal rewards: the loss has a gradient function, and its gradient is 0 everywhere."""
    phases: list[str] = []
    model, what = build("qwen3_5"), Group(WHAT.prompt, WHAT.responses, lambda logps: 0.0 * torch.cat(logps).sum())
    outcome, found = engine_step(model, what, progress=lambda phase, *_: phases.append(phase), **PIECES)
    assert outcome.loss == 0 and all((gradient == 0).all() for gradient in found.values())
    assert "sweep" not in phases


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_temperature_divides_the_logits(family: str, temperature: float) -> None:
    model = build(family)
    loss, logps, expected = reference.step(model, WHAT.prompt, WHAT.responses, WHAT.objective, temperature=temperature)
    outcome, found = engine_step(model, WHAT, temperature, **PIECES)
    torch.testing.assert_close(outcome.loss, loss, rtol=EXACT, atol=EXACT)
    reference.assert_same_gradients(found, expected, EXACT)
    engine = longstraw.Engine(model, **PIECES)
    with engine.capture(WHAT.prompt) as state:
        for ours, scored, theirs in zip(outcome.logps, engine.score(state, WHAT.responses, temperature), logps):
            assert torch.equal(ours, scored), "policy and old log-probabilities come from one computation"
            torch.testing.assert_close(ours, theirs, rtol=EXACT, atol=EXACT)
        cold = engine.score(state, WHAT.responses)
    assert all((a - b).abs().max() > 1e-2 for a, b in zip(cold, logps))


def test_on_policy_ratios_are_exactly_one() -> None:
    """Old log-probabilities from `score`, policy's from `backward`: their difference is 0 to the bit."""
    model = build("qwen3_5", dtype=torch.float32)
    engine = longstraw.Engine(model, **PIECES)
    seen: list[torch.Tensor] = []

    def objective(logps: list[torch.Tensor]) -> torch.Tensor:
        seen.extend((a - b).detach() for a, b in zip(logps, old))
        return torch.cat(logps).sum()

    with engine.capture(WHAT.prompt) as state:
        old = engine.score(state, WHAT.responses, temperature=0.9)
        engine.backward(state, WHAT.responses, objective, temperature=0.9)
    assert all((difference == 0).all() for difference in seen) and len(seen) == 3


def test_micro_steps_add_up() -> None:
    """Two calls over parts of a group add to `.grad` what one call over all of it does."""
    model = build("llama")
    whole = Group(WHAT.prompt, WHAT.responses, lambda logps: torch.cat(logps).sum() / 15)
    _, expected = engine_step(model, whole, **PIECES)
    engine = longstraw.Engine(model, **PIECES)
    with engine.capture(WHAT.prompt) as state:
        engine.backward(state, WHAT.responses[:1], whole.objective)
        engine.backward(state, WHAT.responses[1:], whole.objective)
    reference.assert_same_gradients(reference.gradients(model), expected, EXACT)


def test_gradients_are_added_to_what_was_there() -> None:
    model = build("llama")
    _, expected = engine_step(model, WHAT, **PIECES)
    engine = longstraw.Engine(model, **PIECES)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with engine.capture(WHAT.prompt) as state:
        engine.backward(state, WHAT.responses, WHAT.objective)
    found = {name: gradient - 1 for name, gradient in reference.gradients(model).items()}
    reference.assert_same_gradients(found, expected, 1e-10)


def test_the_same_response_twice_counts_twice() -> None:
    model = build("mistral")
    response = WHAT.responses[1]
    twice = Group(WHAT.prompt, [response, response], lambda logps: torch.cat(logps).sum())
    once = Group(WHAT.prompt, [response], lambda logps: 2 * logps[0].sum())
    reference.assert_same_gradients(
        engine_step(model, twice, **PIECES)[1], engine_step(model, once, **PIECES)[1], EXACT
    )


def test_progress_and_phases() -> None:
    seen: dict[str, list[tuple[int, int]]] = {}

    def progress(phase: str, done: int, total: int) -> None:
        seen.setdefault(phase, []).append((done, total))

    engine = longstraw.Engine(build("llama"), progress=progress, **PIECES)
    with engine.capture(WHAT.prompt) as state:
        outcome = engine.backward(state, WHAT.responses, WHAT.objective)
        engine.sample(state, num=2, max_new_tokens=3, stop_ids=())
    assert seen["capture"] == [(11, 30), (22, 30), (30, 30)]
    assert seen["sweep"][-1] == (30, 30) and len(seen["sweep"]) == 3
    assert seen["replay"][-1] == (15, 15) and seen["sample"] == [(1, 3), (2, 3), (3, 3)]
    phases: Any = outcome.phases
    assert {"score", "replay", "sweep"} <= phases.keys()
    assert all(phase.seconds > 0 and (phase.peak_bytes is None or phase.peak_bytes > 0) for phase in phases.values())
