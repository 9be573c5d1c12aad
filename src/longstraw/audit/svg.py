"""Line charts as inline SVG: axes with units, bands, labels at the lines' ends. Colours come from the page's CSS."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from xml.etree.ElementTree import Element, SubElement

from longstraw.audit.numbers import linear_ticks, log_ticks, tick_label

CHARACTER = 7.0  # width of a character of the charts' 11.5 px type, on the wide side
LINE = 14.0  # least distance between labels
TOP, BOTTOM = 26.0, 38.0

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        label: written at its end where there is more than one; may be empty.
        points: (step, value), by step.
        band: (low, high) at each point, or nothing.
        colour: 0 to 5, of the page's palette.
        look: "strong", "faint" (raw values behind a mean), or "dashed".
    """

    label: str
    points: list[Point]
    band: list[Point] = field(default_factory=list)
    colour: int = 0
    look: str = "strong"


@dataclass(frozen=True)
class Axes:
    """Where values lie on a canvas.

    Attributes:
        width, height: of the canvas, in px.
        left, right: margins, in px.
        x, y: least and greatest value shown.
        log: whether y is logarithmic.
    """

    width: float
    height: float
    left: float
    right: float
    x: Point
    y: Point
    log: bool = False

    def across(self, step: float) -> float:
        """px from the left."""
        return self.left + (step - self.x[0]) / (self.x[1] - self.x[0]) * (self.width - self.left - self.right)

    def down(self, value: float) -> float:
        """px from the top."""
        low, high, at = (math.log10(v) if self.log else v for v in (*self.y, max(value, self.y[0])))
        return self.height - BOTTOM - (at - low) / (high - low) * (self.height - TOP - BOTTOM)


def line_chart(
    lines: Sequence[Line],
    *,
    size: Point,
    x: Point,
    x_label: str,
    y_label: str,
    zero: bool = False,
    log: bool = False,
    rules: Sequence[tuple[float, str]] = (),
) -> tuple[Element, Axes]:
    """Draw lines over steps.

    Args:
        size: width and height in px.
        x: first and last step of the axis.
        zero: make the y axis begin at 0 (or end there).
        log: logarithmic y axis; every value has to be positive.
        rules: (value, label) of horizontal lines; those far from the data are left out.
    """
    named = [line for line in lines if line.label]
    labels = [line.label for line in named] if len(named) > 1 else []
    right = min(12 + CHARACTER * max(map(len, labels)), 0.36 * size[0]) if labels else 14.0
    low, high = _extent([value for line in lines for value in _values(line)], zero, log)
    rules = [(value, words) for value, words in rules if low <= value <= high + 0.25 * (high - low)]
    high = max([high, *(value for value, _ in rules)])
    axes = Axes(*size, _left_margin((low, high), log, size[1]), right, x, (low, high), log)
    canvas = draw_frame(axes, x_label, y_label)
    for line in lines:
        if line.band:
            _draw_band(canvas, axes, line)
    for line in lines:
        _draw_line(canvas, axes, line)
    for value, words in rules:
        _draw_rule(canvas, axes, value, words)
    if labels:
        _draw_labels(canvas, axes, named)
    return canvas, axes


def draw_frame(axes: Axes, x_label: str, y_label: str) -> Element:
    """An SVG of the axes' size with grid, ticks and the names of both axes."""
    canvas = Element("svg", viewBox=f"0 0 {axes.width:g} {axes.height:g}", role="img")
    ticks = y_ticks(axes.y, axes.log, axes.height)
    step = min((b - a for a, b in pairwise(ticks)), default=abs(ticks[0]) or 1.0)
    floor = axes.height - BOTTOM
    text(canvas, 4, 14, y_label, "name")
    for tick in ticks:
        y = axes.down(tick)
        draw(canvas, "line", "grid", x1=axes.left, x2=axes.width - axes.right, y1=y, y2=y)
        text(canvas, axes.left - 6, y + 4, tick_label(tick, tick if axes.log else step), "tick", anchor="end")
    draw(canvas, "line", "axis", x1=axes.left, x2=axes.width - axes.right, y1=floor, y2=floor)
    across = linear_ticks(*axes.x, most=max(2, int((axes.width - axes.left - axes.right) / 60)), whole=True)
    for tick in across:
        x = axes.across(tick)
        draw(canvas, "line", "axis", x1=x, x2=x, y1=floor, y2=floor + 4)
        words = f"{tick:,.0f}"
        inside = x + CHARACTER * len(words) / 2 < axes.width
        text(canvas, x if inside else axes.width - 2, floor + 16, words, "tick", anchor="middle" if inside else "end")
    text(canvas, (axes.left + axes.width - axes.right) / 2, axes.height - 5, x_label, "name", anchor="middle")
    return canvas


def y_ticks(y: Point, log: bool, height: float) -> list[float]:
    """Ticks of the y axis, at least 28 px apart."""
    most = max(3, int((height - TOP - BOTTOM) / 28))
    return (log_ticks if log else linear_ticks)(*y, most)


def draw(parent: Element, tag: str, look: str, **attributes: float | str) -> Element:
    """Add an element of a CSS class; numbers are cut to tenths of a px."""
    values = {name: value if isinstance(value, str) else f"{value:.1f}" for name, value in attributes.items()}
    return SubElement(parent, tag, {"class": look, **values})


def text(parent: Element, x: float, y: float, words: str, look: str, anchor: str = "start") -> None:
    draw(parent, "text", look, x=x, y=y, **{"text-anchor": anchor}).text = words


def spread(wanted: Sequence[float], low: float, high: float) -> list[float]:
    """Positions near the wanted ones, in [low, high] and LINE apart where there is room for that."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    gap = min(LINE, (high - low) / max(len(wanted) - 1, 1))
    placed = [0.0] * len(wanted)
    least = low
    for index in order:
        placed[index] = max(wanted[index], least)
        least = placed[index] + gap
    most = high
    for index in reversed(order):
        placed[index] = min(placed[index], most)
        most = placed[index] - gap
    return placed


def _left_margin(y: Point, log: bool, height: float) -> float:
    ticks = y_ticks(y, log, height)
    step = min((b - a for a, b in pairwise(ticks)), default=1.0)
    return 12 + CHARACTER * max(len(tick_label(tick, tick if log else step)) for tick in ticks)


def _values(line: Line) -> list[float]:
    return [value for _, value in line.points] + [edge for pair in line.band for edge in pair]


def _extent(values: Sequence[float], zero: bool, log: bool) -> Point:
    low, high = min(values), max(values)
    if log:
        return low / 1.15, high * 1.15
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        room = abs(low) * 0.1 or 1.0
        return low - (0 if zero else room), high + room
    room = 0.05 * (high - low)
    return (low if zero and low == 0 else low - room), (high if zero and high == 0 else high + room)


def _path(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _draw_line(canvas: Element, axes: Axes, line: Line) -> None:
    at = [(axes.across(step), axes.down(value)) for step, value in line.points]
    look = f"c{line.colour} {line.look}"
    if len(at) > 1:
        draw(canvas, "polyline", f"line {look}", points=_path(at))
    if len(at) <= 30 and line.look != "faint":
        for x, y in at:
            draw(canvas, "circle", f"dot {look}", cx=x, cy=y, r=2.6)


def _draw_band(canvas: Element, axes: Axes, line: Line) -> None:
    steps = [axes.across(step) for step, _ in line.points]
    if len(steps) == 1:
        low, high = (axes.down(edge) for edge in line.band[0])
        draw(canvas, "line", f"whisker c{line.colour}", x1=steps[0], x2=steps[0], y1=low, y2=high)
        return
    upper = [(x, axes.down(high)) for x, (_, high) in zip(steps, line.band)]
    lower = [(x, axes.down(low)) for x, (low, _) in zip(steps, line.band)]
    draw(canvas, "polygon", f"band c{line.colour}", points=_path([*upper, *reversed(lower)]))


def _draw_rule(canvas: Element, axes: Axes, value: float, words: str) -> None:
    y = axes.down(value)
    draw(canvas, "line", "rule", x1=axes.left, x2=axes.width - axes.right, y1=y, y2=y)
    text(canvas, axes.left + 4, y - 4, words, "tick")


def _draw_labels(canvas: Element, axes: Axes, lines: Sequence[Line]) -> None:
    room = int((axes.right - 8) / CHARACTER)
    places = spread([axes.down(line.points[-1][1]) for line in lines], TOP, axes.height - BOTTOM)
    for line, y in zip(lines, places):
        words = line.label if len(line.label) <= room else line.label[: room - 1] + "…"
        text(canvas, axes.width - axes.right + 8, y + 4, words, f"label c{line.colour}")
