"""What is added up over an optimizer step: the loss's normaliser and the means that are logged. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Normalizer:
    """Counts over *all* responses of one optimizer step: every group, micro-step and rank.

    A loss divided by the counts of its own group depends on how the batch was cut. Divided by the step's counts, the
    losses of the groups add up to the loss of the whole batch, whatever the cut. Build one for each part of the step (a
    group, a micro-step, a rank) and add them (`sum_of` or `+`; over ranks, all-reduce the two integers), before the
    first group's gradient.

    Args:
        num_responses: responses in the step, those without a single scored token included.
        num_tokens: scored tokens in the step, that is, tokens whose mask is True.
    """

    num_responses: int
    num_tokens: int

    def __post_init__(self) -> None:
        if self.num_responses < 0 or self.num_tokens < 0:
            raise ValueError(f"a normaliser counts responses and tokens and cannot be negative, got {self}")

    @classmethod
    def from_lengths(cls, lengths: Iterable[int]) -> Normalizer:
        """From the responses' lengths in tokens, all of them scored."""
        lengths = list(lengths)
        return cls(len(lengths), sum(lengths))

    @classmethod
    def from_masks(cls, masks: Iterable[Tensor]) -> Normalizer:
        """From one bool mask [R_i] a response, True where a token is scored."""
        counts = [int(mask.sum()) for mask in masks]
        return cls(len(counts), sum(counts))

    @classmethod
    def sum_of(cls, pieces: Iterable[Normalizer]) -> Normalizer:
        """The normaliser of a step from those of its parts."""
        return sum(pieces, start=cls(0, 0))

    def __add__(self, other: Normalizer) -> Normalizer:
        return Normalizer(self.num_responses + other.num_responses, self.num_tokens + other.num_tokens)


@dataclass(frozen=True)
class Mean:
    """A mean kept as total and count, so that means of different groups merge exactly by `+`.

    `float(mean)` is the value; over nothing it is 0.0. `total` may be a detached 0-d tensor, so that building a mean
    does not wait for an accelerator.
    """

    total: Tensor | float = 0.0
    count: int = 0

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def __float__(self) -> float:
        return float(self.total) / max(self.count, 1)


def merge_metrics(parts: Iterable[Mapping[str, Mean]]) -> dict[str, Mean]:
    """The metrics of several groups as those of their union, name by name."""
    merged: dict[str, Mean] = {}
    for part in parts:
        for name, mean in part.items():
            merged[name] = merged[name] + mean if name in merged else mean
    return merged
