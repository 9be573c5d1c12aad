"""A bound on a tier moves pages to the next one down and changes no bit of the gradient."""

import errno
import os

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import longstraw


@pytest.fixture
def model():
    torch.manual_seed(0)
    shape = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **shape)).eval()


def _gradients(model, **options):
    model.zero_grad(set_to_none=True)
    engine = longstraw.Engine(model, segment_tokens=12, **options)
    with engine.capture(range(90)) as state:
        engine.backward(state, [torch.arange(5), torch.arange(9)], lambda logps: logps[0].sum() + logps[1].mean())
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [
        {"tier_bytes": {"device": 10_000, "host": 10_000}},
        {"tier": "host", "tier_bytes": {"host": 0}},
        {"tier_bytes": {"device": 0, "host": 1 << 20}},
    ],
    ids=str,
)
def test_same_bits(model, options):
    expected = _gradients(model)
    for name, gradient in _gradients(model, **options).items():
        assert torch.equal(gradient, expected[name]), name


def test_pages_rest_on_the_next_tier_down(model):
    with longstraw.Engine(model, segment_tokens=12, tier_bytes={"device": 10_000, "host": 10_000}).capture(
        range(90)
    ) as state:
        by_tier = state.nbytes["kv"]
        assert set(by_tier) == {"device", "host", "disk"}
        assert by_tier["device"] <= 10_000 and by_tier["host"] <= 10_000


def test_no_room_on_any_tier_is_an_error_and_leaves_gradients_alone(model):
    with pytest.raises(MemoryError, match="tier_bytes"):
        longstraw.Engine(model, tier_bytes=dict.fromkeys(("device", "host", "disk"), 10)).capture(range(90))
    before = torch.ones_like(model.lm_head.weight)
    model.lm_head.weight.grad = before.clone()
    pages = sum(longstraw.Engine(model).capture(range(90)).nbytes["kv"].values())
    engine = longstraw.Engine(model, tier="disk", tier_bytes={"disk": pages})  # none left for their cotangents
    with engine.capture(range(90)) as state, pytest.raises(MemoryError, match="tier_bytes"):
        engine.backward(state, [torch.arange(5)], lambda logps: logps[0].sum())
    assert torch.equal(model.lm_head.weight.grad, before)
    assert model.model.embed_tokens.weight.grad is None


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
@pytest.mark.parametrize("after", [0, 3, 20])
def test_a_disk_that_fills_up_in_a_step_leaves_gradients_alone(model, tmp_path, monkeypatch, call, after):
    """Wherever it strikes, while responses' pages or cotangents are written; with room again the step is as ever."""
    expected = _gradients(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    engine = longstraw.Engine(model, segment_tokens=12, block_tokens=4, tier="disk", page_dir=tmp_path)
    responses = [torch.arange(5), torch.arange(9)]

    def objective(logps):
        return logps[0].sum() + logps[1].mean()

    with engine.capture(range(90)) as state:
        real, calls = getattr(os, call), []

        def filling_up(*args):
            calls.append(args)
            if len(calls) > after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, filling_up)
            with pytest.raises(OSError, match=r"[\d,]+ bytes of pages.*page_dir") as caught:
                engine.backward(state, responses, objective)
        assert caught.value.errno == errno.ENOSPC and str(tmp_path) in str(caught.value)
        assert all(bool((p.grad == 1).all()) for p in model.parameters())
        assert "cotangent" not in state.nbytes
        model.zero_grad(set_to_none=True)
        engine.backward(state, responses, objective)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bounds", [{"gpu": 1}, {"device": -1}, {"device": 1.5}])
def test_bad_bounds_name_the_option(model, bounds):
    with pytest.raises(ValueError, match="tier_bytes"):
        longstraw.Engine(model, tier_bytes=bounds)
