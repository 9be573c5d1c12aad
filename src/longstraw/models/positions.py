"""How many positions a model is made for, and RoPE that depends on the length, which prompts in pieces cannot have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CHANGES_WITH_LENGTH = ("dynamic", "longrope")
_NEAR = ("sliding_attention", "chunked_attention")


def position_limit(config: Any) -> int | None:
    """Positions that the model is made for: its own, or what an explicit RoPE override stretches them to.

    Configs write a stretch in two ways. Either `max_position_embeddings` is the original length, which `factor`
    stretches, or it is the stretched length already, and `original_max_position_embeddings` the one before. The greater
    of `max_position_embeddings` and the original times the factor is right for both. Where no original is named, as
    "linear" allows, `max_position_embeddings` is taken as it stands.

    Layers that see a window only do not count: their distances stay within it.

    Args:
        config: a text config.
    """
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int):
        return None
    ropes = _by_layer_type(config)
    far = [rope for layer_type, rope in ropes.items() if layer_type not in _NEAR] or list(ropes.values())
    return min([_stretched(length, rope) for rope in far] or [length])


def refuse_length_dependent(config: Any) -> None:
    """Refuses RoPE whose frequencies follow from the length of the sequence, at any layer type.

    Raises:
        ValueError: names the type, the layers and the way out.
    """
    for layer_type, rope in _by_layer_type(config).items():
        kind = _kind(rope)
        if any(name in kind for name in _CHANGES_WITH_LENGTH):
            where = f" in {layer_type} layers" if layer_type else ""
            raise ValueError(
                f"rope_type {kind!r}{where} changes with the length of the sequence, so pieces of one prompt would not "
                "agree; choose one factor for all lengths, such as rope_type 'yarn' or 'linear', in the config's "
                "rope_parameters before loading the model"
            )


def _by_layer_type(config: Any) -> dict[str, Mapping[str, Any]]:
    """RoPE parameters by layer type; under "" where all layers share them. Layers without positions have none."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = {key: value for key, value in rope.items() if isinstance(value, Mapping)}
    flat = {key: value for key, value in rope.items() if key not in nested}
    if _kind(flat) or not nested:
        return {"": flat} | nested if flat else nested
    return nested


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "")


def _stretched(length: int, rope: Mapping[str, Any]) -> int:
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if _kind(rope) in ("", "default") or not factor or not original:
        return length
    return max(length, int(original * factor))
