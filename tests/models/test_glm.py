"""Multi-head latent attention in the engine: state in bytes, the indexer's choice, routing, causality, adapters."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import reference
import torch
from families import VOCAB, build, tied
from group import engine_step, group
from latent_cases import MODELS, SPARSE, Choices, with_lora

import longstraw
from longstraw.attention import sparse_reference
from longstraw.models import mla

pytestmark = [pytest.mark.usefixtures("float64_inside"), pytest.mark.filterwarnings("ignore:.*get no gradient")]
EXACT = 1e-11
TOPK = 9


def assert_exact(model: Any, what: Any, **options: Any) -> None:
    loss, _, expected = reference.step(model, what.prompt, what.responses, what.objective)
    outcome, found = engine_step(model, what, **{"segment_tokens": 17, "block_tokens": 8, **options})
    torch.testing.assert_close(outcome.loss, loss, rtol=EXACT, atol=EXACT, check_dtype=False)
    reference.assert_same_gradients(found, expected, EXACT)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bytes_of_the_state(family: str, dtype: torch.dtype) -> None:
    """A token leaves its latent, its rotary key and, where an indexer runs, its index key: nothing expanded."""
    model = build(family, dtype=dtype)
    config, tokens, item = model.config, 75, dtype.itemsize
    indexers = {"glm_moe_dsa": 3, "deepseek_v32": 3, "deepseek_v3": 0}[family]
    expected = {"latent": tokens * config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim) * item}
    if indexers:
        expected["index"] = tokens * indexers * config.index_head_dim * item
    with longstraw.Engine(model, segment_tokens=17).capture(torch.arange(tokens + 1) % VOCAB) as state:
        assert {kind: sum(tiers.values()) for kind, tiers in state.nbytes.items()} == expected


def test_bytes_of_glm_5_2() -> None:
    """576 values a token a layer, and 128 more in 21 of its 78 layers."""
    import transformers

    config = transformers.GlmMoeDsaConfig(index_topk_freq=4, index_skip_topk_offset=3)
    assert config.kv_lora_rank + config.qk_rope_head_dim == 576 and config.index_head_dim == 128
    assert len(mla.layers(config)) == 78 and config.indexer_types.count("full") == 21


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("make", [build, tied])
def test_choice_equals_a_plain_sort_for_any_segment_size(
    family: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few distinct tokens, each many times."""
    prompt = torch.randint(0, 4, (90,), generator=torch.Generator().manual_seed(0))
    model = make(family)
    longstraw.Engine(model)  # compares it with the stock model, once
    choices = Choices(monkeypatch)
    longstraw.Engine(model, segment_tokens=1000).capture(prompt).release()
    assert len(choices.calls) == 2
    scores = [sparse_reference.scores(q[0].cpu(), w[0], k[0]) for _, q, w, k, _ in choices.calls]
    expected = [sparse_reference.choose(found, TOPK) for found in scores]
    edges = [row[: t + 1].sort(descending=True).values[TOPK - 1 : TOPK + 1] for t, row in enumerate(scores[0])]
    ties = sum(bool(edge[0] == edge[1]) for edge in edges if len(edge) == 2)
    assert ties > 20 if make is tied else ties == 0
    assert choices.of_prompt() == expected
    for size in (1, 7, 17, 64):
        choices.calls.clear()
        longstraw.Engine(model, segment_tokens=size).capture(prompt).release()
        assert choices.of_prompt() == expected, f"segment_tokens={size}"


@pytest.mark.parametrize("family", SPARSE)
def test_ties_give_the_same_step_however_it_is_cut(family: str) -> None:
    """The stock model cannot tell here: it breaks ties by shape."""
    what, model = group(), tied(family)
    outcome, expected = engine_step(model, what, segment_tokens=1000, block_tokens=1000)
    for sizes in ((7, 3), (17, 8), (64, 16)):
        again, found = engine_step(model, what, segment_tokens=sizes[0], block_tokens=sizes[1])
        torch.testing.assert_close(again.loss, outcome.loss, rtol=EXACT, atol=EXACT)
        reference.assert_same_gradients(found, expected, EXACT)


def test_ten_steps_alike_to_the_bit() -> None:
    what, model = group(), tied("glm_moe_dsa")
    steps = [engine_step(model, what, segment_tokens=17, block_tokens=8) for _ in range(10)]
    for outcome, found in steps[1:]:
        assert torch.equal(outcome.loss, steps[0][0].loss)
        assert all(torch.equal(gradient, steps[0][1][name]) for name, gradient in found.items())


@pytest.mark.parametrize("family", MODELS)
def test_a_token_changes_no_log_probability_before_it(family: str) -> None:
    """Blocks of 8 behind segments of 17; the changed token may change its own log-probability and later ones only."""
    model, what = build(family), group(num_prompt=40, lengths=(30,))
    engine = longstraw.Engine(model, segment_tokens=17, block_tokens=8)
    with engine.capture(what.prompt) as state:
        before = engine.score(state, what.responses)[0]
        for place in (0, 7, 8, 21, 28):
            changed = what.responses[0].clone()
            changed[place] = (changed[place] + 1) % VOCAB
            after = engine.score(state, [changed])[0]
            torch.testing.assert_close(after[:place], before[:place], rtol=1e-12, atol=1e-12)
            assert (after[place + 1 :] - before[place + 1 :]).abs().max() > 1e-3


@pytest.mark.parametrize("family", SPARSE)
def test_a_prompt_token_changes_no_state_before_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = build(family), group(num_prompt=60).prompt
    longstraw.Engine(model)  # compares it with the stock model, once
    choices = Choices(monkeypatch)
    longstraw.Engine(model, segment_tokens=17).capture(prompt).release()
    before = choices.of_prompt()
    choices.calls.clear()
    changed = prompt.clone()
    changed[30] = (changed[30] + 1) % VOCAB
    longstraw.Engine(model, segment_tokens=17).capture(changed).release()
    after = choices.of_prompt()
    assert [layer[:30] for layer in after] == [layer[:30] for layer in before]
    assert [layer[30:] for layer in after] != [layer[30:] for layer in before]


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("num_prompt", [1, 2, 5, 9, 10, 11])
def test_prompts_about_as_short_as_the_choice(family: str, num_prompt: int) -> None:
    """Fewer tokens than `index_topk` are all chosen, and never one that does not exist."""
    assert_exact(build(family), group(num_prompt=num_prompt), segment_tokens=4, block_tokens=3)


@pytest.mark.parametrize("family", MODELS)
def test_drafts_score_as_they_were_sampled(family: str) -> None:
    """Decoding side by side, rows dropping out as they end, against scoring in blocks."""
    model, prompt = build(family), group(num_prompt=40).prompt
    engine = longstraw.Engine(model, segment_tokens=17, block_tokens=8)
    with engine.capture(prompt) as state:
        drafts = engine.sample(state, num=6, max_new_tokens=80, seed=1, stop_ids=[0])
        scored = engine.score(state, [draft.ids for draft in drafts])
    assert len({len(draft.ids) for draft in drafts}) > 2, "rows have to end at different times"
    assert max(len(draft.ids) for draft in drafts) > 65, "the decoding buffer has to grow"
    for draft, logps in zip(drafts, scored):
        torch.testing.assert_close(draft.logps, logps, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", MODELS)
def test_tiers_agree_to_the_bit(family: str, tmp_path: Any) -> None:
    model, what = build(family), group(num_prompt=40, lengths=(5, 12))
    first, expected = engine_step(model, what, segment_tokens=7, block_tokens=5)
    outcome, found = engine_step(model, what, segment_tokens=7, block_tokens=5, tier="disk", page_dir=tmp_path)
    assert torch.equal(outcome.loss, first.loss)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("targets", ["all-linear", ["kv_b_proj"], ["kv_a_proj_with_mqa", "q_b_proj"]])
def test_lora(family: str, targets: Any) -> None:
    assert_exact(with_lora(build(family), targets), group())


@pytest.mark.parametrize("use", [dict(use_dora=True), dict(use_rslora=True)])
def test_other_adapters_of_the_expansion(use: dict[str, bool]) -> None:
    assert_exact(with_lora(build("deepseek_v3"), ["kv_b_proj", "o_proj"], **use), group())


def test_experts_without_a_token() -> None:
    """Sixty-four experts, two a token: most get none in a piece of seven."""
    assert_exact(build("glm_moe_dsa", n_routed_experts=64), group(num_prompt=30), segment_tokens=7, block_tokens=4)


@pytest.mark.parametrize("family", MODELS)
def test_the_model_is_left_as_it_was(family: str) -> None:
    model, what = build(family), group()
    attention = [layer.self_attn for layer in model.model.layers]
    marker = attention[1].forward  # a bound method of its own, as a wrapper leaves it
    attention[1].forward = marker
    engine = longstraw.Engine(model, segment_tokens=17)
    expected = reference.response_logps(model, what.prompt, what.responses[1])
    with engine.capture(what.prompt) as state:
        assert torch.equal(reference.response_logps(model, what.prompt, what.responses[1]), expected)

        def fail(logps: Any) -> Any:
            raise KeyError("objective")

        with pytest.raises(KeyError):
            engine.backward(state, what.responses, fail)
    assert "forward" not in attention[0].__dict__ and attention[1].__dict__["forward"] is marker
    assert torch.equal(reference.response_logps(model, what.prompt, what.responses[1]), expected)


@pytest.fixture
def strict() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*get no gradient")
        yield


@pytest.mark.usefixtures("strict")
def test_parameters_without_a_gradient_are_named() -> None:
    with pytest.raises(UserWarning, match=r"15 trainable .*layers\.0\.self_attn\.indexer\.wq_b\.weight"):
        longstraw.Engine(build("glm_moe_dsa"))
    with pytest.raises(UserWarning, match="trainable"):
        longstraw.Engine(with_lora(build("glm_moe_dsa"), "all-linear"))
    longstraw.Engine(build("deepseek_v3"))
    longstraw.Engine(with_lora(build("glm_moe_dsa"), ["kv_b_proj", "o_proj"]))
    frozen = build("glm_moe_dsa")
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_(".indexer." not in name)
    longstraw.Engine(frozen)


def test_a_choice_shared_before_it_is_made_is_refused() -> None:
    model = build("glm_moe_dsa", indexer_types=["shared", "full", "shared", "shared", "full"])
    with pytest.raises(ValueError, match="indexer_types"):
        longstraw.Engine(model)


def test_an_expansion_with_a_bias_is_refused() -> None:
    model = with_lora(build("deepseek_v3"), ["kv_b_proj"], lora_bias=True)
    with pytest.raises(ValueError, match="kv_b_proj has a bias"):
        longstraw.Engine(model).capture(torch.arange(5))


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("option", [dict(recompute_layers=True), dict(retain_graph_bytes=1 << 40)])
def test_memory_options_change_no_bit(family: str, option: dict[str, Any]) -> None:
    model, what = build(family), group()
    outcome, expected = engine_step(model, what, segment_tokens=17, block_tokens=8)
    again, found = engine_step(model, what, segment_tokens=17, block_tokens=8, **option)
    assert torch.equal(again.loss, outcome.loss)
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name
