"""What a batch of rollouts says about itself, by TRL's names; and its completions as rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from longstraw.data.text import TextCodec
from longstraw.rollout.records import Batch
from longstraw.trainer.metrics import Row
from longstraw.trainer.statistics import describe, mean_and_deviation

_EXCERPT_TOKENS = 200


def rollout_metrics(batch: Batch) -> Row:
    """Rewards, lengths, truncation, prompts without signal; None where there is nothing to average."""
    rollouts = batch.rollouts
    stopped = [rollout for rollout in rollouts if rollout.finish_reason == "stop"]
    mean, deviation = mean_and_deviation(rollout.reward for rollout in rollouts)
    row: Row = {"reward": mean, "reward_std": deviation}
    for name in batch.reward_names:
        mean, deviation = mean_and_deviation(rollout.rewards[name] for rollout in rollouts)
        row |= {f"rewards/{name}/mean": mean, f"rewards/{name}/std": deviation}
    flat = [not group.rewards_differ for group in batch.groups]
    row["frac_reward_zero_std"] = sum(flat) / len(flat) if flat else None
    row["groups/replaced"] = batch.num_replaced
    row |= describe((rollout.num_chosen for rollout in rollouts), "completions/{}_length")
    row["completions/clipped_ratio"] = 1 - len(stopped) / len(rollouts) if rollouts else None
    row |= describe((rollout.num_chosen for rollout in stopped), "completions/{}_terminated_length")
    row |= describe((len(group.prompt.ids) for group in batch.groups), "prompts/{}_length")
    return row | batch.reward_metrics


def completion_rows(batch: Batch, tokenizer: Any | None) -> Iterator[Row]:
    """One row a completion: the prompt's end, the completion, its rewards, advantage, length and ending."""
    codec = TextCodec(tokenizer)
    for group in batch.groups:
        excerpt = codec.excerpt(group.prompt.ids, _EXCERPT_TOKENS)
        for rollout in group.rollouts:
            yield {
                "row": group.prompt.row,
                "prompt_tokens": len(group.prompt.ids),
                "prompt": excerpt,
                "completion": rollout.completion,
                "rewards": rollout.rewards,
                "reward": rollout.reward,
                "advantage": rollout.advantage,
                "completion_tokens": len(rollout.ids),
                "finish_reason": rollout.finish_reason,
                **rollout.extra,
            }
