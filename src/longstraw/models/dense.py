"""Decoders with full or sliding-window attention and nothing else that later tokens need.

Routed experts look at one token at a time, and layers without positions are full attention, so neither shows here.
"""

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
    if kinds is None:  # Mistral, Phi-3, Mixtral, Qwen3-MoE: one window for all layers, or none
        kinds = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    return [_layer(kind, window) for kind in kinds]


def _layer(kind: str, window: int | None) -> Layer:
    if kind == "sliding_attention" and window is not None:
        return Layer(partial(_window, window))
    if kind in ("full_attention", "sliding_attention"):
        return Layer(KVChain)
    raise ValueError(f"no family serves a layer of kind {kind!r} in this family")


def _window(size: int, store: Any, grad_from: int) -> WindowChain:
    return WindowChain(store, size, grad_from)


_DENSE = ("llama", "qwen2", "qwen3", "mistral", "ministral3", "olmo3", "phi3", "smollm3")
_EXPERTS = ("qwen3_moe", "mixtral", "minimax_m2", "gpt_oss")

register(Family(model_types=_DENSE + _EXPERTS, layers=layers))
