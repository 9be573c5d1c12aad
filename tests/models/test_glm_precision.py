"""Latent attention in the dtypes that models are trained in."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from families import build
from group import engine_step, group
from latent_cases import MODELS, Choices, with_lora

import longstraw
from longstraw.models import mla

pytestmark = pytest.mark.filterwarnings("ignore:.*get no gradient")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputation_chooses_and_routes_as_the_first_pass_did(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece runs twice, at capture or scoring and in its pullback: same tokens, same experts, same bits."""
    model, what = build("glm_moe_dsa", dtype=dtype), group(num_prompt=75, lengths=(20, 5))
    seen: list[tuple[str, tuple[torch.Tensor, ...]]] = []
    choices = Choices(monkeypatch)
    for name, module in model.named_modules():
        if name.endswith(".gate"):

            def record(module: Any, inputs: Any, output: Any, name: str = name) -> None:
                seen.append((name, tuple(x.detach().clone() for x in output)))

            module.register_forward_hook(record)
    engine = longstraw.Engine(model, segment_tokens=17, block_tokens=8)
    choices.calls.clear(), seen.clear()
    passes = []
    with engine.capture(what.prompt) as state:
        passes.append((list(choices.calls), list(seen)))
        choices.calls.clear(), seen.clear()
        logps = engine.score(state, what.responses)
        passes.append((list(choices.calls), list(seen)))
        choices.calls.clear(), seen.clear()
        outcome = engine.backward(state, what.responses, what.objective)
    assert all(torch.equal(a, b) for a, b in zip(logps, outcome.logps))

    def chosen(calls: Any) -> set[Any]:
        return {(start, found.shape, tuple(found.flatten().tolist())) for start, *_, found in calls}

    def routed(calls: Any) -> set[Any]:
        return {(name, *(tuple(x.flatten().tolist()) for x in output)) for name, output in calls}

    for calls, routes in passes:
        assert len(calls) > 5 and len(routes) > 5
        assert chosen(calls) <= chosen(choices.calls)
        assert routed(routes) <= routed(seen)
    assert chosen(choices.calls) == chosen(passes[0][0] + passes[1][0]), "the pullback chose nothing else"


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_stock_model_agrees_in_float32(family: str, implementation: str) -> None:
    """A prompt of 300 tokens, 33 times the choice."""
    model, what = build(family, dtype=torch.float32), group(num_prompt=300, lengths=(12,))
    model.set_attn_implementation(implementation)
    expected = reference.response_logps(model, what.prompt, what.responses[0])
    with longstraw.Engine(model, segment_tokens=64).capture(what.prompt) as state:
        found = longstraw.Engine(model, segment_tokens=64).score(state, what.responses)[0]
    torch.testing.assert_close(found, expected.float().detach(), rtol=2e-5, atol=2e-5)


def test_a_small_adapter_survives_bfloat16_weights() -> None:
    """Added to bfloat16 weights it would round away: the expansion adds it in float32."""
    model = with_lora(build("deepseek_v3", dtype=torch.bfloat16), ["kv_b_proj"], torch.bfloat16)
    attention = model.get_base_model().model.layers[0].self_attn
    linear = attention.kv_b_proj
    with torch.no_grad():
        linear.lora_A["default"].float()
        linear.lora_B["default"].float().weight.mul_(1e-4)
        a, b = (x["default"].weight.float() for x in (linear.lora_A, linear.lora_B))
        w_k, w_v = mla._expansion(attention, torch.bfloat16)
        base = linear.base_layer.weight.float()
    assert w_k.dtype == torch.float32
    found = torch.cat([w_k, w_v], 1).flatten(0, 1) - base
    torch.testing.assert_close(found, 2 * b @ a, rtol=0.02, atol=1e-6)
    assert (base.bfloat16() + (2 * b @ a).bfloat16() == base).float().mean() > 0.9, "it is small"


@pytest.mark.parametrize("family", MODELS)
def test_bfloat16_errs_no_more_than_stock_training(family: str) -> None:
    """Against float32 on the same weights, where rounding flips neither an expert nor a choice: there are none."""
    options: dict[str, Any] = {"first_k_dense_replace": 9} | ({} if family == "deepseek_v3" else {"index_topk": 1000})
    errors: dict[str, list[float]] = {"stock": [], "ours": []}
    for seed in range(3):
        what = group(num_prompt=75, lengths=(9, 20, 6), seed=seed)
        model = build(family, seed=seed, dtype=torch.bfloat16, **options)
        wide = build(family, seed=seed, dtype=torch.bfloat16, **options).float()
        expected = reference.step(wide, what.prompt, what.responses, what.objective)[2]
        stock = reference.step(model, what.prompt, what.responses, what.objective)[2]
        found = engine_step(model, what, segment_tokens=17, block_tokens=8)[1]
        errors["stock"].append(reference.relative_error(stock, expected))
        errors["ours"].append(reference.relative_error(found, expected))
    assert sum(errors["ours"]) <= 1.2 * sum(errors["stock"]), errors


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v3"])
def test_adapters_on_four_bit_weights(family: str) -> None:
    quantized = pytest.importorskip("bitsandbytes").nn
    sizes = dict(
        hidden_size=64, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16
    )
    model = build(family, dtype=torch.float32, **sizes)
    for layer in model.model.layers:
        for name in ("kv_b_proj", "o_proj"):
            weight = getattr(layer.self_attn, name).weight.data
            linear = quantized.Linear4bit(*weight.shape[::-1], bias=False, compute_dtype=torch.float32)
            linear.weight = quantized.Params4bit(weight, requires_grad=False, quant_type="nf4")
            linear = linear.to("cpu")
            linear.support_avx512bf16_for_cpu = False  # its kernel for inference has no backward
            setattr(layer.self_attn, name, linear)
    model, what = with_lora(model, ["kv_b_proj", "o_proj", "kv_a_proj_with_mqa"], torch.float32), group()
    _, _, expected = reference.step(model, what.prompt, what.responses, what.objective)
    _, found = engine_step(model, what, segment_tokens=17, block_tokens=8)
    assert any("kv_b_proj.lora" in name for name in expected)
    reference.assert_same_gradients(found, expected, 5e-5)
