"""From groups of responses to rewards: what the reward functions are given, and what they said, group by group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longstraw.data.text import TextCodec
from longstraw.objective import combine_rewards
from longstraw.rollout.groups import Group
from longstraw.rollout.rewards import RewardFunction, RewardScores, score


@dataclass
class Judged:
    """A group with what the reward functions said about it.

    Attributes:
        group: with its rewards.
        completions: as the functions saw them.
        scores: of its samples; `metrics` are those of all groups that were judged together.
    """

    group: Group
    completions: list[Any]
    scores: RewardScores


def judge(
    rewards: Sequence[RewardFunction],
    weights: Sequence[float] | None,
    groups: Sequence[Group],
    codec: TextCodec,
    trainer_state: Any,
) -> dict[int, Judged]:
    """Call the reward functions on all groups at once and give every group its rewards. Returns them by position."""
    if not groups:
        return {}
    completions = [
        codec.decode_completions(group.prompt.prompt, [ids.tolist() for ids in group.responses]) for group in groups
    ]
    scores = score_groups(rewards, groups, [one for entries in completions for one in entries], trainer_state)
    totals = combine_rewards(scores.per_function, weights).tolist()
    judged = {}
    begin = 0
    for group, decoded in zip(groups, completions, strict=True):
        samples = slice(begin, begin + len(group.responses))
        begin = samples.stop
        group.rewards = [None if total != total else total for total in totals[samples]]
        extra = {column: values[samples] for column, values in scores.extra.items()}
        own = RewardScores(scores.names, scores.per_function[samples], extra, scores.metrics)
        judged[group.position] = Judged(group, decoded, own)
    return judged


def score_groups(
    rewards: Sequence[RewardFunction], groups: Sequence[Group], completions: Sequence[Any], trainer_state: Any
) -> RewardScores:
    """Call the reward functions on all responses of the groups; every prompt and column is repeated for its group."""
    samples = [(group, index, ids.tolist()) for group in groups for index, ids in enumerate(group.responses)]
    names = dict.fromkeys(name for group in groups for name in [*group.prompt.columns, *group.columns])

    def column(name: str) -> list[Any]:
        return [
            group.columns[name][index] if name in group.columns else group.prompt.columns.get(name)
            for group, index, _ in samples
        ]

    return score(
        rewards,
        prompts=[group.prompt.prompt for group, _, _ in samples],
        completions=completions,
        completion_ids=[ids for _, _, ids in samples],
        columns={name: column(name) for name in names},
        trainer_state=trainer_state,
        step=trainer_state.global_step + 1,
    )
