"""What an attention does with its scores, as one value from the model's call down to the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Scores:
    """How a query weighs the tokens that it sees.

    Attributes:
        scale: multiplies the products of queries and keys.
        sinks: [H], one logit a query head that takes part in the softmax and stands for no token (gpt-oss,
            arXiv 2508.10925); None for none. It may collect a gradient.
        softcap: c: a score s becomes c tanh(s / c) (Gemma 2, arXiv 2408.00118); None for none.
        window: how many tokens a query sees, itself included; None for all before it.
    """

    scale: float
    sinks: torch.Tensor | None = None
    softcap: float | None = None
    window: int | None = None

    def of(self, products: torch.Tensor) -> torch.Tensor:
        """Scores from the products of queries and keys."""
        scores = products * self.scale
        return scores if self.softcap is None else (scores / self.softcap).tanh() * self.softcap

    def slope(self, scores: torch.Tensor) -> torch.Tensor | float:
        """Derivative of a score with respect to its product."""
        return self.scale if self.softcap is None else self.scale * (1 - (scores / self.softcap).square())
