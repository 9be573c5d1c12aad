"""Every family that leaves nothing behind but keys and values: exact, whatever its heads, windows and experts."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import reference
import torch
from families import ATTENTION, build
from group import engine_step, group

import longstraw
from longstraw.attention import interface
from longstraw.engine.host import ModelHost
from longstraw.models import family_of
from longstraw.models.heads import ScaledHead
from longstraw.pages import PageStore
from longstraw.state.kv import KVChain
from longstraw.state.stateless import StatelessChain
from longstraw.state.window import WindowChain

EXACT = 1e-11


@pytest.mark.parametrize("mode", ["full", "none", 20])
@pytest.mark.parametrize("family", ATTENTION)
def test_exact(family: str, mode: Any, float64_inside: None) -> None:
    what, model = group(num_prompt=60), build(family)
    loss, logps, expected = reference.step(model, what.prompt, what.responses, what.objective, mode)
    outcome, found = engine_step(model, what, prompt_grad=mode, segment_tokens=17, block_tokens=4)
    assert abs(outcome.loss - loss) <= EXACT
    for ours, theirs in zip(outcome.logps, logps):
        torch.testing.assert_close(ours, theirs, rtol=EXACT, atol=EXACT)
    reference.assert_same_gradients(found, expected, EXACT)


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", ["gemma4_shared", "gpt_oss"])
def test_tiers_and_recomputation(family: str, tier: str, recompute: bool, float64_inside: None) -> None:
    what, model = group(num_prompt=60), build(family)
    _, _, expected = reference.step(model, what.prompt, what.responses, what.objective)
    options = dict(segment_tokens=9, block_tokens=30, tier=tier, recompute_layers=recompute)
    reference.assert_same_gradients(engine_step(model, what, **options)[1], expected, EXACT)


@pytest.mark.parametrize("retain", [0, 1 << 30])
def test_shared_keys_and_values_in_kept_graphs(retain: int, float64_inside: None) -> None:
    what, model = group(num_prompt=60), build("gemma4_shared")
    _, _, expected = reference.step(model, what.prompt, what.responses, what.objective)
    found = engine_step(model, what, segment_tokens=9, block_tokens=4, retain_graph_bytes=retain)[1]
    reference.assert_same_gradients(found, expected, EXACT)


@pytest.mark.parametrize("family", ATTENTION)
def test_drafts_score_as_they_were_sampled(family: str) -> None:
    model, prompt = build(family, dtype=torch.float32), group(num_prompt=40).prompt
    engine = longstraw.Engine(model, segment_tokens=17, block_tokens=8)
    with engine.capture(prompt) as state:
        drafts = engine.sample(state, num=3, max_new_tokens=14, stop_ids=range(20))
        scored = engine.score(state, [draft.ids for draft in drafts])
    for draft, logps in zip(drafts, scored):
        torch.testing.assert_close(draft.logps, logps, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ATTENTION)
def test_the_stock_model_agrees_on_construction(family: str) -> None:
    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        found = longstraw.Engine(build(family, dtype=dtype)).trial
        assert found.num_tokens >= 12 and found.not_covered == [] and 0 < found.pieces_distance <= most


def test_layers_that_share_read_the_last_of_their_type_that_keeps() -> None:
    model = build("gemma4_shared", dtype=torch.float32)
    chain = ModelHost(model).new_chain(PageStore("cpu"), 0)
    assert [type(layer) for layer in chain.layers] == [WindowChain] * 2 + [KVChain] + [StatelessChain] * 3
    attending: list[int] = []
    own = interface.served

    def watched(module: Any, *call: Any) -> Any:
        attending.append(module.layer_idx)
        return own(module, *call)

    engine = longstraw.Engine(model, segment_tokens=10)
    with mock.patch.object(interface, "served", watched), engine.capture(torch.arange(9)) as state:
        assert attending == [0, 1], "a prompt's piece ends where layer 2 has kept its keys and values"
        attending.clear()
        engine.score(state, [[1, 2]])
        assert attending == [0, 1, 2, 3, 4, 5]


def test_an_assistant_that_keeps_nothing_is_refused() -> None:
    config = build("gemma4", dtype=torch.float32).config
    config.num_kv_shared_layers = config.num_hidden_layers
    with pytest.raises(ValueError, match="every layer shares the keys and values of another model"):
        family_of("gemma4_text").layers(config)


@pytest.mark.parametrize("family", ["mixtral", "minimax_m2"])
def test_a_router_that_adds_noise_in_training(family: str) -> None:
    model = build(family, dtype=torch.float32, router_jitter_noise=0.1).train()
    engine = longstraw.Engine(model)
    with pytest.raises(ValueError, match=r"router in model\.layers\.0\.mlp adds noise .*router_jitter_noise"):
        engine.capture(torch.arange(9))
    model.eval()
    engine.capture(torch.arange(9)).release()


def test_a_head_that_scales_and_caps() -> None:
    matrix = torch.nn.Linear(8, 5, bias=False).double()
    hidden = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    head = ScaledHead(matrix, divisor=4.0, multiplier=0.5, softcap=0.7)
    expected = 0.7 * torch.tanh(matrix(hidden) / 4 * 0.5 / 0.7)
    torch.testing.assert_close(head(hidden), expected, rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(head, (hidden,))
    assert [p is matrix.weight for p in head.parameters()] == [True]
    assert torch.equal(ScaledHead(matrix)(hidden), matrix(hidden))


@pytest.mark.parametrize(
    "family, number",
    [("granitemoehybrid", dict(logits_scaling=4.0)), ("falcon_h1", dict(lm_head_multiplier=0.3))],
)
def test_recurrent_families_scale_their_logits_too(family: str, number: dict[str, float]) -> None:
    model = build(family, dtype=torch.float32, **number)
    assert longstraw.Engine(model).trial.head_distance <= 1e-6
