"""Qwen3.5/3.6, Qwen3-Next and OLMo Hybrid: kinds of state, the text model inside a model for images, short pieces."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from families import build
from group import engine_step, group

import longstraw
from longstraw.engine.host import ModelHost
from longstraw.models import family_of
from longstraw.pages import PageStore
from longstraw.state.kv import KVChain
from longstraw.state.recurrent import RecurrentChain

EXACT = 1e-11
FAMILIES = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_5_image", "olmo_hybrid"]


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_and_parts(family: str) -> None:
    model = build(family, dtype=torch.float32)
    host = ModelHost(model)
    assert [type(layer) for layer in host.new_chain(PageStore("cpu"), 0).layers] == [
        RecurrentChain,
        KVChain,
        RecurrentChain,
    ]
    assert host.head is model.lm_head and hasattr(host.backbone, "layers") and hasattr(host.backbone, "embed_tokens")
    assert host.vocab_size == 67 and host.position_limit == 4096


def test_an_unknown_kind_names_itself() -> None:
    model = build("qwen3_5", dtype=torch.float32)
    model.config.layer_types = ["linear_attention", "sliding_attention", "linear_attention"]
    with pytest.raises(ValueError, match="sliding_attention"):
        family_of("qwen3_5_text").layers(model.config)


@pytest.mark.parametrize("family", FAMILIES)
def test_as_shipped_in_float32(family: str) -> None:
    """Nothing patched: the recurrence, routers and norms in float32, experts by the stock grouped kernel."""
    model = build(family, dtype=torch.float32, initializer_range=0.05)
    what = group(num_prompt=90, lengths=(20, 9, 1))
    for mode in ("full", 30):
        loss, _, expected = reference.step(model, what.prompt, what.responses, what.objective, mode)
        outcome, found = engine_step(model, what, prompt_grad=mode, segment_tokens=33, block_tokens=16)
        torch.testing.assert_close(outcome.loss, loss, rtol=2e-5, atol=2e-5, check_dtype=False)
        reference.assert_same_gradients(found, expected, 2e-5)


@pytest.mark.parametrize("mode", ["full", "none", 40])
@pytest.mark.parametrize("changes", [{}, dict(linear_allow_neg_eigval=False)], ids=["negative", "positive"])
def test_olmo_in_pieces_as_in_one_pass(mode: str | int, changes: dict[str, bool], float64_inside: None) -> None:
    model, what = build("olmo_hybrid", **changes), group()
    loss, _, expected = reference.step(model, what.prompt, what.responses, what.objective, mode)
    outcome, found = engine_step(model, what, prompt_grad=mode, segment_tokens=20, block_tokens=4)
    assert abs(outcome.loss - loss) <= EXACT
    reference.assert_same_gradients(found, expected, EXACT)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_scores_as_one_pass_does(family: str, float64_inside: None) -> None:
    """A decoder carries the states from token to token."""
    model, what = build(family), group(num_prompt=21)
    engine = longstraw.Engine(model, segment_tokens=8)
    with engine.capture(what.prompt) as state:
        for draft in engine.sample(state, num=3, max_new_tokens=6, seed=0):
            with torch.no_grad():
                expected = reference.response_logps(model, what.prompt, draft.ids)
            torch.testing.assert_close(draft.logps, expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("family", ["qwen3_5", "olmo_hybrid"])
@pytest.mark.parametrize("kernel", [2, 4, 9])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_pieces_shorter_than_the_convolution(family: str, kernel: int, size: int, float64_inside: None) -> None:
    layers = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    model, what = build(family, linear_conv_kernel_dim=kernel, **layers), group(num_prompt=14, lengths=(7, 1))
    loss, _, expected = reference.step(model, what.prompt, what.responses, what.objective)
    outcome, found = engine_step(model, what, segment_tokens=size, block_tokens=size)
    assert abs(outcome.loss - loss) <= EXACT
    reference.assert_same_gradients(found, expected, EXACT)


@pytest.mark.parametrize("layer_types", [["linear_attention"] * 2, ["full_attention"] * 2])
def test_layers_of_one_kind_only(layer_types: list[str], float64_inside: None) -> None:
    model = build("qwen3_5", num_hidden_layers=2, layer_types=layer_types)
    what = group(num_prompt=30, lengths=(9, 2))
    _, _, expected = reference.step(model, what.prompt, what.responses, what.objective)
    reference.assert_same_gradients(engine_step(model, what, segment_tokens=7, block_tokens=4)[1], expected, EXACT)


def test_the_recurrent_state_goes_on_over_a_cut(float64_inside: None) -> None:
    """A state that restarted would score the response as if the first segments had not been."""
    model, what = build("qwen3_5", layer_types=["linear_attention"] * 3), group(num_prompt=50)
    scores = []
    for prompt in (what.prompt, what.prompt[40:]):
        engine = longstraw.Engine(model, segment_tokens=10)
        with engine.capture(prompt) as state:
            scores.append(engine.score(state, what.responses)[1])
    with torch.no_grad():
        expected = reference.response_logps(model, what.prompt, what.responses[1])
    torch.testing.assert_close(scores[0], expected, rtol=EXACT, atol=EXACT)
    assert (scores[0] - scores[1]).abs().max() > 1e-4


def test_vision_parameters_are_untouched() -> None:
    model, what = build("qwen3_5_image", dtype=torch.float32), group()
    _, found = engine_step(model, what, segment_tokens=20)
    assert found and not any("visual" in name for name in found)


def test_experts_that_a_piece_does_not_choose(float64_inside: None) -> None:
    """Cut to single tokens, every piece leaves most experts without a gradient of their own."""
    model: Any = build("qwen3_next", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    what = group(num_prompt=12, lengths=(4,))
    _, _, expected = reference.step(model, what.prompt, what.responses, what.objective)
    assert any("experts" in name for name in expected)
    reference.assert_same_gradients(engine_step(model, what, segment_tokens=1, block_tokens=1)[1], expected, EXACT)
