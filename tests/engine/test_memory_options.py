"""Options that trade memory for time leave every gradient bit as it is."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

import longstraw
from longstraw.engine.kept import saved_bytes

SHAPE = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1)


def _llama():
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **SHAPE))


def _hybrid():
    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            num_hidden_layers=4,
            head_dim=16,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            **SHAPE,
        )
    )


def _step(model, **options):
    generator = torch.Generator().manual_seed(3)
    prompt, *responses = (torch.randint(0, 97, (n,), generator=generator) for n in (90, 1, 9, 20, 4))
    model.zero_grad(set_to_none=True)
    engine = longstraw.Engine(model, segment_tokens=12, block_tokens=10, **options)
    state = engine.capture(prompt)
    before = state.nbytes
    outcome = engine.backward(state, responses, lambda logps: sum((i + 1) * lp.sum() for i, lp in enumerate(logps)))
    assert state.nbytes == before, "the step left pages behind, or took some"
    state.release()
    return outcome, state, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("make", [_llama, _hybrid])
@pytest.mark.parametrize(
    "options",
    [
        {"recompute_layers": True},
        {"retain_graph_bytes": 1 << 40},
        {"retain_graph_bytes": 400_000},
        {"boundary_bytes": 0},
        {"boundary_bytes": 0, "retain_graph_bytes": 1 << 40, "recompute_layers": True, "tier": "disk"},
    ],
    ids=str,
)
def test_same_bits(make, options):
    torch.manual_seed(0)
    model = make().eval()
    outcome, _, expected = _step(model)
    again, _, found = _step(model, **options)
    assert torch.equal(outcome.loss, again.loss)
    for name in expected:
        assert torch.equal(expected[name], found[name]), name


def test_small_checkpoint_budget_keeps_fewer_states():
    torch.manual_seed(0)
    model = _hybrid().eval()
    _, state, _ = _step(model)
    assert state.boundary_stride == 1
    prompt = torch.arange(90)
    full = longstraw.Engine(model, segment_tokens=6).capture(prompt)
    with pytest.warns(UserWarning, match="boundary_bytes=0 .*at the least"):
        thin = longstraw.Engine(model, segment_tokens=6, boundary_bytes=0).capture(prompt)
    assert thin.boundary_stride == 3  # 15 segments: 15/3 kept and 3 restored are as few as can be
    kept = [s.nbytes["recurrent"]["device"] for s in (full, thin)]
    assert kept[1] < kept[0] / 2
    assert thin.chain.nearest_start(7) == 6


def test_kept_graphs_are_counted_and_dropped_once_parameters_change():
    torch.manual_seed(0)
    model = _llama().eval()
    engine = longstraw.Engine(model, segment_tokens=12, retain_graph_bytes=1 << 40)
    state = engine.capture(torch.arange(60))
    assert len(state.kept) == 5
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    engine.backward(state, [torch.arange(5)], lambda logps: logps[0].sum())
    assert not len(state.kept)


def test_one_piece_holds_less_with_checkpointed_layers():
    torch.manual_seed(0)
    model = _llama().eval()
    held = []
    for recompute_layers in (False, True):
        engine = longstraw.Engine(model, recompute_layers=recompute_layers, prompt_grad="none")
        state = engine.capture(torch.arange(3))
        with saved_bytes(list(model.parameters())) as saved:
            engine.backward(state, [torch.arange(90)], lambda logps: logps[0].sum())
        held.append(saved.nbytes)
    assert held[1] < held[0]


@pytest.mark.parametrize("option", ["retain_graph_bytes", "boundary_bytes"])
def test_negative_budget_names_the_option(option):
    with pytest.raises(ValueError, match=option):
        longstraw.Engine(_llama(), **{option: -1})
