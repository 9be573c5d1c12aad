"""The policy that a configuration describes: model, adapters, tokenizer, and the ids that end a response."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from longstraw.config.locate import is_function_reference, load_function, resolve_path
from longstraw.config.model import ModelConfig
from longstraw.config.train import TrainConfig
from longstraw.trainer.adapters import add_lora, add_reference_adapter, load_adapter
from longstraw.trainer.pretrained import load_config, load_model, load_tokenizer, torch_dtype
from longstraw.trainer.published import Published, published_class


@dataclass
class Policy:
    """A loaded model and what belongs to it.

    Attributes:
        model: on its device, in eval mode; a PeftModel where adapters are trained.
        tokenizer: None for a model that is given token ids.
        stop_ids: ids that end a response.
        device: where the model is.
        published: where the class that the checkpoint names has the model, if that is a larger one.
    """

    model: Any
    tokenizer: Any | None
    stop_ids: list[int]
    device: torch.device
    published: Published | None = None

    @property
    def is_peft(self) -> bool:
        return hasattr(self.model, "peft_config")

    @property
    def max_positions(self) -> int | None:
        """Positions the model has, None where its config names no limit."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters with requires_grad by name; tied ones once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def load_policy(config: TrainConfig) -> Policy:
    """Load model and tokenizer as the configuration says.

    Raises:
        ValueError: something named in the configuration is missing or does not fit; nothing to train. The message names
            the option and the remedy.
    """
    options = config.model
    device = _device(options.device)
    torch.manual_seed(config.seed)  # adapters and models from functions may be random at birth
    published = None
    if is_function_reference(options.path):
        model, tokenizer = _from_function(options)
        model = model.to(device)
    else:
        path = resolve_path(options.path, "model.path")
        model = load_model(path, options, device)
        tokenizer = load_tokenizer(path, options)
        if (options.adapter or config.lora) and not options.gguf_file:
            published = published_class(model, load_config(path, options))
    if options.adapter:
        model = load_adapter(model, resolve_path(options.adapter, "model.adapter"), published)
    elif config.lora:
        model = add_lora(model, config.lora)
    reference = options.reference_adapter or (options.adapter if config.beta > 0 else None)
    if reference:
        add_reference_adapter(model, resolve_path(reference, "model.reference_adapter"), published)
    model.eval()
    _check_trainable(model, options)
    return Policy(model, tokenizer, _stop_ids(model, tokenizer, config.stop_token_ids), device, published)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"'model.device' is '{name}'; use auto, cpu, cuda or cuda:N.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("'model.device' is cuda, but PyTorch finds no CUDA device. Set model.device to auto or cpu.")
    return device


def _from_function(options: ModelConfig) -> tuple[nn.Module, Any | None]:
    for option in ("gguf_file", "quantization", "rope_scaling", "revision"):
        if getattr(options, option):
            raise ValueError(
                f"'model.{option}' applies to loading a checkpoint, but model.path is a function. Remove it."
            )
    function = load_function(options.path, "model.path")
    try:
        made = function(**options.args)
    except TypeError as error:
        raise ValueError(f"'model.path': calling {options.path} with {options.args} failed: {error}") from error
    model, tokenizer = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"'model.path': {options.path} returned {type(model).__name__}; a model or (model, tokenizer) is needed."
        )
    if options.dtype != "auto":
        model = model.to(torch_dtype(options.dtype))
    if options.tokenizer and options.tokenizer != "none":
        tokenizer = load_tokenizer("", options)
    return model, tokenizer


def _check_trainable(model: nn.Module, options: ModelConfig) -> None:
    parameters = trainable_parameters(model)
    if not parameters:
        raise ValueError(
            "No parameter of the model requires a gradient, so there is nothing to train. Add a `lora` group, or load "
            "the model without freezing it."
        )
    low = [name for name, parameter in parameters.items() if parameter.dtype in (torch.float16, torch.bfloat16)]
    if low:
        warnings.warn(
            f"{len(low)} trained tensors are {str(parameters[low[0]].dtype).removeprefix('torch.')}: steps smaller "
            "than their rounding are lost. Train adapters (`lora`), or set model.dtype to float32.",
            stacklevel=2,
        )


def _stop_ids(model: Any, tokenizer: Any | None, further: list[int]) -> list[int]:
    found: list[int] = []
    for source in (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found += [] if ids is None else ids if isinstance(ids, (list, tuple)) else [ids]
    return sorted({int(token) for token in [*found, *further] if token is not None})
