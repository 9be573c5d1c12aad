"""A function of the user's as the sampler: tools, environments, several turns. Tokens not the policy's are not scored.

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
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

import torch

from longstraw.data.prompts import Prompt
from longstraw.data.text import is_token_ids
from longstraw.engine.engine import Engine
from longstraw.rollout.asynchronous import wait_for
from longstraw.rollout.handed import own_copy
from longstraw.rollout.records import Rollout
from longstraw.state.resident import ResidentState


class RolloutError(RuntimeError):
    """A rollout function raised or returned what is no rollout. The message names function and dataset row."""


@dataclass
class FunctionSampler:
    """Calls the function, checks what it returns. Raises RolloutError where it raised or its output does not fit.

    Attributes:
        engine: over the policy; handed to the function.
        tokenizer: handed to the function; None for a model that is given ids.
    """

    function: Callable[..., Any]
    engine: Engine
    tokenizer: Any | None

    def sample(self, prompt: Prompt, state: ResidentState, sampling: dict[str, Any], version: int) -> list[Rollout]:
        num_generations, stop_ids = sampling["num"], sampling["stop_ids"]
        name = f"rollout_func '{getattr(self.function, '__name__', self.function)}' on {prompt.name}"
        try:
            output = self.function(
                num_generations=num_generations,
                prompt=own_copy(prompt.prompt),
                prompt_ids=prompt.ids.tolist(),
                row=own_copy(prompt.columns),
                engine=self.engine,
                state=state,
                sampling=own_copy(sampling),
                tokenizer=self.tokenizer,
            )
            if isawaitable(output):
                output = wait_for(output)
        except Exception as error:
            raise RolloutError(f"{name} raised {type(error).__name__}: {error}") from error
        return _read(output, name, num_generations, stop_ids, version)


def _read(output: Any, name: str, num_generations: int, stop_ids: Sequence[int], version: int) -> list[Rollout]:
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
    rollouts = []
    for index, (ids, env_mask) in enumerate(zip(completion_ids, env_masks, strict=True)):
        if not is_token_ids(ids):
            raise RolloutError(f"{name}: response {index} is not a list of token ids.")
        if len(env_mask) != len(ids):
            raise RolloutError(
                f"{name}: response {index} has {len(ids)} ids and {len(env_mask)} entries in its env_mask."
            )
        mask = torch.tensor([bool(entry) for entry in env_mask], dtype=torch.bool)
        rollouts.append(
            Rollout(
                torch.tensor(ids, dtype=torch.long),
                mask,
                "stop" if not ids or ids[-1] in stop_ids else "length",
                num_chosen=int(mask.sum()),
                policy_version=version,
                columns={column: values[index] for column, values in further.items()},
            )
        )
    return rollouts
