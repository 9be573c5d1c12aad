"""What a batch of rollouts says about itself, by TRL's names; and its completions as rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from longstraw.data.text import TextCodec
from longstraw.rollout.groups import Batch
from longstraw.trainer.metrics import Row
from longstraw.trainer.statistics import describe, mean_and_deviation

_EXCERPT_TOKENS = 200


def rollout_metrics(batch: Batch, reward_weights: Sequence[float] | None) -> Row:
    """Rewards, lengths, truncation, prompts without signal; None where there is nothing to average."""
    lengths = [number for group in batch.groups for number in group.num_chosen]
    stopped = [reason == "stop" for group in batch.groups for reason in group.finish_reasons]
    mean, deviation = mean_and_deviation(reward for group in batch.groups for reward in group.rewards)
    row: Row = {"reward": mean, "reward_std": deviation}
    for index, name in enumerate(batch.scores.names):
        mean, deviation = mean_and_deviation(sample[index] for sample in batch.scores.per_function)
        row |= {f"rewards/{name}/mean": mean, f"rewards/{name}/std": deviation}
    flat = [not group.rewards_differ for group in batch.groups]
    row["frac_reward_zero_std"] = sum(flat) / len(flat) if flat else None
    row["groups/replaced"] = batch.num_replaced
    row |= describe(lengths, "completions/{}_length")
    row["completions/clipped_ratio"] = 1 - sum(stopped) / len(stopped) if stopped else None
    row |= describe((n for n, whole in zip(lengths, stopped, strict=True) if whole), "completions/{}_terminated_length")
    row |= describe((len(group.prompt.ids) for group in batch.groups), "prompts/{}_length")
    return row | batch.scores.metrics


def completion_rows(batch: Batch, tokenizer: Any | None) -> Iterator[Row]:
    """One row a completion: the prompt's end, the completion, its rewards, advantage, length and ending."""
    codec = TextCodec(tokenizer)
    sample = 0
    for group in batch.groups:
        excerpt = codec.excerpt(group.prompt.ids, _EXCERPT_TOKENS)
        for index, ids in enumerate(group.responses):
            yield {
                "row": group.prompt.row,
                "prompt_tokens": len(group.prompt.ids),
                "prompt": excerpt,
                "completion": batch.completions[sample],
                "rewards": dict(zip(batch.scores.names, batch.scores.per_function[sample], strict=True)),
                "reward": group.rewards[index],
                "advantage": group.advantages[index],
                "completion_tokens": len(ids),
                "finish_reason": group.finish_reasons[index],
                **{column: values[sample] for column, values in batch.scores.extra.items()},
            }
            sample += 1
