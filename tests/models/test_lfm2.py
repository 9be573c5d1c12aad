"""LFM2: short convolutions between attention layers, against stock autograd; the convolution is tested by itself."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from families import build
from group import engine_step, group

import longstraw
from longstraw.engine.host import ModelHost
from longstraw.pages import PageStore

EXACT = 1e-11
FAMILIES = ["lfm2", "lfm2_moe"]


@pytest.mark.parametrize("mode", ["full", "none", 40])
@pytest.mark.parametrize("changes", [{}, dict(conv_bias=True)], ids=["plain", "bias"])
@pytest.mark.parametrize("family", FAMILIES)
def test_in_pieces_as_in_one_pass(family: str, changes: Any, mode: str | int, float64_inside: None) -> None:
    model, what = build(family, **changes), group()
    loss, _, expected = reference.step(model, what.prompt, what.responses, what.objective, mode)
    outcome, found = engine_step(model, what, prompt_grad=mode, segment_tokens=20, block_tokens=4)
    assert abs(outcome.loss - loss) <= EXACT
    reference.assert_same_gradients(found, expected, EXACT)


@pytest.mark.parametrize("kernel", [2, 3, 7])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_pieces_shorter_than_the_convolution(size: int, kernel: int, float64_inside: None) -> None:
    model, what = build("lfm2", conv_L_cache=kernel), group(num_prompt=14, lengths=(7, 1))
    _, _, expected = reference.step(model, what.prompt, what.responses, what.objective)
    reference.assert_same_gradients(
        engine_step(model, what, segment_tokens=size, block_tokens=size)[1], expected, EXACT
    )


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_as_shipped_in_float32(family: str, checkpoint: bool) -> None:
    model, what = build(family, dtype=torch.float32, initializer_range=0.05), group(90, (20, 9, 1))
    loss, _, expected = reference.step(model, what.prompt, what.responses, what.objective)
    outcome, found = engine_step(model, what, segment_tokens=33, block_tokens=16, recompute_layers=checkpoint)
    torch.testing.assert_close(outcome.loss, loss, rtol=2e-5, atol=2e-5, check_dtype=False)
    reference.assert_same_gradients(found, expected, 2e-5)


@pytest.mark.parametrize("tier", ["device", "disk"])
def test_sampling_scores_as_one_pass_does(tier: str, float64_inside: None) -> None:
    """A decoder carries the tail from token to token, and lets go of rows that are done."""
    model, what = build("lfm2"), group(num_prompt=21)
    engine = longstraw.Engine(model, segment_tokens=8, tier=tier)
    with engine.capture(what.prompt) as state:
        stop = int(engine.sample(state, num=1, max_new_tokens=3, seed=0)[0].ids[-1])
        for draft in engine.sample(state, num=4, max_new_tokens=9, seed=0, stop_ids=stop):
            with torch.no_grad():
                expected = reference.response_logps(model, what.prompt, draft.ids)
            torch.testing.assert_close(draft.logps, expected, rtol=EXACT, atol=EXACT)


def test_layers() -> None:
    host = ModelHost(build("lfm2"))
    names = [type(layer).__name__ for layer in host.new_chain(PageStore("cpu"), 0).layers]
    assert names == ["ConvolvedChain", "KVChain", "ConvolvedChain"]
