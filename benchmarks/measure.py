"""One method, measured in a process of its own: `python -m benchmarks.measure SPEC.json` prints one JSON row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.workload import TextWorkload, Workload, from_dict

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Spec:
    """What to measure.

    Attributes:
        method: a name in `methods.METHODS`.
        workload: model and data.
        options: keyword arguments of the method.
        gradient: where to leave the gradient of the measured step (safetensors); None keeps none.
    """

    method: str
    workload: Workload | TextWorkload
    options: dict[str, Any] = field(default_factory=dict)
    gradient: Path | None = None


def measure(spec: Spec) -> dict[str, Any]:
    """Seconds, peak private bytes above the built model, and both by phase, from a fresh process.

    With `report_progress` among the options, what the process says on standard error is passed on.

    Raises:
        RuntimeError: the process failed; its last words are in the message.
    """
    request = {
        "method": spec.method,
        "workload": spec.workload.as_dict(),
        "options": spec.options,
        "gradient": str(spec.gradient) if spec.gradient else None,
    }
    with tempfile.TemporaryDirectory(prefix="longstraw-benchmark-") as folder:
        path, result = Path(folder, "spec.json"), Path(folder, "row.json")
        path.write_text(json.dumps(request | {"result": str(result)}))
        command = [sys.executable, "-m", "benchmarks.measure", str(path)]
        live = spec.options.get("report_progress", False)
        done = subprocess.run(command, cwd=ROOT, stderr=None if live else subprocess.PIPE, text=True)
        if done.returncode or not result.exists():
            said = "see above" if live else done.stderr[-3000:]
            raise RuntimeError(f"{spec.method} ended with exit code {done.returncode}:\n{said}")
        return json.loads(result.read_text())


def measure_here(spec: Spec) -> dict[str, Any]:
    """What `measure` returns, measured in this process, whose earlier work may hide memory."""
    import torch

    from benchmarks.memory import Watcher
    from benchmarks.methods import METHODS

    model, group = spec.workload.model(), spec.workload.data()
    step = METHODS[spec.method](model, **spec.options)
    step(group.head(64, 2, 16), Watcher())  # loads kernels and starts threads
    model.zero_grad(set_to_none=True)
    with Watcher() as watcher:
        facts = step(group, watcher)
    if spec.gradient is not None:
        from safetensors.torch import save_file

        save_file({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, spec.gradient)
    return {
        "seconds": watcher.seconds,
        "peak_bytes": watcher.peak_bytes,
        "base_bytes": watcher.base_bytes,
        "phases": {name: vars(cost) for name, cost in watcher.phases.items()},
        "threads": torch.get_num_threads(),
        **(facts or {}),
    }


def _child(path: str) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    request = json.loads(Path(path).read_text())
    gradient = Path(request["gradient"]) if request["gradient"] else None
    spec = Spec(request["method"], from_dict(request["workload"]), request["options"], gradient)
    Path(request["result"]).write_text(json.dumps(measure_here(spec)))


if __name__ == "__main__":
    _child(sys.argv[1])
