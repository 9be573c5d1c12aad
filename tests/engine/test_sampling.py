"""Rollouts from a captured prompt: seeds, cuts, stops, and agreement with scoring and with stock generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import DENSE_AND_HYBRID, VOCAB, build
from group import group
from peft import LoraConfig, get_peft_model
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import longstraw
from longstraw.engine.sample import Sampling, draw

KINDS = ["llama", "mistral", "qwen3_5"]
PROMPT = group(num_prompt=31).prompt
PIECES = dict(segment_tokens=9, block_tokens=16)


def drafts(model: Any, **how: Any) -> list[longstraw.Draft]:
    engine = longstraw.Engine(model, **PIECES)
    with engine.capture(PROMPT) as state:
        return engine.sample(state, **{"num": 4, "max_new_tokens": 12, "stop_ids": (), **how})


def ids_of(found: list[longstraw.Draft]) -> list[list[int]]:
    return [draft.ids.tolist() for draft in found]


@pytest.mark.parametrize("family", DENSE_AND_HYBRID)
def test_score_agrees_with_the_sampler(family: str) -> None:
    """To float32 rounding, which the recurrence and the router amplify."""
    model = build(family, dtype=torch.float32)
    engine = longstraw.Engine(model, **PIECES)
    with engine.capture(PROMPT) as state:
        found = engine.sample(state, num=3, max_new_tokens=20, temperature=0.6, stop_ids=(), seed=1)
        scored = engine.score(state, [draft.ids for draft in found], temperature=0.6)
    for draft, logps in zip(found, scored):
        assert draft.logps.dtype == logps.dtype == torch.float32
        torch.testing.assert_close(draft.logps, logps, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", DENSE_AND_HYBRID)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_score_agrees_with_the_sampler_in_double_precision(
    family: str, temperature: float, float64_inside: None
) -> None:
    model = build(family)
    engine = longstraw.Engine(model, **PIECES)
    with engine.capture(PROMPT) as state:
        found = engine.sample(state, num=3, max_new_tokens=20, temperature=temperature, top_p=0.95, stop_ids=())
        scored = engine.score(state, [draft.ids for draft in found], temperature)
    for draft, logps in zip(found, scored):
        assert draft.logps.dtype == torch.float64
        torch.testing.assert_close(draft.logps, logps, rtol=1e-11, atol=1e-11)


def test_a_seed_reproduces_and_another_differs() -> None:
    model = build("qwen3_5", dtype=torch.float32)
    torch.manual_seed(1)
    first = drafts(model, seed=3)
    torch.manual_seed(2)
    again = drafts(model, seed=3)
    assert ids_of(first) == ids_of(again)
    assert all(torch.equal(a.logps, b.logps) for a, b in zip(first, again))
    assert ids_of(drafts(model, seed=4)) != ids_of(first)
    assert len({tuple(ids) for ids in ids_of(first)}) == 4, "the rows of one call have to differ"


def test_a_row_depends_neither_on_pieces_nor_on_tier(float64_inside: None, tmp_path: Any) -> None:
    model, found = build("qwen3_5"), []
    for tier, segment_tokens in (("device", 7), ("host", 30), ("disk", 1000)):
        engine = longstraw.Engine(model, tier=tier, segment_tokens=segment_tokens, page_dir=tmp_path)
        with engine.capture(PROMPT) as state:
            found.append(ids_of(engine.sample(state, num=3, max_new_tokens=8, stop_ids=())))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_mixed", "qwen3_5", "qwen3_next"])
def test_greedy_is_stock_generate(family: str, float64_inside: None) -> None:
    model = build(family)
    expected = model.generate(PROMPT[None], do_sample=False, max_new_tokens=12, pad_token_id=0)[0, len(PROMPT) :]
    found = drafts(model, num=2, temperature=0)
    assert ids_of(found) == [expected.tolist()] * 2
    engine = longstraw.Engine(model, **PIECES)
    with engine.capture(PROMPT) as state:  # a greedy token's log-probability is the one at temperature 1
        torch.testing.assert_close(found[0].logps, engine.score(state, [expected])[0], rtol=1e-12, atol=1e-12)


def test_greedy_with_repetition_penalty_is_stock_generate(float64_inside: None) -> None:
    model = build("llama")
    options = dict(do_sample=False, max_new_tokens=15, pad_token_id=0)
    plain = model.generate(PROMPT[None], **options)[0, len(PROMPT) :].tolist()
    expected = model.generate(PROMPT[None], repetition_penalty=1.7, **options)[0, len(PROMPT) :].tolist()
    assert expected != plain
    assert ids_of(drafts(model, num=1, temperature=0, repetition_penalty=1.7, max_new_tokens=15)) == [expected]


def test_greedy_of_an_adapter_is_stock_generate() -> None:
    torch.manual_seed(5)
    model = get_peft_model(build("llama", dtype=torch.float32), LoraConfig(target_modules="all-linear")).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    expected = model.generate(PROMPT[None], do_sample=False, max_new_tokens=12, pad_token_id=0)[0, len(PROMPT) :]
    assert ids_of(drafts(model, num=1, temperature=0)) == [expected.tolist()]


@pytest.mark.parametrize("family", KINDS)
def test_a_row_that_ends_changes_no_other(family: str, float64_inside: None) -> None:
    model = build(family)
    free = drafts(model, num=6, max_new_tokens=30, seed=2)
    stop_ids = (3, 17, 40, 55)
    stopped = drafts(model, num=6, max_new_tokens=30, seed=2, stop_ids=stop_ids)
    ends = [next((i for i, token in enumerate(ids) if token in stop_ids), None) for ids in ids_of(free)]
    assert len({end for end in ends if end is not None}) >= 2, "the rows have to end at different steps"
    for whole, draft, end in zip(free, stopped, ends):
        length = 30 if end is None else end + 1
        assert draft.finish_reason == ("length" if end is None else "stop")
        assert draft.ids.tolist() == whole.ids[:length].tolist()
        torch.testing.assert_close(draft.logps, whole.logps[:length], rtol=1e-12, atol=1e-12)


def test_ends_by_the_models_own_stop_tokens() -> None:
    model = build("llama", dtype=torch.float32)
    first = drafts(model, num=4)
    model.generation_config.eos_token_id = [int(first[0].ids[2]), int(first[1].ids[1])]
    engine = longstraw.Engine(model, **PIECES)
    with engine.capture(PROMPT) as state:
        found = engine.sample(state, num=4, max_new_tokens=12)
        one = engine.sample(state, num=4, max_new_tokens=12, stop_ids=int(first[0].ids[2]))
        never = engine.sample(state, num=4, max_new_tokens=12, stop_ids=())
    assert found[0].finish_reason == found[1].finish_reason == "stop"
    assert found[0].ids[-1] in model.generation_config.eos_token_id
    assert one[0].finish_reason == "stop" and one[0].ids[-1] == first[0].ids[2]
    assert ids_of(never) == ids_of(first) and {draft.finish_reason for draft in never} == {"length"}


def test_one_new_token_and_one_token_prompt() -> None:
    model = build("qwen3_5", dtype=torch.float32)
    assert [len(draft.ids) for draft in drafts(model, max_new_tokens=1)] == [1] * 4
    engine = longstraw.Engine(model)
    with engine.capture([5]) as state:
        found = engine.sample(state, num=2, max_new_tokens=9, stop_ids=())
        for draft, logps in zip(found, engine.score(state, [draft.ids for draft in found])):
            torch.testing.assert_close(draft.logps, logps, rtol=1e-4, atol=1e-4)


CUTS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature": dict(temperature=0.5),
    "top_k": dict(top_k=5),
    "top_k beyond the vocabulary": dict(top_k=1000),
    "top_p": dict(top_p=0.7),
    "tiny top_p": dict(top_p=1e-9),
    "min_p": dict(min_p=0.2),
    "repetition": dict(repetition_penalty=1.8),
    "all": dict(temperature=1.4, top_k=30, top_p=0.85, min_p=0.05, repetition_penalty=1.3),
}


@pytest.mark.parametrize("cut", CUTS)
def test_the_distribution_is_that_of_transformers(cut: str) -> None:
    """Evenly spaced uniform numbers through `draw` give every token as often as transformers' processors say."""
    how, num = CUTS[cut], 4000
    generator = torch.Generator().manual_seed(7)
    logits = 3 * torch.randn(1, VOCAB, generator=generator, dtype=torch.float64)
    seen = torch.tensor([[3, 3, 8, 40]])
    processors = LogitsProcessorList()
    if "repetition_penalty" in how:
        processors.append(RepetitionPenaltyLogitsProcessor(how["repetition_penalty"]))
    processors.append(TemperatureLogitsWarper(how.get("temperature", 1.0)))
    if "top_k" in how:
        processors.append(TopKLogitsWarper(how["top_k"]))
    if "top_p" in how:
        processors.append(TopPLogitsWarper(how["top_p"]))
    if "min_p" in how:
        processors.append(MinPLogitsWarper(how["min_p"]))
    expected = processors(seen, logits.clone()).softmax(-1)[0]
    uniforms = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    seen_mask = torch.zeros(1, VOCAB, dtype=torch.bool).scatter(1, seen, True).expand(num, VOCAB)
    sampling = Sampling(num=num, max_new_tokens=1, **how)
    picked = draw(logits.expand(num, VOCAB), uniforms, sampling, seen_mask if "repetition_penalty" in how else None)
    counts = torch.bincount(picked, minlength=VOCAB).double()
    assert (counts[expected == 0] == 0).all()
    assert (counts / num - expected).abs().max() <= 1.5 / num


def test_extreme_uniform_numbers_pick_possible_tokens() -> None:
    logits = torch.full((3, 5), float("-inf"), dtype=torch.float64)
    logits[:, 1:3] = torch.tensor([0.3, 0.1], dtype=torch.float64)
    uniforms = torch.tensor([0.0, 1 - 2.0**-53, 0.5], dtype=torch.float64)
    assert draw(logits, uniforms, Sampling(num=3, max_new_tokens=1)).tolist() == [1, 2, 1]


def test_samples_follow_the_policy() -> None:
    """Frequencies of the first token over many rows against the stock model's probabilities: a chi-squared bound."""
    model = build("llama", dtype=torch.float32)
    num = 2000
    found = drafts(model, num=num, max_new_tokens=1, temperature=0.8, seed=11)
    counts = torch.bincount(torch.tensor([int(draft.ids[0]) for draft in found]), minlength=VOCAB).double()
    with torch.no_grad():
        expected = num * (model(PROMPT[None]).logits[0, -1].double() / 0.8).softmax(-1)
    statistic = ((counts - expected).square() / expected).sum()
    assert statistic < 66 + 5 * (2 * 66) ** 0.5, f"chi-squared {statistic:.0f} at 66 degrees of freedom"


def test_pages_are_not_copied_per_row(float64_inside: None) -> None:
    """Every tensor that decoding makes is smaller than the prompt's keys of one layer times the rows."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for value in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(value, torch.Tensor):
                    self.numel = max(self.numel, value.numel())
            return result

    model, prompt = build("llama"), group(num_prompt=2001).prompt
    engine = longstraw.Engine(model, segment_tokens=500)
    with engine.capture(prompt) as state, Largest() as largest:
        engine.sample(state, num=16, max_new_tokens=2, stop_ids=())
    keys_of_one_page = 2 * 500 * 8
    assert largest.numel < 16 * keys_of_one_page / 2


def test_logits_that_are_no_numbers_are_refused() -> None:
    model = build("llama", dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[3, 0] = float("nan")
    engine = longstraw.Engine(model)
    with engine.capture(range(5)) as state, pytest.raises(FloatingPointError, match="diverged"):
        engine.sample(state, num=2, max_new_tokens=2)
