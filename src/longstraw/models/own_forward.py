"""Layers whose forward is the engine's own: bound onto the stock module while the engine runs, and taken off again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch

from longstraw.models.family import Family, LayerKind, attention_through_pages, register


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    Attributes:
        chain: makes the layer's chain.
        forward: replaces the forward of the decoder layer's `module` while the engine runs; None: the stock one serves.
        module: the attribute of the decoder layer that `forward` is bound onto.
    """

    chain: LayerKind
    forward: Callable[..., Any] | None = None
    module: str = "self_attn"


def register_layers(model_types: tuple[str, ...], layers: Callable[[Any], list[Layer]], **options: Any) -> None:
    """Registers a family by its layers; `options` are those of `Family`."""
    register(
        Family(
            model_types=model_types,
            layer_kinds=lambda config: [layer.chain for layer in layers(config)],
            adapted=partial(_adapted, layers),
            **options,
        )
    )


def by_kind(kinds: dict[str, Layer], names: list[str]) -> list[Layer]:
    """One layer a name.

    Raises:
        ValueError: a name that is not among the kinds.
    """
    unknown = set(names) - set(kinds)
    if unknown:
        raise ValueError(f"no adapter serves layers of kind {sorted(unknown)} in this family")
    return [kinds[name] for name in names]


@contextmanager
def _adapted(layers: Callable[[Any], list[Layer]], backbone: torch.nn.Module) -> Iterator[None]:
    blocks: Any = backbone.layers
    with ExitStack() as stack:
        stack.enter_context(attention_through_pages(backbone))
        for block, layer in zip(blocks, layers(backbone.config)):
            if layer.forward is not None:
                stack.enter_context(_replaced_forward(getattr(block, layer.module), layer.forward))
        yield


@contextmanager
def _replaced_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = module.__dict__.get("forward")
    module.forward = MethodType(forward, module)
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
