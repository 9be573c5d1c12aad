"""Checkpoints: written atomically, safetensors and JSON only, checked by digest before they are trusted."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "state.json"
_NAME = re.compile(r"^checkpoint-(\d+)$")
_TEMPORARY = ".writing-"
_DOOMED = ".removing-"


@dataclass
class Checkpoint:
    """What a checkpoint holds.

    Attributes:
        step: optimizer steps done.
        state: numbers and text, as JSON.
        tensors: file stem to named tensors, e.g. "parameters", "optimizer", "rng", "rollouts".
    """

    step: int
    state: dict[str, Any]
    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int | None) -> Path:
    """Write `folder`/checkpoint-STEP so that it exists whole or not at all, then remove the oldest beyond `keep`.

    The files are written under a temporary name, flushed to disk, listed with size and digest in a manifest, and the
    folder is renamed. A kill at any moment leaves the earlier checkpoints sound.

    Raises:
        OSError: the disk refuses; no half-written checkpoint remains under its final name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    final = folder / f"checkpoint-{checkpoint.step:06d}"
    if final.exists():
        if find_damage(final) is None:
            return final  # the state after a step is a function of the step
        _remove(final)
    writing = folder / f"{_TEMPORARY}{final.name}-{os.getpid()}"
    writing.mkdir()
    try:
        for stem, tensors in checkpoint.tensors.items():
            if tensors:
                save_file({name: _owned(tensor) for name, tensor in tensors.items()}, writing / f"{stem}.safetensors")
        (writing / STATE).write_text(json.dumps(checkpoint.state | {"step": checkpoint.step}, indent=1))
        entries = {
            path.name: {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in sorted(writing.iterdir())
        }
        (writing / MANIFEST).write_text(json.dumps({"step": checkpoint.step, "files": entries}, indent=1))
        for path in writing.iterdir():
            _flush(path)
        _flush(writing)
        writing.rename(final)
        _flush(folder)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    if keep is not None:
        for _, old in list(_by_age(folder))[:-keep]:
            _remove(old)
    return final


def load_newest(folder: Path) -> Checkpoint | None:
    """The newest sound checkpoint of a folder, None if there is none. Damaged ones are skipped with a warning."""
    for step, path in reversed(list(_by_age(folder))):
        problem = find_damage(path)
        if problem is None:
            return _read(path, step)
        logger.warning("%s is damaged (%s); going on with the one before it", path, problem)
    return None


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, None when every file has the size and digest of the manifest."""
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} is missing or unreadable"
    if STATE not in files:
        return f"{MANIFEST} does not list {STATE}"
    for name, entry in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {entry['bytes']}"
        if _digest(file) != entry["sha256"]:
            return f"{name} does not have the digest it was written with"
    return None


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left half-written or half-removed."""
    for path in folder.glob(".*-checkpoint-*"):
        if path.name.startswith((_TEMPORARY, _DOOMED)):
            shutil.rmtree(path, ignore_errors=True)


def _read(path: Path, step: int) -> Checkpoint:
    tensors = {file.stem: load_file(file) for file in sorted(path.glob("*.safetensors"))}
    return Checkpoint(step, json.loads((path / STATE).read_text()), tensors)


def _by_age(folder: Path) -> Iterator[tuple[int, Path]]:
    found = [(int(match[1]), path) for path in folder.glob("checkpoint-*") if (match := _NAME.match(path.name))]
    yield from sorted(found)


def _remove(path: Path) -> None:
    doomed = path.with_name(f"{_DOOMED}{path.name}-{os.getpid()}")
    path.rename(doomed)  # first out of sight: a kill while removing leaves no half checkpoint
    shutil.rmtree(doomed, ignore_errors=True)


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, on the CPU, sharing no storage with another tensor of the file."""
    copy = tensor.detach().cpu().contiguous()
    return copy.clone() if copy.untyped_storage().nbytes() != copy.nbytes else copy


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
