"""A run directory as data: rows of metrics, configuration, receipts and completions, however the run ended."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

Row = dict[str, Any]

_EVALUATION = re.compile(r"^eval/(?P<name>.+)/reward$")


@dataclass(frozen=True)
class RunData:
    """What could be read of one run.

    Attributes:
        path: the run directory.
        steps: one row an optimizer step, by step; everything but evaluations.
        evaluations: one row a step at which held-out sets were evaluated, by step.
        num_unreadable: lines of metrics.jsonl that are no row, such as a last one that a kill cut short.
        config: the resolved configuration; empty where it cannot be read.
        config_text: the same as it was written.
        starts: receipts of every start, oldest first.
        summary: how the run said it ended; empty where it said nothing.
        completion_files: by step.
        has_final: whether the final model was saved.
        checkpoint_steps: steps with a checkpoint.
        last_written: when the last row of metrics was written.
    """

    path: Path
    steps: list[Row]
    evaluations: list[Row]
    num_unreadable: int
    config: dict[str, Any]
    config_text: str
    starts: list[dict[str, Any]]
    summary: dict[str, Any]
    completion_files: dict[int, Path]
    has_final: bool
    checkpoint_steps: list[int]
    last_written: datetime

    @property
    def last_step(self) -> int:
        """The last step that any row tells of."""
        return max(int(rows[-1]["step"]) for rows in (self.steps, self.evaluations) if rows)

    @property
    def planned_steps(self) -> int | None:
        """Steps that the run set out to do; None where neither summary nor configuration says."""
        for steps in (self.summary.get("num_steps"), self.config.get("max_steps")):
            if isinstance(steps, int) and steps > 0:
                return steps
        return None

    @property
    def set_names(self) -> list[str]:
        """Names of the held-out sets that were evaluated, in order of appearance."""
        names = (_EVALUATION.match(key) for row in self.evaluations for key in row)
        return list(dict.fromkeys(match["name"] for match in names if match))

    def option(self, *keys: str) -> Any:
        """A value of the configuration, e.g. `option("model", "path")`; None where there is none."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value


def read_run(path: Path) -> RunData:
    """Read a run directory. Files that are missing or broken leave their part empty; metrics have to be there.

    Raises:
        ValueError: no such directory, no run directory, or no row of metrics in it; the message says what to do.
    """
    metrics = path / "metrics.jsonl"
    if not path.is_dir():
        raise ValueError(f"{path} is {'a file' if path.exists() else 'not there'}. {_way_out(path)}")
    if not metrics.is_file():
        if (path / "config.yaml").is_file():
            raise ValueError(
                f"{path} has no metrics.jsonl: the run ended before its first row, so there is nothing to report. "
                f"Go on with it: longstraw train {path} --resume"
            )
        raise ValueError(f"{path} is no run directory: it has no metrics.jsonl. {_way_out(path)}")
    rows, num_unreadable = read_json_lines(metrics)
    steps, evaluations = _by_step(rows)
    if not steps and not evaluations:
        raise ValueError(
            f"{metrics} holds no whole row: the run ended before its first one, so there is nothing to report. "
            f"Go on with it: longstraw train {path} --resume"
        )
    config_text = _text(path / "config.yaml")
    starts = _json_object(path / "environment.json").get("starts")
    return RunData(
        path=path,
        steps=steps,
        evaluations=evaluations,
        num_unreadable=num_unreadable,
        config=_yaml_mapping(config_text),
        config_text=config_text,
        starts=[start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else [],
        summary=_json_object(path / "summary.json"),
        completion_files=_numbered(path / "completions", "step-*.jsonl"),
        has_final=(path / "final").is_dir(),
        checkpoint_steps=list(_numbered(path / "checkpoints", "checkpoint-*")),
        last_written=datetime.fromtimestamp(metrics.stat().st_mtime).astimezone(),
    )


def read_json_lines(path: Path) -> tuple[list[Row], int]:
    """The objects of a JSON lines file, and how many lines are none."""
    rows, num_unreadable = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            num_unreadable += 1
    return rows, num_unreadable


def finite(row: Row, key: str) -> float | None:
    """The value as a number; None where it is missing, null, not finite or no number."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def finite_values(rows: Iterable[Row], key: str) -> list[float]:
    """Of the rows that have one."""
    return [value for row in rows if (value := finite(row, key)) is not None]


def _by_step(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Rows of one step are one row; a later value replaces an earlier one."""
    steps: dict[int, Row] = {}
    evaluations: dict[int, Row] = {}
    for row in rows:
        number = finite(row, "step")
        if number is None:
            continue
        step = int(number)
        for key, value in row.items():
            if key != "step":
                kind = evaluations if key.startswith("eval/") else steps
                kind.setdefault(step, {"step": step})[key] = value
    return [steps[step] for step in sorted(steps)], [evaluations[step] for step in sorted(evaluations)]


def _way_out(path: Path) -> str:
    """Where runs are that the user may have meant."""
    found = sorted(metrics.parent for metrics in _metrics_near(path))
    if found:
        return f"Give a run directory, e.g. one of: {', '.join(map(str, found[-5:]))}"
    return "Give the run directory that `longstraw train` printed (its output_dir; by default runs/DATE-TIME)."


def _metrics_near(path: Path) -> list[Path]:
    if path.is_dir():
        return [*path.glob("*/metrics.jsonl"), *path.glob("*/*/metrics.jsonl")]
    beside = path.parent.glob("*/metrics.jsonl") if path.parent.is_dir() else ()
    return [*beside, *Path("runs").glob("*/metrics.jsonl")]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_text(path) or "{}")
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _yaml_mapping(text: str) -> dict[str, Any]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return value if isinstance(value, dict) else {}


def _numbered(folder: Path, pattern: str) -> dict[int, Path]:
    """Entries named like PREFIX-000012, by number."""
    entries = {entry.name.split(".")[0].rsplit("-", 1)[-1]: entry for entry in folder.glob(pattern)}
    return {int(number): entries[number] for number in sorted(entries) if number.isdigit()}
