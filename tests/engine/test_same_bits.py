"""Kept graphs, recomputed layers and thinned-out states trade memory for time, and change not a bit of the result."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import reference
import torch
from families import build
from group import Group, group
from test_isolation import fingerprint

import longstraw

KINDS = ["llama", "mistral", "qwen3_5"]
PIECES = dict(segment_tokens=5, block_tokens=8)
ALL, HALF = 1 << 40, -1  # HALF stands for half of what all graphs of the prompt take
OPTIONS: dict[str, dict[str, Any]] = {
    "all graphs": dict(retain_graph_bytes=ALL),
    "some graphs": dict(retain_graph_bytes=HALF),
    "a byte of graphs": dict(retain_graph_bytes=1),
    "layers": dict(recompute_layers=True),
    "few states": dict(boundary_bytes=0),
    "some states": dict(boundary_bytes=9_000),
    "few states, all graphs": dict(boundary_bytes=0, retain_graph_bytes=ALL),
    "everything": dict(boundary_bytes=0, retain_graph_bytes=HALF, recompute_layers=True),
}


def what() -> Group:
    return group(num_prompt=27, lengths=(5, 10, 1))


def engine_with(model: Any, options: dict[str, Any], **common: Any) -> longstraw.Engine:
    options = options | common
    if options.get("retain_graph_bytes") == HALF:
        with longstraw.Engine(model, **{**options, "retain_graph_bytes": ALL}).capture(what().prompt) as state:
            options["retain_graph_bytes"] = (ALL - state.kept.left) // 2
        engine = longstraw.Engine(model, **options)
        with engine.capture(what().prompt) as state:
            assert 0 < len(state.kept) < state.chain.num_pieces
        return engine
    return longstraw.Engine(model, **options)


def step(engine: longstraw.Engine) -> tuple[Any, dict[str, torch.Tensor]]:
    with engine.capture(what().prompt) as state:
        outcome = engine.backward(state, what().responses, what().objective)
    found = reference.gradients(engine.host.model)
    engine.host.model.zero_grad(set_to_none=True)
    return outcome, found


@cache
def plain(family: str, dtype: torch.dtype, mode: Any) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """(model, outcome, gradients) of a step without any of the options."""
    model = build(family, dtype=dtype)
    return model, *step(longstraw.Engine(model, prompt_grad=mode, **PIECES))


def assert_same(
    family: str, options: dict[str, Any], dtype: torch.dtype = torch.float32, mode: Any = "full", **common: Any
) -> None:
    model, first, expected = plain(family, dtype, mode)
    outcome, found = step(engine_with(model, options, prompt_grad=mode, **PIECES, **common))
    assert torch.equal(outcome.loss, first.loss)
    assert all(torch.equal(a, b) for a, b in zip(outcome.logps, first.logps))
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_not_a_bit_changes(family: str, option: str) -> None:
    assert_same(family, OPTIONS[option])


@pytest.mark.parametrize("option", ["few states, all graphs", "everything"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_not_a_bit_changes_on_other_tiers(tier: str, option: str, tmp_path: Any) -> None:
    assert_same("qwen3_5", OPTIONS[option], tier=tier, page_dir=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode, option", [("none", "all graphs"), (11, "all graphs"), (11, "everything")])
def test_not_a_bit_changes_in_other_modes(mode: Any, option: str) -> None:
    assert_same("qwen3_5", OPTIONS[option], mode=mode)


def test_not_a_bit_changes_in_bfloat16() -> None:
    assert_same("qwen3_5", OPTIONS["everything"], torch.bfloat16)


@pytest.mark.parametrize("option", ["all graphs", "everything"])
def test_the_state_is_as_captured_and_serves_again(option: str) -> None:
    """The second step rebuilds what the first used up; both give the same gradient."""
    model = build("qwen3_5", dtype=torch.float32)
    engine = engine_with(model, OPTIONS[option], **PIECES)
    with engine.capture(what().prompt) as state:
        captured, steps = fingerprint(state), []
        for _ in range(2):
            engine.backward(state, what().responses, what().objective)
            steps.append(reference.gradients(model))
            model.zero_grad(set_to_none=True)
            assert fingerprint(state) == captured
    assert all(torch.equal(gradient, steps[1][name]) for name, gradient in steps[0].items())


@pytest.mark.parametrize("option", ["all graphs", "few states", "everything"])
def test_a_step_that_raises_in_the_sweep(option: str) -> None:
    model = build("qwen3_5", dtype=torch.float32)
    seen = [0]

    def progress(phase: str, done: int, total: int) -> None:
        seen[0] += phase == "sweep"
        if phase == "sweep" and seen[0] == 3:
            raise KeyboardInterrupt

    engine = engine_with(model, OPTIONS[option], progress=progress, **PIECES)
    expected = plain("qwen3_5", torch.float32, "full")[2]
    with engine.capture(what().prompt) as state:
        captured = fingerprint(state)
        with pytest.raises(KeyboardInterrupt):
            engine.backward(state, what().responses, what().objective)
        assert fingerprint(state) == captured
        assert all(p.grad is None for p in model.parameters())
        engine.backward(state, what().responses, what().objective)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in reference.gradients(model).items())


LONG = dict(num_prompt=12, lengths=(30, 17, 3))


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("tier", ["device", "disk"])
def test_scored_blocks_are_not_run_again_without_a_graph(family: str, tier: str, tmp_path: Any) -> None:
    """Of n blocks all are scored, and with a budget only the n - 1 without a graph are built again."""
    model, long = build(family, dtype=torch.float32), group(**LONG)
    runs: dict[int, int] = {}
    results = []
    for budget in (0, ALL):
        engine = longstraw.Engine(model, retain_graph_bytes=budget, tier=tier, page_dir=tmp_path, **PIECES)
        with engine.capture(long.prompt) as state:
            captured, pages = fingerprint(state), len(state.store.table)
            forward, runs[budget] = engine.host.forward, 0

            def counted(*arguments: Any, budget: int = budget, forward: Any = forward) -> Any:
                runs[budget] += 1
                return forward(*arguments)

            engine.host.forward = counted
            engine.backward(state, long.responses, long.objective)
            assert fingerprint(state) == captured and len(state.store.table) == pages
        results.append(reference.gradients(model))
        model.zero_grad(set_to_none=True)
    blocks, segments = (4, 3, 1), 3
    assert runs[0] == sum(3 * n - 1 for n in blocks) + segments
    assert runs[ALL] == sum(2 * n - 1 for n in blocks)
    assert all(torch.equal(gradient, results[1][name]) for name, gradient in results[0].items())


def kept_after_scoring(engine: longstraw.Engine, state: Any, what: Group) -> tuple[list[int], int]:
    """Lengths of the responses that were kept, and the bytes of their pages; they are not pulled back."""
    used = state.store.used()
    scored = engine.score_for(state, what.responses)
    lengths = [n for place, bundle in enumerate(scored.bundles) if place in scored.kept for n in bundle.lengths]
    pages = state.store.used() - used
    scored.release()
    assert state.store.used() == used
    return lengths, pages


@pytest.mark.parametrize("tier", ["device", "disk"])
def test_what_is_kept_of_scored_responses_fits_into_the_budget(tier: str, tmp_path: Any) -> None:
    model = build("llama", dtype=torch.float32)
    long, short = group(num_prompt=12, lengths=(30, 3, 2)), group(num_prompt=12, lengths=(6,))
    engine = longstraw.Engine(model, prompt_grad="none", retain_graph_bytes=ALL, tier=tier, page_dir=tmp_path, **PIECES)
    with engine.capture(long.prompt) as state:

        def kept(budget: int, what: Group) -> tuple[list[int], int]:
            state.kept.left = budget
            return kept_after_scoring(engine, state, what)

        lengths, pages = kept(ALL, long)
        assert lengths == [30, 3, 2] and pages > 0

        def least(what: Group, length: int) -> int:
            """The smallest budget with which a response of that length is kept."""
            low, high = 1, 1 << 24
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if length in kept(middle, what)[0] else (middle + 1, high)
            return low

        needed = least(long, 30)
        assert needed >= least(short, 6) + pages  # 30 tokens are three blocks of 8, as pages, and a graph of 6
        assert kept(needed - 1, long) == ([3, 2], 0)  # the others are kept all the same


def test_tiers_that_hold_one_response_at_a_time(tmp_path: Any) -> None:
    """Where the bounds leave no room for what could be kept, nothing is, and the step is the same."""
    model, long = build("llama", dtype=torch.float32), group(num_prompt=12, lengths=(30, 29, 28, 27))
    results = []
    for budget in (0, ALL):
        bounds = {"device": 30_000, "host": 0, "disk": 0}
        engine = longstraw.Engine(model, "none", retain_graph_bytes=budget, tier_bytes=bounds, **PIECES)
        with engine.capture(long.prompt) as state:
            engine.backward(state, long.responses, long.objective)
        results.append(reference.gradients(model))
        model.zero_grad(set_to_none=True)
    assert all(torch.equal(gradient, results[1][name]) for name, gradient in results[0].items())


def test_graphs_of_old_parameters_are_not_used() -> None:
    """After an optimizer step on a kept state the gradient is that of the present parameters' own graph."""
    steps = []
    for retain_graph_bytes in (0, 1 << 40):
        model = build("llama", dtype=torch.float32)
        engine = longstraw.Engine(model, retain_graph_bytes=retain_graph_bytes, **PIECES)
        with engine.capture(what().prompt) as state:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            engine.backward(state, what().responses, what().objective)
        steps.append(reference.gradients(model))
    assert all(torch.equal(gradient, steps[1][name]) for name, gradient in steps[0].items())


@pytest.mark.parametrize("option", [o for o in OPTIONS if "graphs" in o])
def test_the_model_keeps_no_graph(option: str) -> None:
    """Once released, nothing of the kept graphs is alive."""
    import gc
    import weakref

    model = build("llama", dtype=torch.float32)
    engine = engine_with(model, OPTIONS[option], **PIECES)
    state = engine.capture(what().prompt)
    outputs = [weakref.ref(kept.run.cache) for kept, _ in state.kept._kept.values()]
    state.release()
    gc.collect()
    assert all(output() is None for output in outputs)


@pytest.mark.parametrize("name", ["retain_graph_bytes", "boundary_bytes"])
@pytest.mark.parametrize("value", [-1, 2.5, True])
def test_budgets_are_bytes(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r}.*bytes"):
        longstraw.Engine(build("llama", dtype=torch.float32), **{name: value})


@pytest.mark.parametrize("family", ["mistral", "qwen3_5"])
def test_states_at_boundaries_stay_within_their_bytes(family: str) -> None:
    """Where a stride fits at all; a window is counted full, although the first pieces leave less than one."""
    model = build(family, dtype=torch.float32)
    kind = "window" if family == "mistral" else "recurrent"
    with longstraw.Engine(model, segment_tokens=5).capture(what().prompt) as state:
        every = state.nbytes[kind]["device"]
        assert state.boundary_stride == 1
    for boundary_bytes in (every * 9 // 10, every * 11 // 10, every * 2):
        engine = longstraw.Engine(model, segment_tokens=5, boundary_bytes=boundary_bytes)
        with engine.capture(what().prompt) as state:
            assert state.nbytes[kind]["device"] <= boundary_bytes
            assert state.boundary_stride == 1 or boundary_bytes < every * 2
