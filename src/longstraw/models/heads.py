"""Heads of models that scale or cap their logits after the last matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


class ScaledHead:
    """Hidden states to logits as such a model's own forward computes them: the matrix, then the divisor, then the cap.

    Args:
        matrix: the model's `lm_head`, with whatever adapters it has.
        divisor: divides the logits, as Granite does.
        softcap: logits become softcap * tanh(logits / softcap), as Gemma does; None: no cap.
    """

    def __init__(self, matrix: torch.nn.Module, divisor: float = 1.0, softcap: float | None = None) -> None:
        self.matrix = matrix
        self.divisor = divisor
        self.softcap = softcap

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.matrix(hidden)
        if self.divisor != 1.0:
            logits = logits / self.divisor
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return self.matrix.parameters()


def parts_with_scaled_head(
    divisor: str | None = None, softcap: str | None = None
) -> Callable[[Any], tuple[torch.nn.Module, Any]]:
    """`Family.parts` of a model that scales or caps: (backbone, head).

    Args:
        divisor: the config's field that divides the logits.
        softcap: the config's field that caps them; a field that is absent or None is no cap.
    """

    def parts(model: Any) -> tuple[torch.nn.Module, Any]:
        scale = 1.0 if divisor is None else getattr(model.config, divisor)
        cap = None if softcap is None else getattr(model.config, softcap, None)
        if scale == 1.0 and cap is None:
            return model.model, model.lm_head
        return model.model, ScaledHead(model.lm_head, scale, cap)

    return parts
