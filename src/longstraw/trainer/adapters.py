"""PEFT adapters: new ones, trained ones to go on with, and the policy without them as a reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from longstraw.config.model import LoraConfig
from longstraw.trainer.published import Published

REFERENCE = "reference"
"""Name of the frozen adapter, where the reference policy is one."""


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


def load_adapter(model: nn.Module, path: str, published: Published | None = None) -> Any:
    """The model with a trained adapter to go on with. Raises ValueError where it is missing or does not fit."""
    import peft

    try:
        return peft.PeftModel.from_pretrained(
            model,  # type: ignore[arg-type]
            path,
            is_trainable=True,
            use_safetensors=True,
            key_mapping=published.key_mapping if published else None,
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"'model.adapter': {path} cannot be loaded: {error}") from error


def add_reference_adapter(model: Any, path: str, published: Published | None = None) -> None:
    """Load a frozen adapter beside the trained one. Raises ValueError where it is missing or does not fit."""
    try:
        model.load_adapter(
            path,
            adapter_name=REFERENCE,
            is_trainable=False,
            use_safetensors=True,
            key_mapping=published.key_mapping if published else None,
        )
        model.set_adapter("default")
    except (OSError, ValueError) as error:
        raise ValueError(f"'model.reference_adapter': {path} cannot be loaded: {error}") from error


def adapter_switch(model: Any) -> Callable[[], Any]:
    """A context in which a PeftModel is the reference policy: adapters off, or the frozen one active."""
    if REFERENCE not in getattr(model, "peft_config", {}):
        return model.disable_adapter

    @contextmanager
    def use_reference() -> Iterator[None]:
        model.set_adapter(REFERENCE, inference_mode=True)
        try:
            yield
        finally:
            model.set_adapter("default")

    return use_reference
