"""Running tiny configurations and looking at what they leave behind."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import tiny
import torch
from rich.console import Console
from safetensors.torch import load_file

from longstraw.config.load import load_config
from longstraw.trainer.run import RunResult, train


def run(output_dir: Path, *, resume: bool = False, printed: StringIO | None = None, **changes: Any) -> RunResult:
    """Train the tiny configuration; what it says goes to `printed`."""
    config = load_config(None, (), tiny.options(output_dir=str(output_dir), **changes))
    return train(config, resume=resume, console=Console(file=printed or StringIO()))


def metrics(output_dir: Path) -> list[dict[str, Any]]:
    """Rows of training steps."""
    file = output_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row for row in rows if "loss" in row]


def completions(output_dir: Path) -> dict[str, str]:
    """File name to text."""
    return {path.name: path.read_text() for path in sorted((output_dir / "completions").iterdir())}


def weights(output_dir: Path) -> dict[str, torch.Tensor]:
    """The final model's tensors, or the adapter's."""
    final = output_dir / "final"
    file = final / "adapter_model.safetensors"
    return load_file(file if file.exists() else final / "model.safetensors")


def assert_same_run(one: Path, other: Path) -> None:
    """Bit-identical weights, sampled ids, rewards and advantages; equal losses and norms at every step."""
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), f"{name} differs"
    assert completions(one) == completions(other)
    for row, twin in zip(metrics(one), metrics(other), strict=True):
        for key in ("step", "loss", "grad_norm", "learning_rate", "num_tokens", "epoch"):
            assert row[key] == twin[key], f"{key} differs at step {row['step']}"
