"""The comparison's grid: who takes part, and the rows that have been measured so far."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import receipt
from benchmarks.gate import ALLOWED, relative_error
from benchmarks.measure import Spec, measure
from benchmarks.workload import Workload

PIECES = {"segment_tokens": 1024, "block_tokens": 512}
DISK = {"tier": "disk"}


@dataclass(frozen=True)
class Contestant:
    """A column of the comparison.

    Attributes:
        name: as `--again` takes it.
        title: as the tables show it.
        method: see `methods.METHODS`.
        reference: whose gradient its own has to equal.
        passes: prompt forward passes that the step costs by operation count, given the group's size.
    """

    name: str
    title: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    reference: str = "conventional"
    passes: Callable[[int], int] = lambda group: 4

    def path(self, folder: Path, workload: Workload) -> Path:
        return folder / f"{self.name}-p{workload.prompt}-g{workload.group}-r{workload.response}.json"

    def estimate(self, workload: Workload) -> float:
        """Seconds on two cores, roughly, the start of the process and the responses included."""
        forward = 5e-5 * workload.prompt + 1.9e-8 * workload.prompt**2
        return 6 + self.passes(workload.group) * forward + workload.group * workload.prompt / 3e4


CONVENTIONAL = Contestant(
    "conventional", "conventional + checkpointing", "conventional", passes=lambda group: 4 * group
)
CONSTANT = Contestant("constant_prompt", "", "constant_prompt", passes=lambda group: 1)
REFERENCES = {column.name: column for column in (CONVENTIONAL, CONSTANT)}


def contestants() -> list[Contestant]:
    """In the order of the tables; the first is the reference of the exact gradient."""
    from benchmarks.methods import retains_graphs

    none, full = {"prompt_grad": "none", **PIECES}, {"prompt_grad": "full", **PIECES}
    found = [
        CONVENTIONAL,
        Contestant("trl", "TRL GRPOTrainer", "trl", passes=lambda group: 4 * group),
        Contestant("prefix_grouper", "PrefixGrouper", "prefix_grouper", passes=lambda group: 3),
        Contestant("packed", "packed graph", "packed", passes=lambda group: 3),
        Contestant("full", "full", "longstraw", full),
        Contestant("full_disk", "full, disk", "longstraw", full | DISK),
        Contestant("none", "none", "longstraw", none, "constant_prompt", lambda group: 1),
        Contestant("none_disk", "none, disk", "longstraw", none | DISK, "constant_prompt", lambda group: 1),
    ]
    if retains_graphs():
        retained = full | {"retain_graph_bytes": 1 << 40}
        title = "full, graphs retained"
        found.insert(6, Contestant("full_retained", title, "longstraw", retained, passes=lambda group: 3))
    return found


class Grid:
    """Rows on disk, and what is missing.

    Args:
        folder: where rows and the reference gradients lie.
    """

    def __init__(self, folder: Path, points: list[Workload], columns: list[Contestant]) -> None:
        self.folder = folder
        self.points = points
        self.columns = columns
        folder.mkdir(parents=True, exist_ok=True)

    def row(self, column: Contestant, point: Workload) -> dict[str, Any] | None:
        path = column.path(self.folder, point)
        if not path.exists():
            return None
        row = json.loads(path.read_text())
        return row if row["options"] == column.options else None

    def missing(self, point: Workload) -> list[Contestant]:
        """What has to run at this point, references first: again, where their gradient is gone and needed."""
        wanted = [column for column in self.columns if self.row(column, point) is None]
        needed = {column.reference for column in wanted} | {column.name for column in wanted}
        references = [
            reference
            for name, reference in REFERENCES.items()
            if name in needed and (reference in wanted or not self.gradient(reference, point).exists())
        ]
        return references + [column for column in wanted if column.name not in REFERENCES]

    def gradient(self, column: Contestant, point: Workload) -> Path:
        return column.path(self.folder, point).with_suffix(".safetensors")

    def fill(self, column: Contestant, point: Workload) -> dict[str, Any]:
        """Measures one row and keeps it.

        Raises:
            RuntimeError: the process failed; nothing is kept, so that a later run tries again.
        """
        gradient = self.gradient(column, point)
        row = measure(Spec(column.method, point, column.options, gradient))
        if column.name not in REFERENCES:
            row["relative_l2_error"] = relative_error(gradient, self.gradient(REFERENCES[column.reference], point))
            gradient.unlink()
        row |= {"options": column.options, **receipt.provenance()}
        column.path(self.folder, point).write_text(json.dumps(row))
        return row


def wrong(row: dict[str, Any]) -> bool:
    return row.get("relative_l2_error", 0.0) > ALLOWED
