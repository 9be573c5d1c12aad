"""Gemma 2, 3 and 4: windows between full attention, caps on logits, and in Gemma 4 layers that share keys and values.

A layer of Gemma 4 that shares computes no keys and values: it attends over those of the last layer of its type that
does, through that layer's pages or window, and their gradient adds up there. It leaves nothing behind, so a prompt's
piece ends where the last layer that keeps something has kept it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from longstraw.attention.interface import PIECE
from longstraw.models import dense
from longstraw.models.family import Family, Layer, register
from longstraw.models.heads import parts_with_scaled_head
from longstraw.state.stateless import StatelessChain


def layers(config: Any) -> list[Layer]:
    """As dense decoders, and layers that share after all those that keep keys and values.

    Raises:
        ValueError: every layer shares, as in an assistant model, which has no state of its own.
    """
    num_kept = config.num_hidden_layers - config.num_kv_shared_layers
    if not num_kept:
        raise ValueError(
            "every layer shares the keys and values of another model (num_kv_shared_layers equals num_hidden_layers): "
            "an assistant model cannot be trained alone"
        )
    kinds = config.layer_types
    last = {kind: index for index, kind in enumerate(kinds[:num_kept])}  # of each type, the one that is shared
    sharing = [Layer(StatelessChain, _reading(last[kind])) for kind in kinds[num_kept:]]
    return dense.layers(config)[:num_kept] + sharing


def _reading(source: int) -> Callable[..., Any]:
    """The stock attention's forward over the keys and values of layer `source`."""

    def forward(self: Any, *args: Any, cache: Any, **kwargs: Any) -> Any:
        piece = {PIECE: cache.layers[source]}
        return type(self).forward(self, *args, cache=cache, **kwargs, **piece)

    return forward


_parts = parts_with_scaled_head(softcap="final_logit_softcapping")

register(Family(model_types=("gemma2", "gemma3_text"), layers=dense.layers, parts=_parts))
register(Family(model_types=("gemma4_text",), layers=layers, parts=_parts))
