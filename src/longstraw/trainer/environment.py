"""The receipt of a run: what it ran on, as JSON. What cannot be found out is left out."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_PACKAGES = (
    "longstraw", "torch", "transformers", "peft", "datasets", "tokenizers", "safetensors", "accelerate", "numpy",
    "pydantic", "bitsandbytes", "gguf",
)  # fmt: skip


def collect_receipt() -> dict[str, Any]:
    """Versions, machine, accelerator, git commit of the working directory, command line."""
    receipt: dict[str, Any] = {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": dict(_versions()),
        "cpu_threads": torch.get_num_threads(),
        "cpu_count": os.cpu_count(),
    }
    if name := _cpu_name():
        receipt["cpu"] = name
    if torch.cuda.is_available():
        receipt["accelerators"] = [
            {"name": properties.name, "bytes": properties.total_memory}
            for properties in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        ]
        receipt["cuda"] = torch.version.cuda
    if commit := _git("rev-parse", "HEAD"):
        receipt["git"] = {"commit": commit, "modified": bool(_git("status", "--porcelain", "--untracked-files=no"))}
    return receipt


def _versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            yield package, metadata.version(package)


def _cpu_name() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
