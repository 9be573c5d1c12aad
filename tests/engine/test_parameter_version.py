"""Whatever writes to parameters between two calls is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import build
from group import group
from peft import LoraConfig, get_peft_model

import longstraw

WHAT = group(num_prompt=20, lengths=(3,))


def weight(model: Any) -> torch.nn.Parameter:
    return model.model.layers[1].mlp.up_proj.weight


def updated(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[Any], None]:
    def step(model: Any) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        make(model.parameters(), lr=0.1, **options).step()
        model.zero_grad(set_to_none=True)

    return step


def flat_write(model: Any) -> None:
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(flat * 1.01, model.parameters())


def replaced(model: Any) -> None:
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.detach() * 2)


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda m: torch.no_grad()(weight(m).add_)(1e-3),
    "through data": lambda m: weight(m).data.add_(1e-3),
    "through NumPy": lambda m: weight(m).detach().numpy().__iadd__(1e-3),
    "data replaced": lambda m: setattr(weight(m), "data", weight(m).data * 1.01),
    "set_": lambda m: torch.no_grad()(weight(m).set_)(weight(m).detach() * 1.01),
    "replaced": replaced,
    "foreach": updated(torch.optim.AdamW, foreach=True),
    "one by one": updated(torch.optim.AdamW, foreach=False),
    "fused": updated(torch.optim.AdamW, fused=True),
    "state dict": lambda m: m.load_state_dict({k: v * 1.01 for k, v in m.state_dict().items()}),
    "state dict assigned": lambda m: m.load_state_dict({k: v * 1.01 for k, v in m.state_dict().items()}, assign=True),
    "as one vector": flat_write,
    "frozen": lambda m: weight(m).requires_grad_(False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_makes_states_stale_and_forbids_the_pullback(write: str, dtype: torch.dtype) -> None:
    if write == "through NumPy" and dtype == torch.bfloat16:
        pytest.skip("NumPy has no bfloat16")
    model = build("llama", dtype=dtype)
    engine = longstraw.Engine(model)
    with engine.capture(WHAT.prompt) as state:
        scored = engine.score_for(state, WHAT.responses)
        assert not engine.is_stale(state)
        WRITES[write](model)
        assert engine.is_stale(state)
        with pytest.raises(ValueError, match="parameters have changed since the responses were scored"):
            engine.pull_back(scored, [torch.ones(3)])


def test_a_buffer_that_routes_tokens_counts() -> None:
    model = build("glm4_moe_lite", dtype=torch.float32)
    engine = longstraw.Engine(model)
    with engine.capture(WHAT.prompt) as state:
        name, bias = next((n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))
        bias.data.add_(0.1)
        assert engine.is_stale(state), name


def test_a_write_to_one_element_is_reported() -> None:
    model = build("llama", dtype=torch.float32)
    engine = longstraw.Engine(model)
    with engine.capture(WHAT.prompt) as state:
        weight(model).data[3, 5] += 1.0  # in nobody's sample
        assert not engine.is_stale(state)
        engine.parameters_changed()
        assert engine.is_stale(state)


ADAPTERS: dict[str, Callable[[Any], Any]] = {
    "switched": lambda m: m.set_adapter("second"),
    "both": lambda m: m.base_model.set_adapter(["default", "second"]),
    "merged": lambda m: m.merge_adapter(),
    "weighted": lambda m: [x.scaling.update(default=7.0) for x in m.modules() if hasattr(x, "lora_A")],
    "scaled": lambda m: [x.scale_layer(2.0) for x in m.modules() if hasattr(x, "lora_A")],
    "off": lambda m: m.base_model.disable_adapter_layers(),
    "removed": lambda m: m.delete_adapter("second"),
}


@pytest.mark.parametrize("change", ADAPTERS)
def test_adapters(change: str) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(build("llama", dtype=torch.float32), config)
    model.add_adapter("second", config)
    engine = longstraw.Engine(model)
    with engine.capture(WHAT.prompt) as state:
        assert not engine.is_stale(state)
        ADAPTERS[change](model)
        assert engine.is_stale(state)


def test_calls_of_the_engine_change_nothing() -> None:
    for family in ("llama", "qwen3_5_moe", "glm_moe_dsa"):
        model = build(family, dtype=torch.float32)
        engine = longstraw.Engine(model, segment_tokens=9, recompute_layers=True)
        with engine.capture(WHAT.prompt) as state:
            engine.backward(state, WHAT.responses, WHAT.objective)
            engine.sample(state, num=2, max_new_tokens=3)
            assert not engine.is_stale(state), family
