"""The reward contract: what functions are called with, what they may return, and what a failure says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerState

from longstraw.data.prompts import Prompt
from longstraw.data.text import TextCodec
from longstraw.rollout.judge import Judge
from longstraw.rollout.records import Group, Rollout
from longstraw.rollout.rewards import RewardError, RewardFunction, load_reward


class Letters(TextCodec):
    """One letter a token, nothing being "d"."""

    def decode_completions(self, prompt: Any, completions: Sequence[Sequence[int]]) -> list[str]:
        return ["dabc"[sum(ids)] for ids in completions]


def call(*functions: Any, **columns: list[Any]) -> tuple[list[Rollout], dict[str, float]]:
    """Four rollouts, two a prompt, as the functions judged them, and what they logged."""
    ids = [torch.tensor([1]), torch.tensor([2]), torch.tensor([3]), torch.tensor([], dtype=torch.long)]
    rollouts = [
        Rollout(entry, entry > 0, "stop", columns={name: values[place] for name, values in columns.items()})
        for place, entry in enumerate(ids)
    ]
    prompts = [Prompt(row, np.array([row]), text, {"level": row}) for row, text in enumerate("pq")]
    groups = [Group(0, prompts[0], rollouts[:2]), Group(1, prompts[1], rollouts[2:])]
    rewards = [RewardFunction(function.__name__, function) for function in functions]
    return rollouts, Judge(rewards, None, Letters(None))(groups, TrainerState(global_step=6))


def test_functions_get_trls_keywords() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: list[str], completions: list[str], answer: list[int], **rest: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions, answer=answer, **rest)
        rest["log_extra"]("verdict", ["good", "bad", "good", "bad"])
        rest["log_metric"]("share", 0.5)
        rest["log_metric"]("share", 1.0)
        return [float(number) for number in answer]

    rollouts, logged = call(reward, answer=[1, 2, 3, 4], prompt=["never", "passed", "twice", "!"])
    assert seen["prompts"] == ["p", "p", "q", "q"] and seen["completion_ids"] == [[1], [2], [3], []]
    assert seen["trainer_state"].global_step == 6 and "prompt" not in seen
    assert seen["completions"] == ["a", "b", "c", "d"] and seen["level"] == [0, 0, 1, 1]
    assert [rollout.rewards for rollout in rollouts] == [
        {"reward": 1.0},
        {"reward": 2.0},
        {"reward": 3.0},
        {"reward": 4.0},
    ]
    assert [rollout.extra["verdict"] for rollout in rollouts] == ["good", "bad", "good", "bad"]
    assert [rollout.completion for rollout in rollouts] == ["a", "b", "c", "d"] and logged == {"share": 0.75}


def test_async_functions_run_together_beside_sync_ones() -> None:
    arrived = []

    async def first(completions: list[str], **_: Any) -> list[float]:
        arrived.append("first")
        while len(arrived) < 2:  # ends only if the second is started before this one is done
            await asyncio.sleep(0)
        return [1.0] * len(completions)

    async def second(completions: list[str], **_: Any) -> list[None]:
        arrived.append("second")
        return [None] * len(completions)

    def third(completions: list[str], **_: Any) -> list[int]:
        return list(range(len(completions)))

    rollouts, _ = call(first, second, third)
    assert list(rollouts[2].rewards.items()) == [("first", 1.0), ("second", None), ("third", 2.0)]
    assert rollouts[2].reward == 3.0


def test_numbers_of_every_kind() -> None:
    def reward(**_: Any) -> Any:
        return [True, np.float32(0.5), torch.tensor(2), float("nan")]

    assert [rollout.reward for rollout in call(reward)[0]] == [1.0, 0.5, 2.0, None]
    assert [rollout.reward for rollout in call(RewardLike())[0]] == [1.0] * 4


class RewardLike:
    __name__ = "RewardLike"

    async def __call__(self, completions: list[str], **_: Any) -> torch.Tensor:
        return torch.ones(len(completions))


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        ([1.0], "reward function 'reward' at step 7 returned 1 values for 4 completions"),
        (1.0, "returned float; it must return a list"),
        ([1.0, 2.0, "high", 3.0], "sample 2, returned 'high' of type str"),
        ([1.0, float("inf"), 0.0, 0.0], "sample 1, returned inf"),
        (None, "returned NoneType"),
    ],
)
def test_what_is_no_reward_names_function_and_sample(output: Any, problem: str) -> None:
    def reward(**_: Any) -> Any:
        return output

    with pytest.raises(RewardError) as raised:
        call(reward)
    assert problem in str(raised.value)


def test_an_exception_names_function_sample_and_step() -> None:
    def picky(completions: list[str], **_: Any) -> list[float]:
        return [{"a": 1.0, "b": 2.0, "d": 0.0}[completion] for completion in completions]

    with pytest.raises(RewardError, match="'picky' raised KeyError at step 7 on sample 2"):
        call(picky)

    async def picky_later(completions: list[str], **_: Any) -> list[float]:
        return picky(completions)

    with pytest.raises(RewardError, match="'picky_later' raised KeyError at step 7 on sample 2"):
        call(picky_later)

    def crowded(completions: list[str], **_: Any) -> list[float]:
        if len(completions) > 1:
            raise OverflowError("too many")
        return [0.0]

    with pytest.raises(RewardError, match=r"the batch of 4 samples \(no sample raises alone\): too many"):
        call(crowded)


def test_log_extra_needs_one_value_a_sample() -> None:
    def reward(log_extra: Any, **_: Any) -> list[float]:
        log_extra("note", ["one"])
        return [0.0] * 4

    with pytest.raises(RewardError, match="log_extra was given 1 values for column 'note' at step 7, for 4 samples"):
        call(reward)


def test_references() -> None:
    assert load_reward("tiny:closeness").name == "closeness"
    with pytest.raises(ValueError, match="there is no function 'absent' in tiny"):
        load_reward("tiny:absent")
    with pytest.raises(ValueError, match="neither 'module:function' nor a sequence-classification model"):
        load_reward("./no/such/model")
