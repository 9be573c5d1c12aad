"""The gradient equals conventional autograd through stock transformers: families, modes, adapters."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from families import DENSE_AND_HYBRID, build
from group import Group, engine_step, group
from peft import LoraConfig, get_peft_model

import longstraw

MODES = ["full", "none", 20]
EXACT = 1e-11
pytestmark = pytest.mark.usefixtures("float64_inside")


def assert_exact(model: Any, what: Group, prompt_grad: Any = "full", tolerance: float = EXACT, **options: Any) -> None:
    loss, logps, expected = reference.step(model, what.prompt, what.responses, what.objective, prompt_grad)
    options = {"segment_tokens": 17, "block_tokens": 8} | options
    outcome, found = engine_step(model, what, prompt_grad=prompt_grad, **options)
    torch.testing.assert_close(outcome.loss, loss, rtol=tolerance, atol=tolerance, check_dtype=False)
    assert len(outcome.logps) == len(logps)
    for ours, theirs in zip(outcome.logps, logps):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, check_dtype=False)
    reference.assert_same_gradients(found, expected, tolerance, f"prompt_grad={prompt_grad!r}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", DENSE_AND_HYBRID)
def test_family(family: str, mode: Any) -> None:
    """75 prompt tokens in pieces of 17 (windows are 11 or 13), one response of two blocks, two that share a block."""
    assert_exact(build(family), group(), mode)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("mode", [1, 2, 74, 75, 76, 10_000])
def test_prompt_grad_counts_tokens_of_the_prompt(family: str, mode: int) -> None:
    """1 leaves the branch's own token only, and so is "none"; the prompt's length or more is "full"."""
    what = group()
    model = build(family)
    assert_exact(model, what, mode)
    same = {1: "none", 75: "full", 76: "full", 10_000: "full"}.get(mode)
    if same is not None:
        pieces = dict(segment_tokens=17, block_tokens=8)
        found, named = (engine_step(model, what, prompt_grad=m, **pieces)[1] for m in (mode, same))
        reference.assert_same_gradients(found, named, 1e-14)


def test_modes_differ() -> None:
    """Otherwise the comparisons above could not tell one mode from another."""
    what, model = group(), build("llama")
    steps = {mode: reference.step(model, what.prompt, what.responses, what.objective, mode)[2] for mode in MODES}
    assert reference.relative_error(steps["none"], steps["full"]) > 1e-2
    assert reference.relative_error(steps[20], steps["full"]) > 1e-3
    assert reference.relative_error(steps[20], steps["none"]) > 1e-3


def lora(model: Any, targets: Any, seed: int = 3, zero_b: bool = False, **options: Any) -> Any:
    torch.manual_seed(seed)
    dtype = model.dtype
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, **{"lora_dropout": 0.0, **options})
    model = get_peft_model(model, config).to(dtype)
    if not zero_b:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


ADAPTERS = {
    "all-linear": ("all-linear", {}),
    "keys and values": (["k_proj", "v_proj"], {}),
    "values": (["v_proj"], {}),
    "head": (["lm_head"], {}),
    "late layers": (["q_proj", "k_proj", "v_proj", "down_proj"], {"layers_to_transform": [2]}),
    "middle layer": (["k_proj"], {"layers_to_transform": [1]}),
    "head trained whole": (["q_proj"], {"modules_to_save": ["lm_head", "embed_tokens"]}),
}


@pytest.mark.parametrize("mode", ["full", 20])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_lora_on_attention(adapter: str, mode: Any) -> None:
    targets, options = ADAPTERS[adapter]
    assert_exact(lora(build("llama"), targets, **options), group(), mode)


@pytest.mark.parametrize("family", ["mistral", "qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("mode", ["full", 20])
def test_lora_on_other_layer_kinds(family: str, mode: Any) -> None:
    assert_exact(lora(build(family), "all-linear"), group(), mode)


@pytest.mark.parametrize("family", ["qwen3_5", "mistral"])
def test_lora_in_a_late_layer_of_other_kinds(family: str) -> None:
    """The states of earlier layers depend on no trainable parameter."""
    model = lora(build(family), ["up_proj", "v_proj", "out_proj"], layers_to_transform=[1, 2])
    assert_exact(model, group())


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_first_step_of_lora_has_a_gradient(family: str) -> None:
    """B is zero at birth: all of the gradient is B's, in every layer, K/V projections included."""
    targets = ["k_proj", "v_proj"] if family == "llama" else "all-linear"
    model = lora(build(family), targets, zero_b=True)
    what = group()
    assert_exact(model, what)
    _, found = engine_step(model, what, segment_tokens=17, block_tokens=8)
    for name, gradient in found.items():
        if "lora_B" in name:
            assert gradient.norm() > 0, name
        if "lora_A" in name:
            assert gradient.norm() == 0, name
    assert any("lora_B" in name for name in found)


def test_frozen_parameters_get_no_gradient() -> None:
    model = build("qwen2")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1." in name)
    what = group()
    assert_exact(model, what)
    _, found = engine_step(model, what)
    assert found and all("layers.1." in name for name in found)


def test_only_the_embedding_is_trained() -> None:
    model = build("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed_tokens" in name)
    assert_exact(model, group())


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_tied_embeddings_collect_from_both_ends(family: str) -> None:
    model = build(family, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_exact(model, group())


def test_one_head_size_for_all_and_attention_bias() -> None:
    assert_exact(build("llama", num_key_value_heads=4, attention_bias=True), group())
    assert_exact(build("llama", num_key_value_heads=1), group())


@pytest.mark.parametrize("rope_type", ["yarn", "linear", "llama3"])
def test_fixed_rope_overrides(rope_type: str) -> None:
    """The response ends beyond the original range, which the override stretches."""
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    if rope_type == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert_exact(build("llama", rope_parameters=rope, max_position_embeddings=256), group())


def test_gradient_checkpointing_in_training_mode_keeps_the_cache() -> None:
    """Stock layers drop the cache then, which would forget the prompt."""
    what = group()
    expected = reference.step(build("llama"), what.prompt, what.responses, what.objective)[2]
    for family_model in (build("llama"), lora(build("llama"), "all-linear")):
        family_model.train()
        family_model.gradient_checkpointing_enable()
        assert_exact(family_model, what)
        assert family_model.training and family_model.is_gradient_checkpointing
    model = build("llama").train()
    model.gradient_checkpointing_enable()
    reference.assert_same_gradients(engine_step(model, what, segment_tokens=17)[1], expected, EXACT)


def test_second_backward_on_one_state_accumulates() -> None:
    what, model = group(), build("qwen3_5")
    engine = longstraw.Engine(model, segment_tokens=17, block_tokens=8)
    with engine.capture(what.prompt) as state:
        engine.backward(state, what.responses, what.objective)
        once = reference.gradients(model)
        engine.backward(state, what.responses, what.objective)
        twice = reference.gradients(model)
    reference.assert_same_gradients(twice, {name: 2 * g for name, g in once.items()}, 1e-6)
