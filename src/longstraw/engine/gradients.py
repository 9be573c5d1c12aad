"""Parameter gradients of one backward pass as a transaction, summed in float32 at least."""

from __future__ import annotations

from types import TracebackType

import torch

from longstraw.precision import wide_dtype


class GradientTransaction:
    """Inside the context `.grad` starts empty; on leaving it is the earlier gradient plus what was added.

    After an exception it is the earlier gradient alone. Parameters of less than 32 bits would round every piece's
    contribution: theirs are summed in float32 and rounded once.
    """

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._before: list[torch.Tensor | None] = []
        self._wide: dict[int, torch.Tensor] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> GradientTransaction:
        for parameter in self._parameters:
            self._before.append(parameter.grad)
            parameter.grad = None
            if parameter.dtype in (torch.bfloat16, torch.float16):
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._widen))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        for parameter, before in zip(self._parameters, self._before):
            if kind is not None:
                parameter.grad = before
                continue
            added = self._wide.pop(id(parameter), parameter.grad)
            if added is None:
                parameter.grad = before
            elif before is None:
                parameter.grad = added.to(parameter.dtype)
            else:
                parameter.grad = before.add_(added.to(before.dtype))
        self._wide.clear()

    def copies(self) -> list[torch.Tensor | None]:
        """Of what was added so far, one entry a parameter, in float32 at least; None where nothing was."""
        added = [self._wide.get(id(parameter), parameter.grad) for parameter in self._parameters]
        return [None if a is None else a.to(wide_dtype(a.dtype), copy=True) for a in added]

    def _widen(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if id(parameter) in self._wide:
            self._wide[id(parameter)].add_(gradient)
        else:
            self._wide[id(parameter)] = gradient.float()
        parameter.grad = None
