"""Rotary frequencies are those of the config, in float32, whatever was done to the model."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, build

import longstraw
from longstraw.models.rotary import repair

YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=1024)


def tables(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in model.named_buffers() if name.endswith("inv_freq")}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == torch.float32 and torch.equal(found[name], expected[name]) for name in expected
    )


def gemma(**changes: Any) -> Any:
    """Two RoPE bases, one a layer type."""
    config = transformers.Gemma3TextConfig(
        vocab_size=67, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, layer_types=["sliding_attention", "full_attention"], **changes,
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config).eval()


@pytest.mark.parametrize("cast", [torch.nn.Module.bfloat16, torch.nn.Module.half])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_cast_model_gets_its_table_back(name: str, cast: Any) -> None:
    model = build(name, dtype=torch.float32)
    expected = tables(model)
    cast(model)
    assert not same(tables(model), expected), "the cast is what this is about"
    with pytest.warns(UserWarning, match=r"rotary frequencies in .*rotary_emb were rounded.*from_pretrained"):
        assert repair(model)
    assert same(tables(model), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert repair(model) == [], "said once"


def test_rounding_is_seen_after_a_cast_back() -> None:
    model = build("llama", dtype=torch.float32)
    expected = tables(model)
    model.bfloat16().float()
    with pytest.warns(UserWarning, match="rounded"):
        repair(model)
    assert same(tables(model), expected)


def test_a_table_for_each_layer_type() -> None:
    model = gemma()
    expected = tables(model)
    assert len(expected) == 4
    model.bfloat16()
    with pytest.warns(UserWarning, match="rounded"):
        assert repair(model.model) == ["rotary_emb"]
    assert same(tables(model), expected)


def test_an_override_in_the_config_is_honoured() -> None:
    model = build("llama", dtype=torch.float32, rope_parameters=YARN)
    expected, scaling = tables(model), model.model.rotary_emb.attention_scaling
    plain = tables(build("llama", dtype=torch.float32))
    assert not same(expected, plain) and scaling != 1
    assert repair(model) == []
    model.bfloat16()
    with pytest.warns(UserWarning, match="rounded"):
        repair(model)
    assert same(tables(model), expected) and model.model.rotary_emb.attention_scaling == scaling


def test_a_config_that_changed_after_the_model_was_built() -> None:
    """The limit of positions follows the config: so does the table."""
    model = build("llama", dtype=torch.float32)
    overridden = build("llama", dtype=torch.float32, rope_parameters=YARN)
    model.config.rope_parameters = dict(YARN)
    with pytest.warns(UserWarning, match="not those of its config"):
        repair(model)
    assert same(tables(model), tables(overridden))
    rotary = model.model.rotary_emb
    assert rotary.attention_scaling == overridden.model.rotary_emb.attention_scaling and rotary.rope_type == "yarn"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_tables_stay_as_they_are(dtype: torch.dtype) -> None:
    for model in (build("llama", dtype=dtype), gemma().to(dtype), build("deepseek_v3", dtype=dtype)):
        before = {name: (t.data_ptr(), t.dtype) for name, t in model.named_buffers()}
        assert repair(model) == []
        assert {name: (t.data_ptr(), t.dtype) for name, t in model.named_buffers()} == before


def test_bfloat16_as_the_default_dtype() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = transformers.LlamaForCausalLM(build("llama").config)
        repair(model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(tables(model), tables(build("llama", dtype=torch.float32))) and model.dtype == torch.bfloat16


def test_a_table_that_nothing_says_how_to_compute() -> None:
    class Odd(torch.nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.register_buffer("inv_freq", torch.rand(size), persistent=False)

    model = build("llama", dtype=torch.float32)
    model.model.rotary_emb.odd = Odd(4)
    assert repair(model) == []
    model.model.rotary_emb.odd.bfloat16()
    with pytest.raises(ValueError, match=r"rotary_emb\.odd\.inv_freq are in bfloat16.*Odd cannot.*from_pretrained"):
        repair(model)


def test_meta_tensors_are_left_alone() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(build("llama").config).bfloat16()
    assert repair(model) == []


def test_the_engine_repairs_the_model_itself() -> None:
    """Sampling by the stock model, and the model loaded again, are the function that was trained."""
    narrow = build("llama", dtype=torch.bfloat16, rope_parameters=dict(rope_type="default", rope_theta=100.0))
    right = copy.deepcopy(narrow)
    right.model.rotary_emb = type(right.model.rotary_emb)(right.config)
    ids = torch.arange(3000)[None] % 67
    with torch.no_grad():
        expected, rounded = right(ids).logits[0, -1], narrow(ids).logits[0, -1]
    assert not torch.equal(rounded, expected)
    with pytest.warns(UserWarning, match="rounded"):
        engine = longstraw.Engine(narrow)
    with torch.no_grad():
        assert torch.equal(narrow(ids).logits[0, -1], expected)
    with engine.capture(ids[0, :-1]) as state:
        (found,) = engine.score(state, [ids[0, -1:]])
    with longstraw.Engine(right).capture(ids[0, :-1]) as state:
        assert torch.equal(found, longstraw.Engine(right).score(state, [ids[0, -1:]])[0])
