"""A fork of a state grows turn by turn and is what a capture of the whole prompt is, without running it again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import VOCAB, build

import longstraw

PIECES = dict(segment_tokens=7, block_tokens=5)
FAMILIES = ["llama", "mistral", "qwen3_5", "glm_moe_dsa", "falcon_h1"]


def draw(num: int, seed: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (num,), generator=torch.Generator().manual_seed(seed))


def pages(state: Any) -> list[tuple[int, list[torch.Tensor]]]:
    return [(page.number, [t.clone() for t in state.store.fetch(page)]) for page in state.store.table]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("float64_inside")
def test_a_grown_fork_is_the_capture_of_the_whole(family: str) -> None:
    """Two turns, the first of one token, and a fork of the fork."""
    prompt, turns, response = draw(20, 0), [draw(1, 1), draw(17, 2), draw(4, 3)], draw(12, 4)
    engine = longstraw.Engine(build(family), **PIECES)
    with engine.capture(prompt) as state:
        before, fork = pages(state), state.fork()
        engine.extend(fork, turns[0])
        engine.extend(fork, turns[1])
        other = fork.fork()
        engine.extend(other, turns[2])
        for grown, ids in ((state, [prompt]), (fork, [prompt, *turns[:2]]), (other, [prompt, *turns])):
            assert torch.equal(grown.prompt_ids, torch.cat(ids)) and len(grown) == len(torch.cat(ids))
            with engine.capture(torch.cat(ids)) as whole:
                ours, theirs = (engine.score(one, [response])[0] for one in (grown, whole))
                torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
                ours, theirs = (engine.sample(one, num=2, max_new_tokens=6, seed=3) for one in (grown, whole))
                for draft, expected in zip(ours, theirs, strict=True):
                    assert torch.equal(draft.ids, expected.ids)
                    torch.testing.assert_close(draft.logps, expected.logps, rtol=1e-11, atol=1e-11)
        other.release()
        fork.release()
        after = pages(state)
        assert [number for number, _ in before] == [number for number, _ in after]
        assert all(torch.equal(a, b) for (_, one), (_, two) in zip(before, after) for a, b in zip(one, two))


def test_a_fork_keeps_few_carried_states() -> None:
    engine = longstraw.Engine(build("qwen3_5", dtype=torch.float32), **PIECES)
    with engine.capture(draw(20, 0)) as state:
        fork = state.fork()
        before = state.nbytes["recurrent"]["device"]
        engine.extend(fork, draw(7, 1))
        one = state.nbytes["recurrent"]["device"] - before
        engine.extend(fork, draw(70, 2))
        assert state.nbytes["recurrent"]["device"] - before <= 2 * one


def test_what_a_fork_is_not_for() -> None:
    model = build("llama", dtype=torch.float32, max_position_embeddings=40)
    engine = longstraw.Engine(model, **PIECES)
    state = engine.capture(draw(20, 0))
    with pytest.raises(ValueError, match="grow a fork of it"):
        engine.extend(state, [1, 2])
    fork = state.fork()
    for ids, words in (([VOCAB], "outside the vocabulary"), ([1] * 21, "max_position_embeddings=40")):
        with pytest.raises(ValueError, match=words):
            engine.extend(fork, ids)
    with pytest.raises(ValueError, match="backward_tree"):
        engine.backward(fork, [[1, 2]], lambda logps: logps[0].sum())
    assert not fork.released
    engine.extend(fork, [])
    assert len(fork) == 20

    def failing(phase: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    number = len(state.store.table)
    with pytest.raises(KeyboardInterrupt):
        longstraw.Engine(model, progress=failing, **PIECES).extend(fork, [1, 2])
    assert fork.released and not state.released and len(state.store.table) == number
    late = state.fork()
    state.release()
    assert late.released
    late.release()
    with pytest.raises(ValueError, match="released"):
        engine.sample(late)
    with pytest.raises(ValueError, match="released"):
        state.fork()
