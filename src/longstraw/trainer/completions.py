"""What was sampled in a step, as rows for a reader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from longstraw.data.text import TextCodec
from longstraw.rollout.records import Batch
from longstraw.trainer.metrics import Row

_EXCERPT_TOKENS = 200


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
