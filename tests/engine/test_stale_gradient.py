"""What the gradient of a stale state is: stored values, and the present parameters' way through each segment."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from families import build
from group import Group, group
from transformers import DynamicCache

import longstraw

SEGMENT = 9


def moved(model: Any, by: float) -> None:
    """An update of every parameter, the same at every call."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.Generator().manual_seed(len(name))
            parameter.add_(by * parameter.std() * torch.randn(parameter.shape, generator=noise, dtype=parameter.dtype))


def stored_states(model: Any, prompt: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    with torch.no_grad():
        cache = model(input_ids=prompt[None, :-1], use_cache=True).past_key_values
    return [(layer.keys, layer.values) for layer in cache.layers]


def stale_step(
    model: Any, what: Group, stored: list[tuple[torch.Tensor, torch.Tensor]], mode: str
) -> dict[str, torch.Tensor]:
    """Stock autograd: keys and values have the stored numbers and, in mode full, the derivative of new ones."""
    model.zero_grad(set_to_none=True)
    captured = what.prompt.numel() - 1
    states = [(k[:, :, :0], v[:, :, :0]) for k, v in stored]

    def cache() -> DynamicCache:
        filled = DynamicCache()
        for index, (k, v) in enumerate(states):
            if k.shape[2]:
                filled.update(k, v, index)
        return filled

    for start in range(0, captured, SEGMENT):
        part = slice(start, min(start + SEGMENT, captured))
        if mode == "full":
            ran = model(input_ids=what.prompt[None, part], past_key_values=cache(), use_cache=True).past_key_values
            fresh = [(layer.keys[:, :, part], layer.values[:, :, part]) for layer in ran.layers]
            written = [
                tuple(old[:, :, part] + new - new.detach() for old, new in zip(pair, news))
                for pair, news in zip(stored, fresh)
            ]
        else:
            written = [tuple(old[:, :, part] for old in pair) for pair in stored]
        states = [
            tuple(torch.cat([before, after], 2) for before, after in zip(pair, more))
            for pair, more in zip(states, written)
        ]
    logps = []
    for response in what.responses:
        ids = torch.cat([what.prompt[-1:], response[:-1]])[None]
        logits = model(input_ids=ids, past_key_values=cache(), use_cache=True).logits[0]
        logps.append(logits.log_softmax(-1).gather(-1, response[:, None])[:, 0])
    what.objective(logps).backward()
    found = reference.gradients(model)
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("mode", ["full", "none"])
@pytest.mark.parametrize("retained", [0, 1 << 26])
def test_the_gradient_of_a_stale_state(mode: str, retained: int, float64_inside: None) -> None:
    model, what = build("llama"), group(num_prompt=40, lengths=(5, 3))
    stored = stored_states(model, what.prompt)
    engine = longstraw.Engine(model, mode, segment_tokens=SEGMENT, retain_graph_bytes=retained)
    with engine.capture(what.prompt) as state:
        moved(model, 0.05)
        engine.backward(state, what.responses, what.objective)
    found = reference.gradients(model)
    reference.assert_same_gradients(found, stale_step(model, what, stored, mode), 1e-12)

    *_, fresh = reference.step(model, what.prompt, what.responses, what.objective, mode)
    assert reference.relative_error(found, fresh) > 1e-3


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_5", "glm_moe_dsa"])
def test_a_state_serves_several_updates_and_is_never_changed(family: str) -> None:
    """Two updates on one capture give what two captures with the first parameters give."""
    what = group(num_prompt=40, lengths=(5, 3))
    grads = []
    for reused in (True, False):
        model = build(family, dtype=torch.float32)
        engine = longstraw.Engine(model, segment_tokens=SEGMENT, retain_graph_bytes=1 << 26 if reused else 0)
        states = [engine.capture(what.prompt)] if reused else [engine.capture(what.prompt) for _ in range(3)]
        for use in range(3):
            model.zero_grad(set_to_none=True)
            engine.backward(states[0 if reused else use], what.responses, what.objective)
            grads.append(reference.gradients(model))
            moved(model, 0.02)
    for found, expected in zip(grads[:3], grads[3:]):
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
