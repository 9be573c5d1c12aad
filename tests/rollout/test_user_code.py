"""What users' functions may do: be asynchronous and keep a client, share a name, write to what they were handed."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from tiny_runs import metrics, run
from transformers import TrainerState

from longstraw.data.prompts import Prompt
from longstraw.data.text import TextCodec
from longstraw.rollout.asynchronous import wait_for
from longstraw.rollout.handed import own_copy
from longstraw.rollout.judge import Judge
from longstraw.rollout.records import Group, Rollout
from longstraw.rollout.rewards import RewardFunction, with_own_names


class Words(TextCodec):
    """A message a completion, one word a token."""

    def decode_completions(self, prompt: Any, completions: Sequence[Sequence[int]]) -> list[Any]:
        return [[{"role": "assistant", "content": f"w{ids[0]}"}] for ids in completions]


def call(*functions: Any, prompt: Any = "p", **columns: Any) -> list[list[Any]]:
    """By function, what it gave two responses to one prompt."""
    rollouts = [Rollout(torch.tensor([token]), torch.tensor([True]), "stop") for token in (1, 2)]
    group = Group(0, Prompt(0, np.array([0]), prompt, columns), rollouts)
    rewards = [RewardFunction(str(place), function) for place, function in enumerate(functions)]
    Judge(rewards, None, Words(None))([group], TrainerState(global_step=6))
    assert [rollout.completion[0]["content"] for rollout in rollouts] == ["w1", "w2"]
    return [[rollout.rewards[reward.name] for rollout in rollouts] for reward in rewards]


class Client:
    """Belongs to the loop that first used it, and keeps a task going there."""

    def __init__(self) -> None:
        self.loop: Any = None
        self.beats = 0

    async def ask(self) -> float:
        if self.loop is None:
            self.loop = asyncio.get_running_loop()
            self.task = asyncio.ensure_future(self._beat())
        assert self.loop is asyncio.get_running_loop() and not self.task.done()
        return 1.0

    async def _beat(self) -> None:
        while True:
            self.beats += 1
            await asyncio.sleep(0.001)


def test_an_asynchronous_client_lives_from_call_to_call() -> None:
    client, gate = Client(), asyncio.Semaphore(1)

    async def judge(completions: list[Any], **_: Any) -> list[float]:
        async with gate:
            return [await client.ask() for _ in completions]

    def wrapped(**keywords: Any) -> Any:  # no coroutine function, but returns a coroutine
        return judge(**keywords)

    for _ in range(3):
        assert call(judge, wrapped, partial(judge)) == [[1.0] * 2] * 3
    before = client.beats
    deadline = threading.Event()
    for _ in range(200):
        if client.beats > before:
            break
        deadline.wait(0.01)
    assert client.beats > before  # its task goes on between calls


def test_it_works_where_a_loop_is_running_already() -> None:
    async def judge(completions: list[Any], **_: Any) -> list[float]:
        return [2.0] * len(completions)

    async def notebook() -> Any:
        return call(judge)

    assert asyncio.run(notebook()) == [[2.0, 2.0]]


async def later(num_generations: int, **_: Any) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"completion_ids": [[5 + number] for number in range(num_generations)]}


def test_a_rollout_function_may_be_asynchronous(tmp_path: Path) -> None:
    run(tmp_path, rollout_func="test_user_code:later", max_steps=1)
    assert metrics(tmp_path)[0]["completions/mean_length"] == 1


def test_waiting_passes_exceptions_on() -> None:
    async def fail() -> None:
        raise KeyError("x")

    try:
        wait_for(fail())
    except KeyError as error:
        assert error.args == ("x",)


def test_rewards_that_share_a_name_are_told_apart() -> None:
    names = ["a.py:score", "b.py:score", "b.py:score", "c:other", "deep/model"]
    functions = [RewardFunction(name, len) for name in ("score", "score", "score", "other", "model")]
    named = [function.name for function in with_own_names(functions, names)]
    assert named == ["a.py:score", "b.py:score", "b.py:score (2)", "other", "model"]


def high(completions: list[Any], **_: Any) -> list[float]:
    return [10.0] * len(completions)


closeness = partial(tiny.closeness)


def test_every_reward_is_in_the_records_of_a_run(tmp_path: Path) -> None:
    references = ["tiny:closeness", "test_user_code:closeness", "test_user_code:high"]
    run(tmp_path, reward_funcs=references, max_steps=1)
    row = metrics(tmp_path)[0]
    kept = json.loads(next((tmp_path / "completions").iterdir()).read_text().splitlines()[0])["rewards"]
    assert list(kept) == ["tiny:closeness", "test_user_code:closeness", "high"]
    assert [row[f"rewards/{name}/mean"] is None for name in kept] == [False] * 3 and row["rewards/high/mean"] == 10


def test_what_a_function_writes_nobody_else_sees() -> None:
    shared = [{"role": "user", "content": "hi"}]
    tags: list[int] = []

    def writes(prompts: list[Any], completions: list[Any], completion_ids: list[Any], tags: list[Any], **_: Any) -> Any:
        assert [len(prompt) for prompt in prompts] == [1, 1] and tags == [[], []]  # nor does a sibling
        for prompt, completion, ids, tag in zip(prompts, completions, completion_ids, tags):
            prompt.append(completion[0])
            completion[0]["content"] = "rewritten"
            ids.append(9)
            tag.append(1)
            assert [len(prompt) for prompt in prompts].count(2) == len([tag for tag in tags if tag])
        prompts.clear()
        return [0.0, 0.0]

    async def writes_later(**keywords: Any) -> Any:
        return writes(**keywords)

    for _ in range(2):
        call(writes, writes_later, writes, prompt=shared, tags=tags)
    assert shared == [{"role": "user", "content": "hi"}] and tags == []


def test_an_own_copy() -> None:
    other = object()
    value = {"a": [1, [2, {"b": {3}}]], "c": (4, [5]), "d": np.arange(2), "e": other, "f": [1, 2, None]}
    copy = own_copy(value)
    copy["a"][1][1]["b"].add(0)
    copy["c"][1].append(0)
    copy["d"][0] = 7
    copy["f"].append(0)
    assert value["a"] == [1, [2, {"b": {3}}]] and value["c"] == (4, [5]) and value["f"] == [1, 2, None]
    assert value["d"].tolist() == [0, 1] and copy["e"] is other
