"""Heads of models that scale or cap their logits after the last matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


class ScaledHead:
    """Hidden states to logits as such a model's own forward computes them: the matrix, then the factor, then the cap.

    Args:
        matrix: the model's `lm_head`, with whatever adapters it has.
        divisor: divides the logits, as Granite does.
        multiplier: multiplies them, as Falcon-H1 does.
        softcap: logits become softcap * tanh(logits / softcap), as Gemma does; None: no cap.
    """

    def __init__(
        self, matrix: torch.nn.Module, divisor: float = 1.0, multiplier: float = 1.0, softcap: float | None = None
    ) -> None:
        self.matrix = matrix
        self.divisor = divisor
        self.multiplier = multiplier
        self.softcap = softcap

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.matrix(hidden)
        if self.divisor != 1.0:
            logits = logits / self.divisor
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return self.matrix.parameters()


def parts_with_scaled_head(
    divisor: str | None = None, multiplier: str | None = None, softcap: str | None = None
) -> Callable[[Any], tuple[torch.nn.Module, Any]]:
    """`Family.parts` of a model that scales or caps: (backbone, head).

    Args:
        divisor: the config's field that divides the logits.
        multiplier: the one that multiplies them.
        softcap: the one that caps them; where it is None, there is no cap.
    """

    def parts(model: Any) -> tuple[torch.nn.Module, Any]:
        fields = {"divisor": divisor, "multiplier": multiplier, "softcap": softcap}
        numbers = {name: getattr(model.config, field) for name, field in fields.items() if field is not None}
        return model.model, ScaledHead(model.lm_head, **numbers)

    return parts
