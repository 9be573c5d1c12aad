"""From rollouts to rewards: what the reward functions are given, and what they said, written into each rollout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longstraw.data.text import TextCodec
from longstraw.objective import combine_rewards
from longstraw.rollout.records import Group, Rollout
from longstraw.rollout.rewards import RewardError, RewardFunction, call_rewards

# Columns with these names are the contract's own and are not passed twice.
RESERVED_COLUMNS = ("prompt", "completion", "completion_ids")


@dataclass(frozen=True)
class Judge:
    """Has reward functions judge rollouts.

    Attributes:
        weights: one a function; None weighs each with 1.
    """

    functions: Sequence[RewardFunction]
    weights: Sequence[float] | None
    codec: TextCodec

    def __call__(self, groups: Sequence[Group], trainer_state: Any) -> dict[str, float]:
        """Call the functions on all rollouts of the groups at once, and give every rollout its rewards.

        Returns:
            Means of what the functions gave to `log_metric`.
        Raises:
            RewardError: a function raised, or what it returned or logged does not fit.
        """
        for group in groups:
            decoded = self.codec.decode_completions(group.prompt.prompt, [ids.tolist() for ids in group.responses])
            for rollout, completion in zip(group.rollouts, decoded, strict=True):
                rollout.completion = completion
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if not rollouts:
            return {}
        extra: dict[str, list[Any]] = defaultdict(list)
        logged: dict[str, list[float]] = defaultdict(list)

        def log_extra(column: str, values: list[Any]) -> None:
            extra[column].extend(values)

        def log_metric(name: str, value: float) -> None:
            logged[name].append(float(value))

        step = trainer_state.global_step + 1
        keywords = _columns(groups) | {
            "prompts": [group.prompt.prompt for group in groups for _ in group.rollouts],
            "completions": [rollout.completion for rollout in rollouts],
            "completion_ids": [rollout.ids.tolist() for rollout in rollouts],
            "trainer_state": trainer_state,
            "log_extra": log_extra,
            "log_metric": log_metric,
        }
        values = call_rewards(self.functions, keywords, len(rollouts), step)
        for column, entries in extra.items():
            if len(entries) != len(rollouts):
                raise RewardError(
                    f"log_extra was given {len(entries)} values for column '{column}' at step {step}, for "
                    f"{len(rollouts)} samples. Give one a sample."
                )
        totals = combine_rewards(values, self.weights).tolist()
        names = [function.name for function in self.functions]
        for place, (rollout, total) in enumerate(zip(rollouts, totals, strict=True)):
            rollout.rewards = dict(zip(names, values[place], strict=True))
            rollout.reward = None if total != total else total
            rollout.extra = {column: entries[place] for column, entries in extra.items()}
        return {name: sum(entries) / len(entries) for name, entries in logged.items()}


def _columns(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """The dataset's columns and those of a rollout function, which win, with one value a rollout."""
    samples: list[tuple[dict[str, Any], Rollout]] = [
        (group.prompt.columns, rollout) for group in groups for rollout in group.rollouts
    ]
    names = dict.fromkeys(name for row, rollout in samples for name in [*row, *rollout.columns])
    return {
        name: [rollout.columns.get(name, row.get(name)) for row, rollout in samples]
        for name in names
        if name not in RESERVED_COLUMNS
    }
