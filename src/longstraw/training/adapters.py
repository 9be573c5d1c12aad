"""PEFT adapters: new ones, trained ones to go on with, and the policy without them as a reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from longstraw.training.config_parts import LoraConfig


def add_lora(model: nn.Module, lora: LoraConfig) -> Any:
    """The model with LoRA adapters, its own parameters frozen. Raises ValueError where the options do not fit it."""
    import peft

    try:
        return peft.get_peft_model(
            model,  # type: ignore[arg-type]
            peft.LoraConfig(
                task_type="CAUSAL_LM",
                r=lora.r,
                lora_alpha=lora.alpha,
                target_modules=lora.target_modules,  # type: ignore[arg-type]
                exclude_modules=lora.exclude_modules,
                modules_to_save=lora.modules_to_save,
                use_rslora=lora.use_rslora,
            ),
        )
    except ValueError as error:
        raise ValueError(f"'lora' does not fit this model: {error}") from error


def load_adapter(model: nn.Module, path: str, with_reference: bool) -> Any:
    """The model with a trained adapter to go on with; for a KL term a second, frozen copy of it is the reference.

    Raises:
        ValueError: there is no such adapter, or it does not fit the model.
    """
    import peft

    try:
        wrapped = peft.PeftModel.from_pretrained(model, path, is_trainable=True, use_safetensors=True)
        if with_reference:
            wrapped.load_adapter(path, adapter_name="reference", is_trainable=False, use_safetensors=True)
            wrapped.set_adapter("default")
    except (OSError, ValueError) as error:
        raise ValueError(f"'model.adapter': {path} cannot be loaded: {error}") from error
    return wrapped


def adapter_switch(model: Any) -> Callable[[], Any]:
    """A context in which a PeftModel is the reference policy: adapters off, or the frozen copy of a trained one."""
    if "reference" not in getattr(model, "peft_config", {}):
        return model.disable_adapter

    @contextmanager
    def use_reference() -> Iterator[None]:
        model.set_adapter("reference", inference_mode=True)
        try:
            yield
        finally:
            model.set_adapter("default")

    return use_reference
