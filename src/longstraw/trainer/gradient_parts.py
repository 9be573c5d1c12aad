"""The two sides of a step's gradient: what the responses give with the prompt's state held constant, and the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longstraw.engine.engine import Engine
from longstraw.precision import wide_dtype
from longstraw.trainer.metrics import Row


class GradientParts:
    """Sums the response sides of one optimizer step's groups; the prompt side is what `.grad` has beyond them.

    Args:
        engine: over the trained model.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._parameters = [parameter for _, parameter in engine.host.trainable()]
        self._response: list[torch.Tensor | None] = [None] * len(self._parameters)

    def add(self, response_side: Sequence[torch.Tensor | None]) -> None:
        """Take in a group's `Outcome.response_side`; its tensors are this object's from then on."""
        for place, (parameter, added) in enumerate(zip(self._parameters, response_side, strict=True)):
            if added is None:
                continue
            # Rounded as `.grad` is: in bfloat16 that rounding would else pass for a prompt side, even of parameters
            # that the prompt's side does not reach.
            added, before = added.to(parameter.dtype), self._response[place]
            self._response[place] = added if before is None else before.add_(added)

    def metrics(self) -> Row:
        """L2 norms of both sides and their cosine, which is None where one of them is zero.

        To call once, when `.grad` is complete and not yet clipped; in every process of the mesh.
        """
        products = []  # of a parameter's sides: response with itself, prompt with itself, both
        for parameter, reduced in zip(self._parameters, self._engine.reduce(self._response)):
            if parameter.grad is not None:
                wide = wide_dtype(parameter.dtype)
                response = reduced.to(parameter.dtype).to(wide)  # a sum over processes is rounded as `.grad` is, too
                prompt = parameter.grad.to(wide) - response
                products.append(torch.stack([_dot(response, response), _dot(prompt, prompt), _dot(response, prompt)]))
        squares = torch.stack(products).sum(0).tolist() if products else [0.0, 0.0, 0.0]
        response_norm, prompt_norm = squares[0] ** 0.5, squares[1] ** 0.5
        return {
            "grad_norm/response": response_norm,
            "grad_norm/prompt": prompt_norm,
            "grad_cosine": squares[2] / (response_norm * prompt_norm) if response_norm and prompt_norm else None,
        }


def _dot(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Of tensors of one shape, summed in float64."""
    return (one * other).sum(dtype=torch.float64)
