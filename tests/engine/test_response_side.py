"""The response side of a gradient: what it has before the sweep, apart from everything that was there already."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from families import build
from group import engine_step, group

import longstraw

PIECES = dict(segment_tokens=17, block_tokens=8)


def sides(model: Any, prompt_grad: Any = "full", keep: bool = True) -> tuple[Any, dict[str, torch.Tensor]]:
    """(outcome, response side by parameter name) of a step that adds to `.grad`."""
    what, engine = group(), longstraw.Engine(model, prompt_grad=prompt_grad, **PIECES)
    with engine.capture(what.prompt) as state:
        outcome = engine.backward(state, what.responses, what.objective, keep_response_side=keep)
    names = [name for name, _ in engine.host.trainable()]
    kept = zip(names, outcome.response_side or [None] * len(names), strict=True)
    return outcome, {name: side for name, side in kept if side is not None}


def minus(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: gradient - other[name] if name in other else gradient for name, gradient in one.items()}


@pytest.mark.usefixtures("float64_inside")
@pytest.mark.parametrize("mode", ["full", 20, "none"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_5"])
def test_it_is_the_gradient_without_the_prompt(family: str, mode: Any) -> None:
    """And what `.grad` has beyond it is what stock autograd has beyond a constant prompt."""
    what, model = group(), build(family)
    whole, constant = (reference.step(model, what.prompt, what.responses, what.objective, m)[2] for m in (mode, "none"))
    _, own = engine_step(model, what, prompt_grad="none", **PIECES)
    _, response = sides(model, mode)
    reference.assert_same_gradients(response, own, 1e-12)
    reference.assert_same_gradients(response, constant, 1e-11)
    rest = minus(reference.gradients(model), response)
    if mode == "none":
        assert all(not part.any() for part in rest.values())
    else:
        reference.assert_same_gradients(rest, minus(whole, constant), 1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_not_a_bit_of_the_gradient_changes(dtype: torch.dtype) -> None:
    """Twice in a row, so that the second time there is a gradient already, which is no part of the response side."""
    results = []
    for keep in (False, True):
        model = build("qwen3_5", dtype=dtype)
        runs = [(*sides(model, keep=keep), reference.gradients(model)) for _ in range(2)]
        assert all((outcome.response_side is None) != keep for outcome, _, _ in runs)
        results.append([gradients for _, _, gradients in runs])
    for plain, kept in zip(*results):
        assert plain.keys() == kept.keys()
        assert all(torch.equal(gradient, kept[name]) for name, gradient in plain.items())
    once, again = (response for _, response, _ in runs)
    assert once and once.keys() == again.keys()
    assert all(torch.equal(response, again[name]) for name, response in once.items())


def test_of_narrow_parameters_it_is_the_sum_before_rounding() -> None:
    model = build("llama", dtype=torch.bfloat16)
    _, response = sides(model, "none")
    assert {side.dtype for side in response.values()} == {torch.float32}
    rounded = {name: side.bfloat16() for name, side in response.items()}
    assert any(not torch.equal(rounded[name].float(), side) for name, side in response.items())
    assert all(torch.equal(gradient, rounded[name]) for name, gradient in reference.gradients(model).items())
    _, swept = sides(model, "full")  # its replay is the same, whatever is added later
    assert all(torch.equal(side, response[name]) for name, side in swept.items())


def test_without_a_gradient_there_is_none() -> None:
    model, what = build("llama", dtype=torch.float32), group()
    model.lm_head.requires_grad_(False)
    engine = longstraw.Engine(model, **PIECES)
    with engine.capture(what.prompt) as state:
        outcome = engine.backward(
            state, what.responses, lambda logps: 0 * torch.cat(logps).sum(), keep_response_side=True
        )
    assert outcome.response_side == [None] * len(engine.host.trainable())
