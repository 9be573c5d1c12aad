"""Results do not depend on how the work is cut, placed or ordered."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import reference
import torch
from families import build
from group import Group, engine_step, group

import longstraw

pytestmark = pytest.mark.usefixtures("float64_inside")
KINDS = ["llama", "mistral", "qwen3_5"]  # a family for every kind of layer state
SIZES = [1, 2, 3, 7, 64, 1000]
EXACT = 1e-11


@cache
def case(family: str) -> tuple[Any, Group, dict[str, torch.Tensor], torch.Tensor]:
    """(model, group, conventional gradient, conventional loss); called inside the float64 context."""
    model, what = build(family), group(num_prompt=31, lengths=(5, 12, 1))
    loss, _, expected = reference.step(model, what.prompt, what.responses, what.objective)
    return model, what, expected, loss


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_segment_size(family: str, size: int) -> None:
    model, what, expected, loss = case(family)
    outcome, found = engine_step(model, what, segment_tokens=size)
    torch.testing.assert_close(outcome.loss, loss, rtol=EXACT, atol=EXACT)
    reference.assert_same_gradients(found, expected, EXACT)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_block_size(family: str, size: int) -> None:
    """Small blocks cut every response into a chain; large ones put all of them side by side in one batch."""
    model, what, expected, loss = case(family)
    outcome, found = engine_step(model, what, segment_tokens=11, block_tokens=size)
    torch.testing.assert_close(outcome.loss, loss, rtol=EXACT, atol=EXACT)
    reference.assert_same_gradients(found, expected, EXACT)


@pytest.mark.parametrize("block_tokens, num_runs", [(4, 8), (8, 4), (32, 1), (1000, 1), (3, 16)])
def test_responses_that_fit_into_a_block_run_side_by_side(block_tokens: int, num_runs: int) -> None:
    """Eight responses of 4 tokens: one forward pass a block when scored, whoever shares it."""
    model, what = build("llama"), group(num_prompt=5, lengths=(4,) * 8)
    engine, shapes = longstraw.Engine(model, block_tokens=block_tokens), []
    with engine.capture(what.prompt) as state:
        hook = model.model.embed_tokens.register_forward_hook(lambda module, args, out: shapes.append(args[0].shape))
        engine.score(state, what.responses)
        hook.remove()
    assert len(shapes) == num_runs and sum(shape.numel() for shape in shapes) == 32
    assert all(shape.numel() <= block_tokens for shape in shapes), "padding counts"


@pytest.mark.parametrize("family", KINDS)
def test_tiers_agree_to_the_bit(family: str, tmp_path: Any) -> None:
    model, what, _, _ = case(family)
    pieces = dict(segment_tokens=7, block_tokens=5, page_dir=tmp_path)
    first, expected = engine_step(model, what, tier="device", **pieces)
    for tier in ("host", "disk"):
        outcome, found = engine_step(model, what, tier=tier, **pieces)
        assert torch.equal(outcome.loss, first.loss)
        assert all(torch.equal(a, b) for a, b in zip(outcome.logps, first.logps))
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            assert torch.equal(gradient, expected[name]), f"{tier}: {name}"


@pytest.mark.parametrize("family", KINDS)
def test_same_input_same_bits(family: str) -> None:
    model, what, _, _ = case(family)
    runs = [engine_step(model, what, segment_tokens=7, block_tokens=5)[1] for _ in range(2)]
    assert all(torch.equal(gradient, runs[1][name]) for name, gradient in runs[0].items())


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("block_tokens", [5, 1000])
def test_order_of_responses(family: str, block_tokens: int) -> None:
    model, what, expected, loss = case(family)
    order = [2, 0, 1]
    places = [order.index(i) for i in range(3)]
    shuffled = Group(
        what.prompt, [what.responses[i] for i in order], lambda logps: what.objective([logps[p] for p in places])
    )
    outcome, found = engine_step(model, shuffled, segment_tokens=11, block_tokens=block_tokens)
    torch.testing.assert_close(outcome.loss, loss, rtol=EXACT, atol=EXACT)
    assert [len(x) for x in outcome.logps] == [len(r) for r in shuffled.responses]
    reference.assert_same_gradients(found, expected, EXACT)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("num_prompt", [1, 2, 3])
def test_short_prompts(family: str, num_prompt: int) -> None:
    """A one-token prompt leaves no state at all: its branches start from nothing."""
    model, what = build(family), group(num_prompt=num_prompt, lengths=(3, 1, 20))
    for mode in ("full", "none", 1):
        loss, _, expected = reference.step(model, what.prompt, what.responses, what.objective, mode)
        outcome, found = engine_step(model, what, prompt_grad=mode, segment_tokens=1, block_tokens=6)
        torch.testing.assert_close(outcome.loss, loss, rtol=EXACT, atol=EXACT)
        reference.assert_same_gradients(found, expected, EXACT)


@pytest.mark.parametrize("family", KINDS)
def test_an_empty_response_contributes_nothing(family: str) -> None:
    model, what, _, _ = case(family)
    filled = Group(what.prompt, what.responses, lambda logps: sum(x.sum() for x in logps))
    empty = torch.zeros(0, dtype=torch.long)
    with_empty = Group(what.prompt, [empty, *what.responses[:2], empty, what.responses[2]], filled.objective)
    pieces = dict(segment_tokens=11, block_tokens=8)
    outcome, found = engine_step(model, with_empty, **pieces)
    assert [len(x) for x in outcome.logps] == [0, 5, 12, 0, 1]
    _, expected = engine_step(model, filled, **pieces)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_a_group_of_empty_responses_has_a_zero_gradient() -> None:
    model, what, _, _ = case("llama")
    nothing = Group(what.prompt, [what.prompt[:0]] * 2, lambda logps: torch.cat(logps).sum())
    outcome, found = engine_step(model, nothing, segment_tokens=11)
    assert outcome.loss == 0 and all(gradient.norm() == 0 for gradient in found.values())


@pytest.mark.parametrize("family", KINDS)
def test_score_is_what_the_stock_model_says(family: str) -> None:
    model, what, _, _ = case(family)
    for block_tokens in (1, 4, 1000):
        engine = longstraw.Engine(model, segment_tokens=9, block_tokens=block_tokens)
        with engine.capture(what.prompt) as state:
            scored = engine.score(state, what.responses)
        for logps, response in zip(scored, what.responses):
            assert not logps.requires_grad
            with torch.no_grad():
                expected = reference.response_logps(model, what.prompt, response)
            torch.testing.assert_close(logps, expected, rtol=EXACT, atol=EXACT)


SMALL = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
CUTS = [(24, cut) for cut in (2, 3, 4, 5)] + [(74, cut) for cut in range(60, 70)] + [(135, cut) for cut in (127, 129)]


@pytest.mark.parametrize("family, num_prompt, cut", [("qwen3_5", *c) for c in CUTS] + [("qwen3_next", 74, 63)])
def test_recurrence_cut_anywhere_around_its_inner_chunk(family: str, num_prompt: int, cut: int) -> None:
    """The stock recurrence works in chunks of 64 tokens, its convolution over 4: cuts at, before and after both."""
    model, what = build(family, **SMALL), group(num_prompt=num_prompt, lengths=(5,))
    _, _, expected = reference.step(model, what.prompt, what.responses, what.objective)
    _, found = engine_step(model, what, segment_tokens=cut)
    reference.assert_same_gradients(found, expected, EXACT)


@pytest.mark.parametrize("num_prompt", [4, 5, 64, 65, 66])
def test_branches_of_a_recurrence_start_anywhere_in_its_inner_chunk(num_prompt: int) -> None:
    model, what = build("qwen3_5", **SMALL), group(num_prompt=num_prompt, lengths=(67,))
    _, _, expected = reference.step(model, what.prompt, what.responses, what.objective)
    _, found = engine_step(model, what, block_tokens=64)
    reference.assert_same_gradients(found, expected, EXACT)


def test_padding_reaches_nothing() -> None:
    """Shorter responses are padded on the right in their batch: what the padding holds must not show."""
    model, what, _, _ = case("qwen3_5")
    engine = longstraw.Engine(model, segment_tokens=11, block_tokens=1000)
    ragged = [what.responses[2], what.responses[1]]
    with engine.capture(what.prompt) as state:
        together, alone = engine.score(state, ragged), [engine.score(state, [r])[0] for r in ragged]
    for a, b in zip(together, alone):
        torch.testing.assert_close(a, b, rtol=EXACT, atol=EXACT)
