"""Stacked bars over steps as inline SVG, each layer named beside the stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.etree.ElementTree import Element

from longstraw.audit.svg import BOTTOM, CHARACTER, TOP, Axes, Point, draw, draw_frame, spread, text


@dataclass(frozen=True)
class Layer:
    """One layer of every bar: its name, CSS class and one value a bar, not negative."""

    label: str
    look: str
    values: list[float]


def stacked_bars(
    layers: Sequence[Layer], steps: Sequence[float], *, size: Point, x_label: str, y_label: str
) -> tuple[Element, Axes]:
    """Draw a bar a step, layers from the bottom up.

    Args:
        steps: where each bar stands on the axis, increasing.
        size: width and height in px.
    """
    totals = [sum(layer.values[bar] for layer in layers) for bar in range(len(steps))]
    between = min((b - a for a, b in pairwise(steps)), default=1.0)
    right = 24 + CHARACTER * max(len(layer.label) for layer in layers)
    x = (steps[0] - between / 2, steps[-1] + between / 2)
    y = (0.0, max(totals) * 1.04 or 1.0)
    axes = Axes(*size, 14 + CHARACTER * 5, right, x, y)
    canvas = draw_frame(axes, x_label, y_label)
    width = axes.across(x[0] + between) - axes.across(x[0])
    base = [0.0] * len(steps)
    for layer in layers:
        group = draw(canvas, "g", f"layer {layer.look}")
        for bar, value in enumerate(layer.values):
            if value > 0:
                top = axes.down(base[bar] + value)
                left = axes.across(steps[bar]) - width * 0.42
                height = axes.down(base[bar]) - top
                draw(group, "rect", "bar", x=left, y=top, width=width * 0.84, height=max(height, 0.1))
                base[bar] += value
    _draw_layer_names(canvas, axes, layers)
    return canvas, axes


def _draw_layer_names(canvas: Element, axes: Axes, layers: Sequence[Layer]) -> None:
    """Beside the stack, each near the middle of its layer in the mean bar."""
    wanted, base = [], 0.0
    for layer in layers:
        mean = sum(layer.values) / len(layer.values)
        wanted.append(axes.down(base + mean / 2))
        base += mean
    for layer, y in zip(layers, spread(wanted, TOP, axes.height - BOTTOM - 2)):
        edge = axes.width - axes.right + 8
        draw(canvas, "rect", f"bar layer {layer.look}", x=edge, y=y - 5, width=10.0, height=10.0)
        text(canvas, edge + 15, y + 4, layer.label, "label")
