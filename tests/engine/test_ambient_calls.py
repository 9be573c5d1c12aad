"""Trees, grown states and the comparison at construction: as the other calls, the same in whatever surrounds them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import reference
import torch
from families import build
from group import group
from test_ambient import MODES

import longstraw

WHAT = group(num_prompt=30, lengths=(5, 3))
MORE = torch.arange(7) % 5
BFLOAT16 = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731


def tree() -> longstraw.Tree:
    sequences = [torch.cat([WHAT.prompt, ids]) for ids in WHAT.responses]
    masks = [[place >= len(WHAT.prompt) for place in range(len(ids))] for ids in sequences]
    return longstraw.Tree.from_sequences(sequences, masks)


def all_calls(model: Any) -> list[torch.Tensor]:
    """Everything that a step of trees and a grown state compute."""
    model.zero_grad(set_to_none=True)
    engine = longstraw.Engine(model, segment_tokens=9, block_tokens=4)
    outcome = engine.backward_tree(tree(), WHAT.objective)
    found = [outcome.loss, *outcome.logps, *outcome.entropies, *engine.score_tree(tree())]
    with engine.capture(WHAT.prompt) as state:
        grown = state.fork()
        engine.extend(grown, MORE)
        engine.extend(grown, MORE)
        found += engine.score(grown, WHAT.responses)
        found += [draft.logps for draft in engine.sample(grown, num=2, max_new_tokens=3)]
        further = grown.fork()
        engine.extend(further, MORE)
        found += engine.score(further, WHAT.responses)
    found += reference.gradients(model).values()
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "qwen3_5_moe"])
def test_the_same_bits_in_every_mode(family: str, mode: str) -> None:
    """The model is new each time: the engine compares it with the stock one in that mode."""
    expected = all_calls(build(family, dtype=torch.float32))
    model = build(family, dtype=torch.float32)
    with MODES[mode]():
        found = all_calls(model)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected))


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_is_made_in_every_mode(mode: str) -> None:
    model = build("llama", dtype=torch.float32).to(torch.bfloat16).to(torch.float32)  # has its rotary table repaired
    with pytest.warns(UserWarning, match="rotary"), MODES[mode]():
        engine = longstraw.Engine(model)
    assert engine.trial.num_tokens
    with engine.capture(WHAT.prompt) as state:
        engine.backward(state, WHAT.responses, WHAT.objective)


def test_an_engine_made_in_a_transform_is_refused() -> None:
    model = build("llama", dtype=torch.float32)

    def make(x: torch.Tensor) -> torch.Tensor:
        longstraw.Engine(model)
        return x * 2

    with pytest.raises(RuntimeError, match=r"inside a transform of torch.func"):
        torch.func.grad(make)(torch.tensor(1.0))


def test_a_tree_is_pulled_back_under_the_autocast_it_was_scored_under() -> None:
    model = build("llama", dtype=torch.float32)
    engine = longstraw.Engine(model, segment_tokens=9, block_tokens=4)

    def gradients(score: bool, pull: bool) -> dict[str, torch.Tensor]:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=score):
            scored = engine.score_tree_for(tree())
        WHAT.objective(scored.logps).backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=pull):
            engine.pull_back(scored)
        return reference.gradients(model)

    cast, plain = gradients(True, True), gradients(False, False)
    for expected, score in ((cast, True), (plain, False)):
        found = gradients(score, not score)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert any(not torch.equal(cast[name], plain[name]) for name in plain)


def test_a_fork_is_grown_under_the_autocast_of_its_capture() -> None:
    engine = longstraw.Engine(build("llama", dtype=torch.float32))
    with engine.capture(WHAT.prompt) as state:
        grown = state.fork()
        with BFLOAT16(), pytest.raises(ValueError, match=r"captured under no autocast and is used under"):
            engine.extend(grown, MORE)


@pytest.mark.parametrize("call", ["score_tree", "score_tree_for", "pull_back", "extend"])
def test_random_numbers_and_nested_calls_are_refused(call: str) -> None:
    model, noisy, nested = build("llama", dtype=torch.float32), [], []
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, output: output + 0.1 * torch.randn_like(output) if noisy else None
    )
    engine = longstraw.Engine(model, segment_tokens=9, progress=lambda *_: nested and engine.score_tree(tree()))
    with engine.capture(WHAT.prompt) as state:
        for ahead, message in ((nested, "called from within one of its own calls"), (noisy, "drew random numbers")):
            grown, scored = state.fork(), engine.score_tree_for(tree())
            ahead.append(True)
            with pytest.raises(RuntimeError, match=message):
                if call == "score_tree":
                    engine.score_tree(tree())
                elif call == "score_tree_for":
                    engine.score_tree_for(tree())
                elif call == "pull_back":
                    engine.pull_back(scored, [torch.ones(len(logp)) for logp in scored.logps])
                else:
                    engine.extend(grown, MORE)
            ahead.clear()
            scored.release()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_engine_waits_for_its_turn_to_compare() -> None:
    model = build("llama", dtype=torch.float32)
    made = threading.Event()
    threads: list[threading.Thread] = []

    def other() -> None:
        longstraw.Engine(model)
        made.set()

    def start(*_: Any) -> None:
        if not threads:
            threads.append(threading.Thread(target=other))
            threads[0].start()
            assert not made.wait(0.2)

    engine = longstraw.Engine(model, segment_tokens=9, progress=start)
    engine.capture(WHAT.prompt).release()
    assert made.wait(20)
    threads[0].join()
