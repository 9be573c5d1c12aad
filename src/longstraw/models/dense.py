"""Dense decoders with full or sliding-window attention: Llama, Qwen2, Qwen3, Mistral."""

from __future__ import annotations

from functools import partial
from typing import Any

from longstraw.models.family import Family, Layer, register
from longstraw.state.kv import KVChain
from longstraw.state.window import WindowChain


def layers(config: Any) -> list[Layer]:
    """K/V of all tokens, or of the window where a layer has one.

    Raises:
        ValueError: a layer of another kind.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # Mistral: one window for all layers, or none
        kinds = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    return [_layer(kind, window) for kind in kinds]


def _layer(kind: str, window: int | None) -> Layer:
    if kind == "sliding_attention" and window is not None:
        return Layer(partial(_window, window))
    if kind in ("full_attention", "sliding_attention"):
        return Layer(KVChain)
    raise ValueError(f"no adapter serves a layer of kind {kind!r} in this family")


def _window(size: int, store: Any, grad_from: int) -> WindowChain:
    return WindowChain(store, size, grad_from)


register(Family(model_types=("llama", "qwen2", "qwen3", "mistral"), layers=layers))
