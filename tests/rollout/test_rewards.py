"""The reward contract: what functions are called with, what they may return, and what a failure says."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerState

from longstraw.rollout.rewards import RewardError, RewardFunction, RewardScores, load_reward, score


def call(*functions: Any, **columns: list[Any]) -> RewardScores:
    return score(
        [RewardFunction(function.__name__, function) for function in functions],
        prompts=["p", "p", "q", "q"],
        completions=["a", "b", "c", "d"],
        completion_ids=[[1], [2], [3], []],
        columns=columns,
        trainer_state=TrainerState(global_step=6),
        step=7,
    )


def test_functions_get_trls_keywords() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: list[str], completions: list[str], answer: list[int], **rest: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions, answer=answer, **rest)
        rest["log_extra"]("verdict", ["good", "bad", "good", "bad"])
        rest["log_metric"]("share", 0.5)
        rest["log_metric"]("share", 1.0)
        return [float(number) for number in answer]

    scores = call(reward, answer=[1, 2, 3, 4], prompt=["never", "passed", "twice", "!"])
    assert seen["prompts"] == ["p", "p", "q", "q"] and seen["completion_ids"] == [[1], [2], [3], []]
    assert seen["trainer_state"].global_step == 6 and "prompt" not in seen
    assert scores.per_function == [[1.0], [2.0], [3.0], [4.0]]
    assert scores.extra == {"verdict": ["good", "bad", "good", "bad"]} and scores.metrics == {"share": 0.75}


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

    scores = call(first, second, third)
    assert scores.names == ["first", "second", "third"]
    assert scores.per_function[2] == [1.0, None, 2.0]


def test_numbers_of_every_kind() -> None:
    def reward(**_: Any) -> Any:
        return [True, np.float32(0.5), torch.tensor(2), float("nan")]

    assert call(reward).per_function == [[1.0], [0.5], [2.0], [None]]
    assert call(RewardLike()).per_function == [[1.0]] * 4


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
