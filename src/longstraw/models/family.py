"""What the engine has to know of an architecture, and the registry of those it serves.

A family is added by one file in this package that calls `register`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch

from longstraw.attention import interface
from longstraw.pages import PageStore
from longstraw.state.layer import LayerChain

LayerKind = Callable[[PageStore, int], LayerChain]
"""Makes one layer's chain: (store, first_live) -> LayerChain."""


@contextmanager
def attention_through_pages(backbone: torch.nn.Module) -> Iterator[None]:
    """Has the model call `longstraw.attention.interface` while the context lasts."""
    config: Any = backbone.config
    before = config._attn_implementation_internal
    config._attn_implementation_internal = interface.NAME
    try:
        yield
    finally:
        config._attn_implementation_internal = before


def _plain_language_model(model: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    return model.model, model.lm_head


def _no_names(backbone: torch.nn.Module) -> list[str]:
    return []


@dataclass(frozen=True)
class Family:
    """One architecture family.

    Attributes:
        model_types: `model_type` of the configs it serves.
        layer_kinds: from a text config to the state kind of every layer.
        parts: from the causal LM to (backbone, head): ids to hidden states, hidden states to logits.
        adapted: a context in which the backbone runs on the engine's caches; it restores the model on leaving.
        without_gradient: from the backbone to the names of parameters that never get a gradient.
    """

    model_types: tuple[str, ...]
    layer_kinds: Callable[[Any], list[LayerKind]]
    parts: Callable[[Any], tuple[torch.nn.Module, torch.nn.Module]] = _plain_language_model
    adapted: Callable[[torch.nn.Module], AbstractContextManager[None]] = attention_through_pages
    without_gradient: Callable[[torch.nn.Module], list[str]] = _no_names


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
        raise ValueError(
            f"no adapter serves model_type {model_type!r}; served are {', '.join(supported_model_types())}. A family "
            "is added by one file in longstraw/models that calls longstraw.models.family.register"
        )
    return _FAMILIES[model_type]
