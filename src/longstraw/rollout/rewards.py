"""Rewards: TRL's contract for reward functions, sync or async, several with weights; what they return is checked."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from longstraw.config.locate import is_function_reference, load_function
from longstraw.rollout.asynchronous import wait_for
from longstraw.rollout.handed import own_copy

Reward = float | None


class RewardError(RuntimeError):
    """A reward function raised or returned what is no reward. The message names function, sample and step."""


@dataclass(frozen=True)
class RewardFunction:
    """A callable with the name it is reported by."""

    name: str
    call: Callable[..., Any]

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(type(self.call).__call__)


def load_reward(reference: str, **model_options: Any) -> RewardFunction:
    """The reward function 'module:function' or 'file.py:function', or a sequence-classification model by path.

    Args:
        model_options: for a model: `device`, `trust_remote_code`, `chat_template_kwargs`.
    Raises:
        ValueError: there is no such function or model.
    """
    if is_function_reference(reference):
        function = load_function(reference, "reward_funcs")
        name = getattr(function, "__name__", "")
        return RewardFunction(name if name.isidentifier() else reference.rsplit(":", 1)[-1], function)
    from longstraw.rollout.reward_model import RewardModel

    model = RewardModel.from_pretrained(reference, **model_options)
    return RewardFunction(model.name, model)


def with_own_names(functions: Sequence[RewardFunction], references: Sequence[str]) -> list[RewardFunction]:
    """The functions under names that differ: where several have one, each is called what the configuration calls it,
    and one that is there twice is counted."""
    shared = Counter(function.name for function in functions)
    named = [r if shared[f.name] > 1 else f.name for f, r in zip(functions, references, strict=True)]
    so_far: Counter[str] = Counter()
    result = []
    for function, name in zip(functions, named, strict=True):
        so_far[name] += 1
        own = name if so_far[name] == 1 else f"{name} ({so_far[name]})"
        result.append(RewardFunction(own, function.call))
    return result


def call_rewards(
    functions: Sequence[RewardFunction], keywords: dict[str, Any], num_samples: int, step: int
) -> list[list[Reward]]:
    """Call every function with keyword arguments of its own, the async ones together, and check what comes back.

    Args:
        keywords: of TRL's contract; what has one value a sample is a list.
        step: for messages.
    Returns:
        [num_samples][num_functions]; None where a function left the sample out.
    Raises:
        RewardError: a function raised, returned the wrong number of values, or a value that is no number.
    """
    outputs: list[Any] = [None] * len(functions)
    for index, function in enumerate(functions):
        if not function.is_async:
            try:
                outputs[index] = function.call(**_own(keywords))
                if inspect.isawaitable(outputs[index]):
                    outputs[index] = wait_for(outputs[index])
            except Exception as error:
                raise _raised(function, error, keywords, num_samples, step) from error
    waiting = [index for index, function in enumerate(functions) if function.is_async]
    for index, result in zip(waiting, _run_async([functions[index] for index in waiting], keywords), strict=True):
        if isinstance(result, Exception):
            raise _raised(functions[index], result, keywords, num_samples, step) from result
        outputs[index] = result

    values = [_checked(*pair, num_samples, step) for pair in zip(functions, outputs, strict=True)]
    return [list(row) for row in zip(*values, strict=True)]


def _run_async(functions: Sequence[RewardFunction], keywords: dict[str, Any]) -> list[Any]:
    """Results or exceptions, in order."""
    if not functions:
        return []

    async def gather() -> list[Any]:
        calls = (function.call(**_own(keywords)) for function in functions)
        return await asyncio.gather(*calls, return_exceptions=True)

    return wait_for(gather())


def _own(keywords: dict[str, Any]) -> dict[str, Any]:
    """For one function: samples of a group share their prompt and columns, and functions their samples."""
    return {name: own_copy(value) for name, value in keywords.items()}


def _checked(function: RewardFunction, output: Any, num_samples: int, step: int) -> list[Reward]:
    where = f"reward function '{function.name}' at step {step}"
    try:
        values = list(output)
    except TypeError:
        raise RewardError(
            f"{where} returned {type(output).__name__}; it must return a list with one number a completion."
        ) from None
    if len(values) != num_samples:
        raise RewardError(
            f"{where} returned {len(values)} values for {num_samples} completions; it must return one each."
        )
    return [_checked_value(value, f"{where}, sample {index},") for index, value in enumerate(values)]


def _checked_value(value: Any, where: str) -> Reward:
    if value is None:
        return None
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise RewardError(
            f"{where} returned {value!r} of type {type(value).__name__}; a reward is a number, or None to leave out."
        )
    number = float(value)
    if math.isinf(number):
        raise RewardError(f"{where} returned {number}; a reward is finite, or None to leave the sample out.")
    return None if math.isnan(number) else number


def _raised(
    function: RewardFunction, error: Exception, keywords: dict[str, Any], num_samples: int, step: int
) -> RewardError:
    sample = _find_failing_sample(function, keywords, num_samples)
    which = f"sample {sample}" if sample is not None else f"the batch of {num_samples} samples (no sample raises alone)"
    return RewardError(
        f"reward function '{function.name}' raised {type(error).__name__} at step {step} on {which}: {error}. Correct "
        "the function, or let it return None for a sample it cannot judge."
    )


def _find_failing_sample(function: RewardFunction, keywords: dict[str, Any], num_samples: int) -> int | None:
    """Call the function sample by sample, as a diagnosis after it has raised on the batch."""
    for index in range(num_samples):
        single = {
            name: [value[index]] if isinstance(value, list) and len(value) == num_samples else value
            for name, value in keywords.items()
        }
        single |= {"log_extra": lambda column, values: None, "log_metric": lambda name, value: None}
        try:
            output = function.call(**_own(single))
            if inspect.isawaitable(output):
                wait_for(output)
        except Exception:
            return index
    return None
