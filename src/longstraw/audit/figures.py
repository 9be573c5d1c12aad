"""Figures of the page: a chart in the sizes it is shown in, what hovering says, and the same data as a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, tostring

from markupsafe import Markup

from longstraw.audit.bars import Layer, stacked_bars
from longstraw.audit.numbers import readable
from longstraw.audit.run_data import Row, finite
from longstraw.audit.svg import Axes, Line, Point, line_chart
from longstraw.audit.thinning import steps_label

SMALL: Point = (380, 220)
WIDE: Point = (560, 290)
STEP_AXIS = "optimizer step"


@dataclass(frozen=True)
class Chart:
    """What to draw over steps, from keys of metrics.

    Attributes:
        title: of the figure.
        unit: of the y axis.
        keys: label by key of metrics; a key without values is left out.
        note: one or two sentences beneath the title.
        band: keys of the band's lower and upper edge around the first line.
        zero: the y axis begins at 0.
        spread: logarithmic where values are positive and differ by more than a hundredfold.
        scale: values are divided by it.
        rules: (value, label) of lines to compare with, in the unit of the metrics.
    """

    title: str
    unit: str
    keys: dict[str, str]
    note: str = ""
    band: tuple[str, str] | None = None
    zero: bool = False
    spread: bool = False
    scale: float = 1.0
    rules: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class View:
    """One drawing of a figure.

    Attributes:
        svg: the drawing.
        hover: JSON with its width, and px and text of every step.
        shown: "always", or on "wide" or "narrow" screens only.
    """

    svg: Markup
    hover: str
    shown: str


@dataclass(frozen=True)
class Figure:
    """A figure with its table.

    Attributes:
        title, note: words above the drawing.
        views: the drawing, in one or two sizes.
        header, rows: the data as a table.
    """

    title: str
    note: str
    views: list[View]
    header: list[str]
    rows: list[list[str]]


def chart_lines(chart: Chart, rows: Sequence[Row]) -> list[Line]:
    """Its lines, without those that have no values."""
    lines: list[Line] = []
    for colour, (key, label) in enumerate(chart.keys.items()):
        present = [(row, value) for row in rows if (value := finite(row, key)) is not None]
        if present:
            points = [(row["step"], value / chart.scale) for row, value in present]
            edges = [_edges(row, chart) for row, _ in present] if chart.band and not lines else []
            band = [edge for edge in edges if edge is not None]
            lines.append(Line(label, points, band if len(band) == len(points) else [], colour % 6))
    return lines


def draw_chart(chart: Chart, rows: Sequence[Row], x: Point, sizes: Sequence[Point] = (SMALL,)) -> Figure | None:
    """The figure of a chart over the steps `x`; None where no key has values."""
    lines = chart_lines(chart, rows)
    return draw_lines(chart, lines, rows, x, sizes) if lines else None


def draw_lines(
    chart: Chart, lines: Sequence[Line], rows: Sequence[Row], x: Point, sizes: Sequence[Point] = (SMALL,)
) -> Figure:
    """The figure of given lines under a chart's words; `rows` name the steps."""
    values = [value for line in lines for _, value in line.points]
    log = chart.spread and min(values) > 0 and max(values) > 100 * min(values)
    header, table, texts = _tabulate(lines, rows, chart.unit)

    def render(size: Point) -> tuple[Element, Axes]:
        return line_chart(
            lines,
            size=size,
            x=x,
            x_label=STEP_AXIS,
            y_label=f"{chart.unit}, logarithmic" if log else chart.unit,
            zero=chart.zero,
            log=log,
            rules=[(value / chart.scale, words) for value, words in chart.rules],
        )

    views = _views(render, sizes, chart.title, _describe(lines), texts)
    return Figure(chart.title, chart.note, views, header, table)


def draw_stack(
    title: str, note: str, unit: str, layers: Sequence[Layer], rows: Sequence[Row], sizes: Sequence[Point]
) -> Figure:
    """The figure of stacked bars, a bar for each of `rows`."""
    steps = [row["step"] for row in rows]
    names = [steps_label(row) for row in rows]
    totals = [sum(layer.values[bar] for layer in layers) for bar in range(len(rows))]
    table = [
        [name, readable(total), *(readable(layer.values[bar]) for layer in layers)]
        for bar, (name, total) in enumerate(zip(names, totals))
    ]
    texts = {
        step: "\n".join([name, *(f"{layer.label} {readable(layer.values[bar])}" for layer in reversed(layers))])
        for bar, (step, name) in enumerate(zip(steps, names))
    }

    def render(size: Point) -> tuple[Element, Axes]:
        return stacked_bars(layers, steps, size=size, x_label=STEP_AXIS, y_label=unit)

    means = [f"{layer.label} {readable(sum(layer.values) / len(layer.values))}" for layer in layers]
    views = _views(render, sizes, title, f"Stacked bars; on average, {unit}: {', '.join(means)}.", texts)
    return Figure(title, note, views, ["step", f"all, {unit}", *(layer.label for layer in layers)], table)


def _edges(row: Row, chart: Chart) -> Point | None:
    assert chart.band is not None
    low, high = (finite(row, key) for key in chart.band)
    return None if low is None or high is None else (low / chart.scale, high / chart.scale)


def _views(
    render: Callable[[Point], tuple[Element, Axes]],
    sizes: Sequence[Point],
    title: str,
    description: str,
    texts: dict[float, str],
) -> list[View]:
    views = []
    for size in sizes:
        svg, axes = render(size)
        _name(svg, title, description)
        hover = {"width": size[0], "at": [round(axes.across(step), 1) for step in texts], "text": list(texts.values())}
        shown = "always" if len(sizes) == 1 else "wide" if size == max(sizes) else "narrow"
        views.append(View(Markup(tostring(svg, encoding="unicode")), json.dumps(hover), shown))
    return views


def _name(svg: Element, title: str, description: str) -> None:
    """Title and description for those who do not see the drawing."""
    svg.set("aria-label", title)
    for place, (tag, words) in enumerate((("title", title), ("desc", description))):
        element = Element(tag)
        element.text = words
        svg.insert(place, element)


def _tabulate(
    lines: Sequence[Line], rows: Sequence[Row], unit: str
) -> tuple[list[str], list[list[str]], dict[float, str]]:
    """Header and rows of the table, and what hovering says at each step."""
    header = ["step"]
    columns: list[tuple[str, dict[float, str]]] = []
    for line in lines:
        name = line.label or unit
        header.append(name)
        columns.append((name, {step: readable(value) for step, value in line.points}))
        if line.band:
            header.append("band")
            spans = (f"{readable(low)} to {readable(high)}" for low, high in line.band)
            columns.append(("band", dict(zip((step for step, _ in line.points), spans))))
    table, texts = [], {}
    for row in rows:
        step = row["step"]
        if any(step in values for _, values in columns):
            cells = [values.get(step, "–") for _, values in columns]
            table.append([steps_label(row), *cells])
            told = (f"{name} {cell}" for (name, _), cell in zip(columns, cells) if cell != "–")
            texts[step] = "\n".join([steps_label(row), *told])
    return header, table, texts


def _describe(lines: Sequence[Line]) -> str:
    parts = []
    for line in lines:
        values = [value for _, value in line.points]
        first, last = line.points[0], line.points[-1]
        parts.append(
            f"{line.label or 'The value'} from {readable(first[1])} at step {readable(first[0])} to "
            f"{readable(last[1])} at step {readable(last[0])}; least {readable(min(values))}, "
            f"greatest {readable(max(values))}"
        )
    return f"Lines over {STEP_AXIS}s. {'. '.join(parts)}."
