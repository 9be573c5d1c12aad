"""Rollouts by a user's function: unequal and empty responses, tool tokens that are attended but never scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny_runs import completions, metrics, run, weights

from longstraw.rollout.function_sampler import RolloutError

TOOL = [9, 9, 9]


def with_tool(engine: Any, state: Any, sampling: dict[str, Any], num_generations: int, **_: Any) -> dict[str, Any]:
    """The policy's tokens, then a tool's: of the first response nothing at all."""
    drafts = engine.sample(state, **sampling)
    ids = [[], *[draft.ids.tolist()[: number + 1] + TOOL for number, draft in enumerate(drafts[1:])]]
    masks = [[], *[[1] * (len(entry) - len(TOOL)) + [0] * len(TOOL) for entry in ids[1:]]]
    return {"completion_ids": ids, "env_mask": masks, "turns": list(range(num_generations))}


def by_turns(completion_ids: list[list[int]], turns: list[int], **_: Any) -> list[float]:
    assert all(ids == [] or ids[-3:] == TOOL for ids in completion_ids)
    return [float(turn) for turn in turns]


def test_tool_tokens_are_attended_and_never_scored(tmp_path: Path) -> None:
    run(
        tmp_path, rollout_func="test_function_sampler:with_tool", reward_funcs="test_function_sampler:by_turns",
        max_steps=1, max_completion_length=8, loss_type="grpo", max_grad_norm=0, lr_scheduler_type="constant",
    )  # fmt: skip
    row = metrics(tmp_path)[0]
    assert (row["completions/min_length"], row["completions/max_length"]) == (0.0, 2.0)
    samples = [json.loads(line) for line in completions(tmp_path)["step-000001.jsonl"].splitlines()]
    assert [len(sample["completion"]) for sample in samples] == [0, 4, 5]

    model = tiny.llama()
    prompt = tiny.rows()[samples[0]["row"]]["prompt"]
    loss = torch.zeros(())
    for number, sample in enumerate(samples[1:], start=1):
        ids = torch.tensor([prompt + sample["completion"]])
        logps = model(ids).logits[0].log_softmax(-1)
        places = torch.arange(len(prompt) - 1, len(prompt) - 1 + number)  # the tool's tokens are not among them
        chosen = logps[places, ids[0, places + 1]]
        loss = loss - sample["advantage"] * (chosen - chosen.detach()).exp().mean() / len(samples)
    loss.backward()
    loss = loss.detach()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    assert row["grad_norm"] == pytest.approx(float(norm), rel=1e-5) and row["loss"] == pytest.approx(
        float(loss), abs=1e-6
    )
    assert weights(tmp_path)


def misbehave(how: str) -> Any:
    answers = {
        "none": None,
        "few": {"completion_ids": [[1]]},
        "text": {"completion_ids": ["a", "b", "c"]},
        "mask": {"completion_ids": [[1], [2], [3]], "env_mask": [[1], [1, 1], [1]]},
    }
    return answers[how]


def few(**_: Any) -> Any:
    return misbehave("few")


def none(**_: Any) -> Any:
    return misbehave("none")


def text(**_: Any) -> Any:
    return misbehave("text")


def mask(**_: Any) -> Any:
    return misbehave("mask")


def lost(**_: Any) -> Any:
    raise ConnectionError("no environment")


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("few", "returned 1 values in 'completion_ids' for 3 responses"),
        ("none", "must return a mapping with 'completion_ids'"),
        ("text", "response 0 is not a list of token ids"),
        ("mask", "response 1 has 1 ids and 2 entries in its env_mask"),
        ("lost", "raised ConnectionError: no environment"),
    ],
)
def test_what_is_no_rollout_names_function_and_row(tmp_path: Path, function: str, problem: str) -> None:
    with pytest.raises(RolloutError, match=rf"rollout_func '{function}' on the prompt of dataset row \d") as raised:
        run(tmp_path, rollout_func=f"test_function_sampler:{function}")
    assert problem in str(raised.value)
