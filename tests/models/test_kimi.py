"""Kimi Linear: Kimi Delta Attention and latent attention without positions, against stock autograd."""

from __future__ import annotations

import pytest
import reference
import torch
from families import build
from group import engine_step, group

import longstraw
from longstraw.engine.host import ModelHost
from longstraw.pages import PageStore

EXACT = 1e-11


@pytest.mark.parametrize("mode", ["full", "none", 40])
@pytest.mark.parametrize("changes", [{}, dict(q_lora_rank=20)], ids=["plain", "query rank"])
def test_in_pieces_as_in_one_pass(mode: str | int, changes: dict[str, int], float64_inside: None) -> None:
    model, what = build("kimi_linear", **changes), group()
    loss, _, expected = reference.step(model, what.prompt, what.responses, what.objective, mode)
    outcome, found = engine_step(model, what, prompt_grad=mode, segment_tokens=20, block_tokens=4)
    assert abs(outcome.loss - loss) <= EXACT
    reference.assert_same_gradients(found, expected, EXACT)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_pieces_shorter_than_the_convolution(size: int, float64_inside: None) -> None:
    model, what = build("kimi_linear"), group(num_prompt=14, lengths=(7, 1))
    _, _, expected = reference.step(model, what.prompt, what.responses, what.objective)
    reference.assert_same_gradients(
        engine_step(model, what, segment_tokens=size, block_tokens=size)[1], expected, EXACT
    )


@pytest.mark.parametrize("checkpoint", [False, True])
def test_as_shipped_in_float32(checkpoint: bool) -> None:
    model, what = build("kimi_linear", dtype=torch.float32, initializer_range=0.05), group(90, (20, 9, 1))
    loss, _, expected = reference.step(model, what.prompt, what.responses, what.objective)
    outcome, found = engine_step(model, what, segment_tokens=33, block_tokens=16, recompute_layers=checkpoint)
    torch.testing.assert_close(outcome.loss, loss, rtol=2e-5, atol=2e-5, check_dtype=False)
    reference.assert_same_gradients(found, expected, 2e-5)


def test_sampling_scores_as_one_pass_does(float64_inside: None) -> None:
    """A decoder carries the states from token to token."""
    model, what = build("kimi_linear"), group(num_prompt=21)
    engine = longstraw.Engine(model, segment_tokens=8)
    with engine.capture(what.prompt) as state:
        for draft in engine.sample(state, num=3, max_new_tokens=6, seed=0):
            with torch.no_grad():
                expected = reference.response_logps(model, what.prompt, draft.ids)
            torch.testing.assert_close(draft.logps, expected, rtol=EXACT, atol=EXACT)


def test_layers() -> None:
    host = ModelHost(build("kimi_linear"))
    names = [type(layer).__name__ for layer in host.new_chain(PageStore("cpu"), 0).layers]
    assert names == ["RecurrentChain", "LatentChain", "RecurrentChain"]
    with host.running():
        assert all("forward" in layer.self_attn.__dict__ for layer in host.backbone.layers)
    assert not any("forward" in module.__dict__ for module in host.model.modules())
