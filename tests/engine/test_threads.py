"""Threads that use one engine, or one model under several, take turns; one that would wait for itself is told."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import reference
import torch
from families import build
from group import Group, group
from transformers import LlamaForCausalLM

import longstraw

GROUPS = [group(num_prompt=40, lengths=(5, 3), seed=seed) for seed in range(4)]


def together(work: Callable[[int], Any], num: int) -> list[Any]:
    with ThreadPoolExecutor(num) as pool:
        return list(pool.map(work, range(num)))


def one(engine: longstraw.Engine, what: Group) -> Any:
    with engine.capture(what.prompt) as state:
        return engine.backward(state, what.responses, what.objective).logps


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("engines", [1, 4])
def test_threads_add_up_to_what_one_does(family: str, engines: int) -> None:
    model = build(family)
    several = [
        longstraw.Engine(model, segment_tokens=5, block_tokens=4, retain_graph_bytes=1 << 24) for _ in range(engines)
    ]
    expected = [one(several[0], what) for what in GROUPS]
    whole = reference.gradients(model)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        found = together(lambda place: one(several[place % engines], GROUPS[place]), len(GROUPS))
        assert all(torch.equal(a, b) for pair in zip(found, expected) for a, b in zip(*pair))
        reference.assert_same_gradients(reference.gradients(model), whole, 1e-14)


def test_models_that_share_a_config_take_turns() -> None:
    """A run tells the config which attention to call."""
    first = build("llama")
    models = [first, LlamaForCausalLM(first.config).to(torch.float64).eval()]
    expected = [one(longstraw.Engine(model, segment_tokens=5), GROUPS[0]) for model in models]
    for _ in range(3):
        found = together(lambda place: one(longstraw.Engine(models[place], segment_tokens=5), GROUPS[0]), 2)
        assert all(torch.equal(a, b) for pair in zip(found, expected) for a, b in zip(*pair))


def test_an_objective_may_call_the_engine_from_any_thread() -> None:
    model, what = build("llama"), GROUPS[0]
    engine = longstraw.Engine(model, segment_tokens=9)
    with engine.capture(what.prompt) as state:

        def objective(logps: list[torch.Tensor]) -> torch.Tensor:
            here = engine.score(state, what.responses)
            there = together(lambda _: engine.score(state, what.responses), 1)[0]
            assert all(torch.equal(a, b) for a, b in zip(here, there))
            return what.objective(logps)

        engine.backward(state, what.responses, objective)
        found = reference.gradients(model)
        model.zero_grad(set_to_none=True)
        engine.backward(state, what.responses, what.objective)
    expected = reference.gradients(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("other", [False, True])
def test_a_call_from_within_a_call_is_refused(other: bool) -> None:
    model, what = build("llama"), GROUPS[0]
    inner = longstraw.Engine(model)
    engine = longstraw.Engine(model, segment_tokens=9, progress=lambda *_: nested())

    def nested() -> None:
        (inner if other else engine).capture(what.prompt)

    with pytest.raises(RuntimeError, match=r"called from within one of its own calls .* an objective may call"):
        engine.capture(what.prompt)
    inner.capture(what.prompt).release()  # the turn was given back
