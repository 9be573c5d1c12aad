"""The page's sections of figures, in the order in which they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from longstraw.audit import catalogue
from longstraw.audit.cost import cost_charts, seconds_by_phase
from longstraw.audit.figures import SMALL, WIDE, Chart, Figure, chart_lines, draw_chart, draw_lines
from longstraw.audit.numbers import readable
from longstraw.audit.run_data import Row, RunData, finite
from longstraw.audit.svg import Line, Point
from longstraw.audit.thinning import running_mean, thin

MAX_POINTS = 240


@dataclass(frozen=True)
class Section:
    """A heading with its figures.

    Attributes:
        key: for links.
        title: the heading.
        figures: drawn.
        constants: (name, value) of what had one value throughout and is not drawn for that.
        prominent: whether its figures are large.
    """

    key: str
    title: str
    figures: list[Figure]
    constants: list[tuple[str, str]] = field(default_factory=list)
    prominent: bool = False


def build_sections(run: RunData) -> list[Section]:
    """Sections that have something to show."""
    rows = thin(run.steps, MAX_POINTS)
    x = _step_axis(run)
    drawn: set[str] = set()

    def section(key: str, title: str, charts: Sequence[Chart]) -> Section:
        drawn.update(name for chart in charts for name in [*chart.keys, *(chart.band or ())])
        return _section(key, title, charts, rows, x)

    sections = [
        Section("reward", "Reward", [*_reward(rows, x), *_held_out(run, x)], prominent=True),
        section("signal", "What the rewards tell apart", catalogue.signal_charts(run)),
        section("completions", "Completions and prompts", catalogue.completion_charts(run)),
        section("policy", "How far the policy moves", catalogue.policy_charts(run)),
        section("optimizer", "Optimizer", catalogue.optimizer_charts(run)),
        section("staleness", "Age of the captured prompts", catalogue.staleness_charts(run)),
    ]
    cost = section("cost", "Time and memory", cost_charts(run))
    cost.figures[:0] = seconds_by_phase(run)
    drawn.add("step_time")
    others = section("others", "Further metrics", catalogue.remaining_charts(run, drawn))
    return [part for part in [*sections, cost, others] if part.figures or part.constants]


def _section(key: str, title: str, charts: Sequence[Chart], rows: Sequence[Row], x: Point) -> Section:
    figures, constants = [], []
    for chart in charts:
        lines = chart_lines(chart, rows)
        values = {value for line in lines for pair in [*line.points, *line.band] for value in pair[1:]}
        values |= {low for line in lines for low, _ in line.band}
        if len(values) == 1 and max(len(line.points) for line in lines) > 1:
            unit = "" if chart.unit == chart.title.lower() else f" ({chart.unit})"
            constants.append((chart.title, readable(values.pop()) + unit))
        elif (figure := draw_chart(chart, rows, x)) is not None:
            figures.append(figure)
    return Section(key, title, figures, constants)


def _reward(rows: Sequence[Row], x: Point) -> list[Figure]:
    chart = Chart("Training reward", "mean reward", {"reward": ""})
    present = [row for row in rows if finite(row, "reward") is not None]
    if not present:
        return []
    points = [(row["step"], row["reward"]) for row in present]
    deviations = [finite(row, "reward_std") or 0.0 for row in present]
    note = "The band is one standard deviation of the step's samples to either side of"
    if len(present) < 20:
        lines = [Line("reward", points, _around(points, deviations))]
        return [draw_lines(replace(chart, note=f"{note} their mean."), lines, rows, x, (WIDE, SMALL))]
    window = max(3, len(present) // 10) | 1
    means = list(zip((step for step, _ in points), running_mean([value for _, value in points], window)))
    lines = [
        Line("", points, look="faint"),
        Line("running mean", means, _around(means, running_mean(deviations, window))),
    ]
    note = f"Thin: as it came. Bold: running mean over {window} points. {note} it."
    return [draw_lines(replace(chart, note=note), lines, rows, x, (WIDE, SMALL))]


def _held_out(run: RunData, x: Point) -> list[Figure]:
    rows = thin(run.evaluations, MAX_POINTS)
    keys = {f"eval/{name}/reward": name for name in run.set_names}
    chart = Chart("Held-out sets", "mean reward", keys, "Mean reward of each named set; none of it is trained on.")
    figure = draw_chart(chart, rows, x, (WIDE, SMALL))
    return [figure] if figure else []


def _around(points: Sequence[Point], deviations: Sequence[float]) -> list[Point]:
    return [(value - deviation, value + deviation) for (_, value), deviation in zip(points, deviations)]


def _step_axis(run: RunData) -> Point:
    first = min(int(rows[0]["step"]) for rows in (run.steps, run.evaluations) if rows)
    return (float(first), float(max(run.last_step, first + 1)))
