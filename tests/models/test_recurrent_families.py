"""Every family with a recurrence: adapters, narrow floats, tiers, and a state that branches leave as it is."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from families import RECURRENT, build
from group import engine_step, group
from peft import LoraConfig, get_peft_model

import longstraw

EXACT = 1e-11
EXPERTS = ("granitemoehybrid", "nemotron_h", "kimi_linear", "lfm2_moe", "qwen3_next")  # their choices flip by rounding
PIECES = dict(segment_tokens=20, block_tokens=4)


def lora(model: Any, targets: list[str]) -> Any:
    torch.manual_seed(3)
    dtype = model.dtype
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=0.0)).to(dtype)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


@pytest.mark.parametrize("family", RECURRENT)
def test_adapters_on_every_projection(family: str, float64_inside: None) -> None:
    model = build(family)
    linear = {n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)} - {"lm_head"}
    if family in ("nemotron_h", "falcon_h1"):  # peft refuses it there, for the sake of fused kernels
        linear -= {"out_proj"}
    adapted, what = lora(model, sorted(linear)), group()
    _, _, expected = reference.step(adapted, what.prompt, what.responses, what.objective)
    _, found = engine_step(adapted, what, **PIECES)
    assert all(gradient.norm() > 0 for gradient in expected.values())
    reference.assert_same_gradients(found, expected, EXACT)


@pytest.mark.parametrize("family", [family for family in RECURRENT if family not in EXPERTS])
def test_bfloat16_is_no_worse_than_stock(family: str) -> None:
    what = group(num_prompt=80, lengths=(20, 30, 12))
    model = build(family, dtype=torch.float32, initializer_range=0.06)
    narrow = build(family, dtype=torch.bfloat16, initializer_range=0.06)
    with torch.no_grad():  # the same function: the float32 model holds the rounded weights
        for wide, parameter in zip(model.parameters(), narrow.parameters(), strict=True):
            wide.copy_(parameter)
    _, _, truth = reference.step(model, what.prompt, what.responses, what.objective)
    _, _, stock = reference.step(narrow, what.prompt, what.responses, what.objective)
    _, found = engine_step(narrow, what, segment_tokens=24, block_tokens=16)
    ours, theirs = (reference.relative_error(side, truth) for side in (found, stock))
    assert 0 < ours <= 1.5 * theirs, f"relative L2 {ours:.1e}, stock {theirs:.1e}"


@pytest.mark.parametrize("family", [family for family in RECURRENT if family not in EXPERTS])
def test_autocast_is_no_worse_than_stock(family: str) -> None:
    what = group(num_prompt=80, lengths=(20, 30, 12))
    model = build(family, dtype=torch.float32, initializer_range=0.06)
    _, _, truth = reference.step(model, what.prompt, what.responses, what.objective)
    with torch.autocast("cpu", torch.bfloat16):
        _, _, stock = reference.step(model, what.prompt, what.responses, what.objective)
        _, found = engine_step(model, what, segment_tokens=24, block_tokens=16)
    ours, theirs = (reference.relative_error(side, truth) for side in (found, stock))
    assert 0 < ours <= 1.5 * theirs, f"relative L2 {ours:.1e}, stock {theirs:.1e}"


@pytest.mark.parametrize("family", RECURRENT)
def test_branches_leave_the_prompt_as_it_is(family: str) -> None:
    model, what = build(family, dtype=torch.float32), group()
    engine = longstraw.Engine(model, segment_tokens=20)
    with engine.capture(what.prompt) as state:

        def resident() -> list[torch.Tensor]:
            last = state.chain.num_pieces - 1
            return [tensor.clone() for layer in state.chain.layers for tensor in layer.stored(last)]

        before = resident()
        engine.score(state, what.responses)
        engine.sample(state, num=2, max_new_tokens=3)
        engine.backward(state, what.responses, what.objective)
        assert all(torch.equal(one, other) for one, other in zip(before, resident(), strict=True))


@pytest.mark.parametrize("family", RECURRENT)
def test_same_bits_from_every_tier_and_with_layers_computed_twice_or_graphs_kept(family: str) -> None:
    model, what = build(family, dtype=torch.float32), group()
    _, expected = engine_step(model, what, **PIECES)
    for options in (
        dict(tier="disk"),
        dict(tier="host"),
        dict(recompute_layers=True),
        dict(retain_graph_bytes=1 << 30),
    ):
        _, found = engine_step(model, what, **PIECES, **options)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found), options


@pytest.mark.parametrize("family", RECURRENT)
def test_states_have_one_shape_from_the_first_piece_on(family: str) -> None:
    model, what = build(family, dtype=torch.float32), group()
    with longstraw.Engine(model, segment_tokens=1).capture(what.prompt[:9]) as state:
        for layer in state.chain.carried:
            assert len({tuple(t.shape for t in layer.stored(index)) for index in range(state.chain.num_pieces)}) == 1
