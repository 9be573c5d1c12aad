"""The receipt of one optimizer step: everything that is logged about it, by TRL's names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from longstraw.data.text import TextCodec
from longstraw.objective import Mean
from longstraw.rollout.phases import PhaseLedger
from longstraw.rollout.records import Batch
from longstraw.trainer.metrics import Row
from longstraw.trainer.refresh import Staleness
from longstraw.trainer.statistics import describe, mean_and_deviation

_EXCERPT_TOKENS = 200


@dataclass
class StepReceipt:
    """What one optimizer step did. The step fills it in; `row` is its line of metrics.jsonl.

    Attributes:
        step: its number, from 1.
        epoch: passes over the prompts at its end.
        learning_rate: that it was taken with.
        loss: of the whole step.
        grad_norm: before clipping.
        num_tokens: of prompts and responses, in the whole run so far.
        sampled: the batch, where it was sampled for this step.
        num_skipped: groups left out for want of any signal.
        means: of the loss and its tokens.
        logp_differences: [num_tokens], absolute, of the sampler's log-probabilities from the engine's.
        boundary_stride: the largest of the prompts' states; None without a bound on them.
        sides: norms of the gradient's two sides before clipping, and their cosine; empty where they are not asked for.
        staleness: of the prompts' states.
        seconds: of wall time.
        step_tokens: of prompts and responses, in this step.
        phases: seconds and peak memory, phase by phase.
    """

    step: int = 0
    epoch: float = 0.0
    learning_rate: float = 0.0
    loss: float = 0.0
    grad_norm: float = 0.0
    num_tokens: int = 0
    sampled: Batch | None = None
    num_skipped: int = 0
    means: dict[str, Mean] = field(default_factory=dict)
    logp_differences: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    boundary_stride: int | None = None
    sides: Row = field(default_factory=dict)
    staleness: Staleness = field(default_factory=Staleness)
    seconds: float = 0.0
    step_tokens: int = 0
    phases: PhaseLedger = field(default_factory=PhaseLedger)

    def row(self) -> Row:
        row: Row = {
            "step": self.step,
            "epoch": self.epoch,
            "learning_rate": self.learning_rate,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "num_tokens": self.num_tokens,
            **(rollout_metrics(self.sampled) if self.sampled is not None else {}),
            "groups/skipped": self.num_skipped,
            **{name: float(mean) for name, mean in self.means.items()},
        }
        if self.logp_differences.numel():
            row["sampling/sampling_logp_difference/mean"] = float(self.logp_differences.mean())
            row["sampling/sampling_logp_difference/max"] = float(self.logp_differences.max())
        if self.boundary_stride is not None:
            row["boundary_stride"] = self.boundary_stride
        return row | {
            **self.sides,
            **self.staleness.metrics(),
            "step_time": self.seconds,
            "tokens_per_second": self.step_tokens / self.seconds,
            "peak_memory_bytes": self.phases.peak_bytes,
            **self.phases.metrics(),
        }


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
