"""Narrow floats: the error against float32 is no more than that of stock training in the same floats."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from families import build
from group import engine_step, group

import longstraw
from longstraw.engine.gradients import GradientTransaction

PIECES = dict(segment_tokens=24, block_tokens=16)
WHAT = group(num_prompt=80, lengths=(20, 30, 12))


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("mode", ["full", "none"])
def test_bfloat16(family: str, mode: Any) -> None:
    errors = []
    for seed in range(2 if mode == "full" else 1):
        model = build(family, seed, torch.float32, initializer_range=0.06)
        narrow = build(family, seed, torch.bfloat16, initializer_range=0.06)
        with torch.no_grad():  # the same function: the float32 model holds the rounded weights
            for wide, parameter in zip(model.parameters(), narrow.parameters(), strict=True):
                wide.copy_(parameter)
        _, _, truth = reference.step(model, WHAT.prompt, WHAT.responses, WHAT.objective, mode)
        _, _, stock = reference.step(narrow, WHAT.prompt, WHAT.responses, WHAT.objective, mode)
        outcome, found = engine_step(narrow, WHAT, prompt_grad=mode, **PIECES)
        assert all(x.dtype == torch.float32 for x in outcome.logps)
        assert {g.dtype for g in found.values()} == {torch.bfloat16}
        errors.append((reference.relative_error(found, truth), reference.relative_error(stock, truth)))
    ours, theirs = (sum(side) for side in zip(*errors))
    assert 0 < ours <= 1.5 * theirs, f"relative L2 {ours:.1e}, stock {theirs:.1e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_are_summed_in_float32(dtype: torch.dtype) -> None:
    """1 and 512 times 2^-10: added in bfloat16 the small ones would all be lost, and in float16 still many."""
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    parameter.grad = torch.full((3,), 0.25, dtype=dtype)
    with GradientTransaction([parameter]):
        assert parameter.grad is None
        for scale in [1.0] + [2.0**-10] * 512:
            (parameter * scale).sum().backward()
    assert parameter.grad is not None and parameter.grad.dtype == dtype
    assert parameter.grad.tolist() == [1.75] * 3
    assert not parameter._post_accumulate_grad_hooks


def test_many_small_contributions_are_not_rounded_away() -> None:
    """In bfloat16 a sum of many pieces would lose most of them: cut finely or not, the gradient is as good."""
    model = build("llama", 0, torch.float32, initializer_range=0.06)
    narrow = build("llama", 0, torch.bfloat16, initializer_range=0.06)
    _, _, truth = reference.step(model, WHAT.prompt, WHAT.responses, WHAT.objective)
    coarse, fine = (
        reference.relative_error(engine_step(narrow, WHAT, segment_tokens=size, block_tokens=size)[1], truth)
        for size in (200, 5)
    )
    assert fine <= 1.25 * coarse


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_5"])
def test_autocast_gives_values_another_dtype_than_queries(family: str) -> None:
    """Under autocast the value projection is bfloat16 and rotated queries and keys are not."""
    model = build(family, 0, torch.float32, initializer_range=0.06)
    _, _, truth = reference.step(model, WHAT.prompt, WHAT.responses, WHAT.objective)
    with torch.autocast("cpu", torch.bfloat16):
        _, _, stock = reference.step(model, WHAT.prompt, WHAT.responses, WHAT.objective)
        _, found = engine_step(model, WHAT, **PIECES)
        engine = longstraw.Engine(model, **PIECES)
        with engine.capture(WHAT.prompt) as state:
            drafts = engine.sample(state, num=2, max_new_tokens=5, stop_ids=())
            scored = engine.score(state, [draft.ids for draft in drafts])
    assert all(gradient.dtype == torch.float32 for gradient in found.values())
    ours, theirs = (reference.relative_error(side, truth) for side in (found, stock))
    assert 0 < ours <= 1.5 * theirs, f"relative L2 {ours:.1e}, stock {theirs:.1e}"
    for draft, logps in zip(drafts, scored):
        torch.testing.assert_close(draft.logps, logps, rtol=0.05, atol=0.05)
