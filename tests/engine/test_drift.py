"""The probe is zero right after capture and grows with the parameters' distance."""

import pytest
import torch
from families import build

import longstraw


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_5"])
@pytest.mark.parametrize("mode", ["full", "none"])
def test_probe(family, mode):
    model = build(family, dtype=torch.float32)
    engine = longstraw.Engine(model, mode, segment_tokens=12)
    with engine.capture(range(60)) as state:
        assert not engine.is_stale(state)
        assert engine.drift(state, num_segments=3) < 1e-6
        before = state.nbytes
        seen = []
        for _ in range(3):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    noise = torch.Generator().manual_seed(len(name))
                    parameter.add_(0.02 * parameter.std() * torch.randn(parameter.shape, generator=noise))
            seen.append(engine.drift(state, num_segments=3))
        assert engine.is_stale(state)
        assert 0 < seen[0] < seen[1] < seen[2]
        assert engine.drift(state, seed=1) == engine.drift(state, seed=1)
        assert state.nbytes == before


def test_one_token_prompt_has_no_state_to_drift():
    engine = longstraw.Engine(build("llama", dtype=torch.float32))
    with engine.capture([3]) as state:
        assert engine.drift(state) == 0.0


def test_replaced_and_frozen_parameters_make_a_state_stale():
    model = build("llama", dtype=torch.float32)
    engine = longstraw.Engine(model)
    for change in (
        lambda weight: setattr(weight, "data", weight.detach().clone() * 2),
        lambda weight: weight.requires_grad_(False),
    ):
        with engine.capture(range(9)) as state:
            assert not engine.is_stale(state)
            change(model.lm_head.weight)
            assert engine.is_stale(state)


def test_another_adapter_makes_a_state_stale():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj"])
    model = get_peft_model(build("llama", dtype=torch.float32), config)
    model.add_adapter("other", config)
    engine = longstraw.Engine(model.eval())
    with engine.capture(range(9)) as state:
        model.set_adapter("other")
        assert engine.is_stale(state)
        model.set_adapter("default")
        assert not engine.is_stale(state)
