"""Tables and plot of the comparison: `docs/benchmarks.md` between its markers, and `docs/figures/comparison.svg`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Rows = dict[tuple[str, int, int], dict[str, Any]]  # (contestant, prompt, group) -> its row
BEGIN, END = "<!-- comparison: written by python -m benchmarks.compare -->", "<!-- end of comparison -->"
BASELINE = "conventional"


def markdown(titles: dict[str, str], rows: Rows) -> str:
    """Ratios at the largest point, then seconds and peak memory over the grid."""
    if not rows:
        return "nothing measured yet"
    points = sorted({(prompt, group) for _, prompt, group in rows})
    names = [name for name in titles if any(key[0] == name for key in rows)]
    parts = []
    ranked = [p for p in points if (BASELINE, *p) in rows]
    if ranked:
        best = max(ranked, key=lambda p: (p[0], p[1] == 8, p[1]))
        parts.append(_ratios(titles, names, rows, *best))
    parts.append("Seconds:\n\n" + _grid(titles, names, rows, points, lambda row: f"{row['seconds']:.1f}"))
    memory = _grid(titles, names, rows, points, lambda row: f"{row['peak_bytes'] / 1e6:.0f}")
    parts.append("Peak private memory above the model, MB:\n\n" + memory)
    return "\n\n".join(parts) + "\n"


def write(docs: Path, titles: dict[str, str], rows: Rows) -> None:
    """Puts the tables between the markers of `benchmarks.md` (at its end where there are none) and draws the plot."""
    (docs / "figures").mkdir(parents=True, exist_ok=True)
    plot(docs / "figures" / "comparison.svg", titles, rows)
    page = docs / "benchmarks.md"
    text = page.read_text() if page.exists() else "# Benchmarks\n"
    block = f"{BEGIN}\n{_provenance(rows)}\n\n{markdown(titles, rows)}\n![comparison](figures/comparison.svg)\n{END}"
    before, found, rest = text.partition(BEGIN)
    after = rest.partition(END)[2] if found else "\n"
    page.write_text(f"{before if found else before.rstrip() + chr(10) * 2}{block}{after}")


def plot(path: Path, titles: dict[str, str], rows: Rows) -> None:
    """Seconds and memory over the prompt at one group size, and over the group at one prompt length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    prompts = sorted({prompt for _, prompt, _ in rows})
    groups = sorted({group for _, _, group in rows})
    group = 8 if 8 in groups else groups[-1]
    prompt = max(prompts, key=lambda p: (sum(key[1] == p for key in rows), p))
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), sharex="col")
    measures: list[tuple[str, Callable[[dict[str, Any]], float]]] = [
        ("seconds a step", lambda row: row["seconds"]),
        ("peak memory above the model, MB", lambda row: row["peak_bytes"] / 1e6),
    ]
    sweeps: list[tuple[str, list[tuple[int, int]], int]] = [
        (f"prompt tokens (group of {group})", [(p, group) for p in prompts], 0),
        (f"responses in the group (prompt of {prompt:,} tokens)", [(prompt, g) for g in groups], 1),
    ]
    for column, (label, points, which) in enumerate(sweeps):
        for line, (measure, value) in enumerate(measures):
            axis = axes[line][column]
            for number, (name, title) in enumerate(titles.items()):
                found = [(point[which], value(rows[(name, *point)])) for point in points if (name, *point) in rows]
                if found:
                    axis.plot(*zip(*found), marker="o", markersize=4, color=f"C{number}", label=title)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_ylabel(measure)
            axis.grid(alpha=0.3)
            ticks = [point[which] for point in points]
            axis.set_xticks(ticks, [f"{tick // 1024}K" if tick >= 1024 else str(tick) for tick in ticks])
        axes[1][column].set_xlabel(label)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4)
    figure.set_layout_engine("constrained")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _ratios(titles: dict[str, str], names: list[str], rows: Rows, prompt: int, group: int) -> str:
    base = rows[(BASELINE, prompt, group)]
    lines = [
        f"Prompt {prompt:,}, group {group}:",
        "",
        "| method | seconds | times faster | peak MB | share of memory | gradient's relative L2 error |",
        "|---|---|---|---|---|---|",
    ]
    for name in names:
        row = rows.get((name, prompt, group))
        if row is None:
            continue
        error = row.get("relative_l2_error")
        lines.append(
            f"| {titles[name]} | {row['seconds']:.1f} | {base['seconds'] / row['seconds']:.1f} "
            f"| {row['peak_bytes'] / 1e6:.0f} | {row['peak_bytes'] / base['peak_bytes']:.2f} "
            f"| {'the reference' if error is None else f'{error:.0e}'} |"
        )
    return "\n".join(lines)


def _grid(
    titles: dict[str, str],
    names: list[str],
    rows: Rows,
    points: list[tuple[int, int]],
    cell: Callable[[dict[str, Any]], str],
) -> str:
    lines = ["| prompt | group | " + " | ".join(titles[name] for name in names) + " |", "|---" * (len(names) + 2) + "|"]
    for prompt, group in points:
        cells = [cell(rows[(n, prompt, group)]) if (n, prompt, group) in rows else "" for n in names]
        lines.append(f"| {prompt:,} | {group} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _provenance(rows: Rows) -> str:
    """When, where and by which commits the rows were measured: they need not be of one day."""
    dates = sorted({row["date"][:10] for row in rows.values() if "date" in row})
    commits = sorted({row["commit"][:10] for row in rows.values() if "commit" in row})
    machines = sorted({_machine(row["machine"]) for row in rows.values() if "machine" in row})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}" if dates else ""
    text = "Printed by `python -m benchmarks.compare`"
    text += f", {when}" if when else ""
    text += f", on {'; '.join(machines)}" if machines else ""
    return text + (f", commit {', '.join(commits)}." if commits else ".")


def _machine(machine: dict[str, Any]) -> str:
    parts = [f"{machine['cores']} cores" if "cores" in machine else "", machine.get("cpu", "")]
    memory = f"{machine['memory_kib'] / 2**20:.0f} GiB" if "memory_kib" in machine else ""
    return ", ".join(part for part in [*parts, memory] if part)
