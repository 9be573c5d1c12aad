"""What a model must be for its graphs to be built again: a function of its tokens and its parameters alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd


def refuse_noise(model: torch.nn.Module) -> None:
    """Refuses dropout, and a router's noise, in a module that is in training mode.

    Raises:
        ValueError: names the module.
    """
    for name, module in model.named_modules():
        if not module.training:
            continue
        rate = module.p if isinstance(module, _DropoutNd) else getattr(module, "attention_dropout", 0.0)
        if isinstance(rate, float) and rate > 0:
            raise ValueError(
                f"dropout is active in {name or 'the model'} (rate {rate}): a replayed graph would not be the one "
                "that was scored; set it to 0 (attention_dropout, lora_dropout) or call model.eval()"
            )
        noise = getattr(module, "jitter_noise", 0.0)  # of a router
        if isinstance(noise, float) and noise > 0:
            raise ValueError(
                f"the router in {name} adds noise (jitter_noise {noise}): a replayed graph would not be the one "
                "that was scored; set router_jitter_noise to 0 or call model.eval()"
            )


def refuse_compiled(model: Any) -> None:
    """Refuses a model of which torch.compile runs a part: with and without a graph it would be two functions.

    Raises:
        ValueError: names the module.
    """
    for name, module in model.named_modules() if isinstance(model, torch.nn.Module) else ():
        forward = vars(module).get("forward")
        compiled = getattr(forward, "_torchdynamo_orig_callable", None) is not None
        compiled = compiled and not getattr(forward, "_torchdynamo_disable", False)
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None or compiled:
            raise ValueError(
                f"{name or 'the model'} is compiled: torch.compile makes one function for scores and another for "
                "gradients, and the engine needs them equal. Give it the model as it was before torch.compile "
                "(model._orig_mod); one that was compiled in place has to be loaded again"
            )


def refuse_inference_tensors(model: Any) -> None:
    """Refuses parameters, gradients and buffers that were made in inference mode: autograd cannot use them.

    Raises:
        ValueError: names one.
    """
    if not isinstance(model, torch.nn.Module):
        return
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_inference() or (tensor.grad is not None and tensor.grad.is_inference()):
            raise ValueError(
                f"{name} or its gradient was made under torch.inference_mode, so autograd can neither save nor track "
                "it: load the model, and empty its gradients, outside of inference mode (torch.no_grad does no harm)"
            )
