"""Rollouts by a function of the user's: tools, environments, several turns. Tokens not the policy's are not scored.

The function, `def` or `async def`, is called once a prompt, with keyword arguments:

    prompt              the prompt as the dataset has it
    prompt_ids          its token ids, a list
    row                 the row's other columns
    num_generations     responses wanted
    engine, state       the engine and the prompt's captured state: `engine.sample(state, **sampling)`
    sampling            keyword arguments of `engine.sample`, the seed among them
    tokenizer           None for a model that is given ids

and returns a mapping with `completion_ids`, a list of ids for each response; optionally `env_mask`, for each a list of
1 where the policy chose the token and 0 where a tool or environment wrote it (TRL's name): those are attended, never
scored; and further columns with one value a response, which the reward functions receive. The same seed has to give the
same responses: a resumed run relies on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import isawaitable
from typing import Any

import torch

from longstraw.data.text import is_token_ids
from longstraw.engine.sample import Draft
from longstraw.rollout.asynchronous import wait_for


class RolloutError(RuntimeError):
    """A rollout function raised or returned what is no rollout. The message names function and dataset row."""


def call_rollout(
    function: Callable[..., Any], where: str, stop_ids: Sequence[int], num_generations: int, **keywords: Any
) -> tuple[list[Draft], list[torch.Tensor], dict[str, list[Any]]]:
    """Call the function and check what it returns.

    Returns:
        Responses without log-probabilities; bool masks [R_i], True where the policy chose the token; further columns.
    Raises:
        RolloutError: the function raised, or what it returned does not fit.
    """
    name = f"rollout_func '{getattr(function, '__name__', function)}' on {where}"
    try:
        output = function(num_generations=num_generations, **keywords)
        if isawaitable(output):
            output = wait_for(output)
    except Exception as error:
        raise RolloutError(f"{name} raised {type(error).__name__}: {error}") from error
    if not isinstance(output, Mapping) or "completion_ids" not in output:
        raise RolloutError(f"{name} returned {type(output).__name__}; it must return a mapping with 'completion_ids'.")
    further = {
        column: list(values) for column, values in output.items() if column not in ("completion_ids", "env_mask")
    }
    completion_ids = [ids.tolist() if isinstance(ids, torch.Tensor) else list(ids) for ids in output["completion_ids"]]
    env_masks = output.get("env_mask") or [[1] * len(ids) for ids in completion_ids]
    for column, values in {"completion_ids": completion_ids, "env_mask": env_masks, **further}.items():
        if len(values) != num_generations:
            raise RolloutError(f"{name} returned {len(values)} values in '{column}' for {num_generations} responses.")
    drafts, masks = [], []
    for index, (ids, env_mask) in enumerate(zip(completion_ids, env_masks, strict=True)):
        if not is_token_ids(ids):
            raise RolloutError(f"{name}: response {index} is not a list of token ids.")
        if len(env_mask) != len(ids):
            raise RolloutError(
                f"{name}: response {index} has {len(ids)} ids and {len(env_mask)} entries in its env_mask."
            )
        ended = not ids or ids[-1] in stop_ids
        drafts.append(Draft(torch.tensor(ids, dtype=torch.long), torch.empty(0), "stop" if ended else "length"))
        masks.append(torch.tensor([bool(entry) for entry in env_mask], dtype=torch.bool))
    return drafts, masks, further
