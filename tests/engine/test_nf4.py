"""Four-bit weights: gradients get through them in evaluation mode on any CPU, and the layers are left as found."""

import pytest
import torch
from families import build

import longstraw

bitsandbytes = pytest.importorskip("bitsandbytes")


def _quantized(model: torch.nn.Module) -> torch.nn.Module:
    for layer in model.model.layers:  # type: ignore[union-attr]
        for name in ("gate_proj", "up_proj", "down_proj"):
            dense = getattr(layer.mlp, name)
            four_bit = bitsandbytes.nn.Linear4bit(
                dense.in_features, dense.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
            )
            four_bit.weight = bitsandbytes.nn.Params4bit(dense.weight.detach(), requires_grad=False, quant_type="nf4")
            setattr(layer.mlp, name, four_bit.to("cpu"))
    return model


def test_gradients_reach_below_four_bit_layers() -> None:
    model = _quantized(build("llama", dtype=torch.float32)).eval()
    layers = [m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    flags = [m.support_avx512bf16_for_cpu for m in layers]
    prompt, response = torch.arange(40), torch.arange(7)
    engine = longstraw.Engine(model, segment_tokens=16)
    with engine.capture(prompt) as state:
        engine.backward(state, [response], lambda logps: logps[0].sum())
    assert [m.support_avx512bf16_for_cpu for m in layers] == flags
    found = model.model.embed_tokens.weight.grad.clone()

    model.zero_grad()
    ids = torch.cat([prompt, response])[None]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False
    logits = model(input_ids=ids[:, :-1]).logits[0, len(prompt) - 1 :]
    logits.log_softmax(-1).gather(-1, response[:, None]).sum().backward()
    torch.testing.assert_close(found, model.model.embed_tokens.weight.grad, rtol=1e-4, atol=1e-5)
