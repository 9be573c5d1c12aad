"""What the engine has to know of an architecture, and the registry of those it serves.

A family is added by one file in this package that calls `register`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import MethodType
from typing import Any

import torch

from longstraw.attention import interface
from longstraw.models.missing import MISSING
from longstraw.pages import PageStore
from longstraw.state.layer import LayerChain

ChainFactory = Callable[[PageStore, int], LayerChain]
"""Makes one layer's chain: (store, grad_from) -> LayerChain."""


@dataclass(frozen=True)
class Layer:
    """One decoder layer, as the engine runs it.

    Attributes:
        chain: makes the chain of its state.
        forward: replaces the forward of its token mixer while the engine runs; None where the stock one serves. It
            takes the stock one's arguments and returns its results.
        mixer: the attribute of the decoder layer that has the token mixer.
    """

    chain: ChainFactory
    forward: Callable[..., Any] | None = None
    mixer: str = "self_attn"


def by_kind(kinds: Mapping[str, Layer], names: Sequence[str]) -> list[Layer]:
    """One layer a name, as a config lists them.

    Raises:
        ValueError: a name that is not among the kinds.
    """
    unknown = set(names) - set(kinds)
    if unknown:
        raise ValueError(f"no family serves layers of kind {sorted(unknown)} in this family")
    return [kinds[name] for name in names]


def _plain_language_model(model: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    return model.model, model.lm_head


def _no_names(backbone: torch.nn.Module) -> list[str]:
    return []


@dataclass(frozen=True)
class Family:
    """One architecture family.

    Attributes:
        model_types: `model_type` of the configs it serves.
        layers: from a text config to its decoder layers.
        parts: from the causal LM to (backbone, head): ids to hidden states, hidden states to logits. The backbone has
            its decoder layers in `.layers`.
        without_gradient: from the backbone to the names of parameters that never get a gradient.
    """

    model_types: tuple[str, ...]
    layers: Callable[[Any], list[Layer]]
    parts: Callable[[Any], tuple[torch.nn.Module, torch.nn.Module]] = _plain_language_model
    without_gradient: Callable[[torch.nn.Module], list[str]] = _no_names


@contextmanager
def adapted(backbone: Any, layers: Sequence[Layer]) -> Iterator[None]:
    """While the context lasts, the backbone calls `attention.interface` and runs its layers' own forwards."""
    with ExitStack() as stack:
        config = backbone.config
        stack.callback(setattr, config, "_attn_implementation_internal", config._attn_implementation_internal)
        config._attn_implementation_internal = interface.NAME
        for module, layer in zip(backbone.layers, layers, strict=True):
            if layer.forward is not None:
                stack.enter_context(_replaced_forward(getattr(module, layer.mixer), layer.forward))
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


_FAMILIES: dict[str, Family] = {}


def register(family: Family) -> None:
    """Adds a family; a later one with the same `model_type` replaces an earlier one."""
    for model_type in family.model_types:
        _FAMILIES[model_type] = family


@cache
def _load_all() -> None:
    from longstraw import models

    for module in pkgutil.iter_modules(models.__path__):
        import_module(f"{models.__name__}.{module.name}")


def supported_model_types() -> list[str]:
    """Every `model_type` that a family serves, sorted."""
    _load_all()
    return sorted(_FAMILIES)


def family_of(model_type: str) -> Family:
    """The family that serves a `model_type`.

    Raises:
        ValueError: none does.
    """
    _load_all()
    if model_type not in _FAMILIES:
        if model_type in MISSING:
            raise ValueError(f"model_type {model_type!r} is not served yet: {MISSING[model_type]}")
        raise ValueError(
            f"no family serves model_type {model_type!r}; served are {', '.join(supported_model_types())}. A family "
            "is added by one file in longstraw/models that calls longstraw.models.family.register"
        )
    return _FAMILIES[model_type]
