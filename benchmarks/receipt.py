"""What a figure needs beside it: where, when and by what it was measured. A field that is not known is left out."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("longstraw", "torch", "transformers", "trl", "prefix-grouper")
SWITCHES = ("THP_MEM_ALLOC_ENABLE", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD")


def provenance() -> dict[str, Any]:
    """Date, machine, versions, environment switches and git commit."""
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "versions": {"python": platform.python_version(), **_versions()},
    }
    switches = {name: os.environ[name] for name in SWITCHES if name in os.environ}
    if switches:
        found["environment"] = switches
    commit = _git("rev-parse", "HEAD")
    if commit:
        found["commit"] = commit
        found["uncommitted_changes"] = bool(_git("status", "--porcelain", "--", "src", "benchmarks"))
    return found


def write(path: Path, receipt: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(receipt, indent=2) + "\n")


def _machine() -> dict[str, Any]:
    machine: dict[str, Any] = {"system": f"{platform.system()} {platform.machine()}"}
    if os.cpu_count():
        machine["cores"] = os.cpu_count()
    for key, file, field in (("cpu", "/proc/cpuinfo", "model name"), ("memory_kib", "/proc/meminfo", "MemTotal")):
        try:
            lines = Path(file).read_text().splitlines()
        except OSError:
            continue
        values = [line.partition(":")[2].strip() for line in lines if line.startswith(field)]
        if values:
            machine[key] = values[0] if key == "cpu" else int(values[0].split()[0])
    return machine


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
