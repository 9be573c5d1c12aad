"""Qwen3.5/3.6 and Qwen3-Next: GatedDeltaNet layers with a full-attention layer every few."""

from __future__ import annotations

from typing import Any

import torch

from longstraw.models.family import Family, Layer, register
from longstraw.state.kv import KVChain
from longstraw.state.recurrent import RecurrentChain

_LAYERS = {"full_attention": Layer(KVChain), "linear_attention": Layer(RecurrentChain)}


def layers(config: Any) -> list[Layer]:
    """K/V pages in attention layers, convolution and recurrent state in the others.

    Raises:
        ValueError: a layer of another kind.
    """
    unknown = set(config.layer_types) - set(_LAYERS)
    if unknown:
        raise ValueError(f"no adapter serves layers of kind {sorted(unknown)} in this family")
    return [_LAYERS[kind] for kind in config.layer_types]


def parts(model: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The text model and the head, bare or inside a model that also takes images."""
    return getattr(model.model, "language_model", model.model), model.lm_head


register(
    Family(
        model_types=("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
        layers=layers,
        parts=parts,
    )
)
