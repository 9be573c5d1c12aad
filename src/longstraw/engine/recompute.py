"""Activation recomputation inside a piece: its graph holds the layers' inputs and one layer's activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


@contextmanager
def recomputed_layers(backbone: Any) -> Iterator[None]:
    """While the context lasts, decoder layers that run with a graph drop their activations and recompute them."""
    layers = list(backbone.layers)
    before = [layer.__dict__.get("forward") for layer in layers]
    try:
        for place, layer in enumerate(layers):
            layer.forward = _recomputed(layer.forward, place)
        yield
    finally:
        for layer, forward in zip(layers, before):
            layer.__dict__.pop("forward", None)
            if forward is not None:
                layer.forward = forward


def _recomputed(forward: Callable[..., Any], place: int) -> Callable[..., Any]:
    def run(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        piece = kwargs["cache"].layers[place]
        if not torch.is_grad_enabled() or piece.last:  # the last layer of a prompt piece stops at its state
            return forward(hidden_states, *args, **kwargs)

        def from_start(hidden: torch.Tensor) -> Any:
            piece.rewind()
            out = forward(hidden, *args, **kwargs)
            piece.next_layer = None  # staged once: when this layer is recomputed, the next one is already done
            return out

        return checkpoint(from_start, hidden_states, use_reentrant=False, preserve_rng_state=False)

    return run
