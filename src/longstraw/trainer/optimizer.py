"""AdamW and its schedule; their state as tensors by parameter name and plain numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from longstraw.config.train import TrainConfig
from longstraw.precision import wide_dtype

_SEPARATOR = "|"  # no parameter name has it


class NamedOptimizer:
    """AdamW with a transformers schedule over named parameters.

    Matrices decay, vectors (norms, biases, gates) do not.

    Args:
        parameters: the trained ones, by name.
        config: learning rate, betas, decay, schedule.
        num_steps: optimizer steps of the whole run, which the schedule spans.
    Raises:
        ValueError: arguments that the schedule does not take.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], config: TrainConfig, num_steps: int) -> None:
        from transformers import get_scheduler

        self.parameters = parameters
        groups = [
            {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
        )
        warmup = config.warmup_steps
        try:
            scheduler = get_scheduler(
                config.lr_scheduler_type,
                self._adamw,
                num_warmup_steps=int(warmup) if warmup >= 1 else math.ceil(num_steps * warmup),
                num_training_steps=num_steps,
                scheduler_specific_kwargs=dict(config.lr_scheduler_kwargs),
            )
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"'lr_scheduler_kwargs' {config.lr_scheduler_kwargs} do not fit lr_scheduler_type "
                f"'{config.lr_scheduler_type}': {error}"
            ) from error
        assert isinstance(scheduler, LambdaLR)  # every schedule that the configuration admits is a function of the step
        self._scheduler = scheduler

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return float(self._scheduler.get_last_lr()[0])

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def clip(self, max_norm: float) -> float:
        """Clip to `max_norm` (0: measure only). Returns the norm before; may be non-finite, then nothing was scaled."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if not gradients:
            return 0.0
        # In the gradients' own dtype a bfloat16 norm, and with it the clipping, would be off by up to 0.4 percent.
        norms = [torch.linalg.vector_norm(g, dtype=wide_dtype(g.dtype)) for g in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if max_norm > 0 and torch.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), max_norm, norm)
        return float(norm)

    def step(self) -> None:
        """One AdamW step and one of the schedule; gradients are dropped.

        A parameter that has moments but got no gradient this time has the gradient 0: a step without any signal is the
        one that conventional training would take.
        """
        for parameter in self.parameters.values():
            if parameter.grad is None and parameter in self._adamw.state:
                parameter.grad = torch.zeros_like(parameter)
        self._adamw.step()
        self._scheduler.step()
        self.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        """AdamW's state as 'parameter|entry' tensors, on the CPU."""
        return {
            f"{name}{_SEPARATOR}{entry}": torch.as_tensor(value).detach().cpu().contiguous()
            for name, parameter in self.parameters.items()
            for entry, value in self._adamw.state.get(parameter, {}).items()
        }

    def load_tensors(self, tensors: dict[str, torch.Tensor], num_steps_done: int) -> None:
        """Put back what `tensors` gave, and the schedule to `num_steps_done`.

        Raises:
            ValueError: the tensors belong to other parameters.
        """
        known: dict[str, dict[str, Any]] = {}
        for key, tensor in tensors.items():
            name, _, entry = key.rpartition(_SEPARATOR)
            if name not in self.parameters:
                raise ValueError(
                    f"the checkpoint's optimizer has moments for '{name}', which this model does not train."
                )
            parameter = self.parameters[name]
            moved = tensor if entry == "step" else tensor.to(parameter.device)
            known.setdefault(name, {})[entry] = moved.clone()
        for name, entries in known.items():
            self._adamw.state[self.parameters[name]] = entries
        self._scheduler.last_epoch = num_steps_done
        rates = [
            base * factor(num_steps_done)
            for base, factor in zip(self._scheduler.base_lrs, self._scheduler.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self._adamw.param_groups, rates, strict=True):
            group["lr"] = rate
        self._scheduler._last_lr = rates
