"""Checkpoints are whole or not there, damaged ones are passed over, and only so many are kept."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from longstraw.trainer import checkpoint as module
from longstraw.trainer.checkpoint import Checkpoint, load_newest, save_checkpoint


def make(step: int) -> Checkpoint:
    base = torch.arange(6.0)
    return Checkpoint(
        step, {"position": step * 2}, {"parameters": {"w": base[:3] + step, "view": base[3:]}, "rollouts": {}}
    )


def test_round_trip_and_keeping_the_last(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, make(step), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-000002", "checkpoint-000010"]
    loaded = load_newest(tmp_path)
    assert loaded is not None and loaded.step == 10 and loaded.state["position"] == 20
    assert torch.equal(loaded.tensors["parameters"]["w"], torch.tensor([10.0, 11.0, 12.0]))
    assert {path.suffix for path in (tmp_path / "checkpoint-000010").iterdir()} == {".json", ".safetensors"}


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "no manifest"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, make(step), keep=None)
    file = tmp_path / "checkpoint-000002" / "parameters.safetensors"
    content = file.read_bytes()
    if damage == "flip":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "truncate":
        file.write_bytes(content[:-3])
    elif damage == "remove":
        file.unlink()
    else:
        (file.parent / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        loaded = load_newest(tmp_path)
    assert loaded is not None and loaded.step == 1
    assert "checkpoint-000002 is damaged" in caplog.text


@pytest.mark.parametrize("dying_call", ["save_file", "_flush", "_digest", "rename"])
def test_dying_while_writing_leaves_the_earlier_one(
    tmp_path: Path, dying_call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, make(1), keep=1)

    def die(*_: object, **__: object) -> None:
        os._exit(9)

    process = os.fork()
    if process == 0:  # as after SIGKILL: no cleanup runs
        monkeypatch.setattr(*((Path, "rename") if dying_call == "rename" else (module, dying_call)), die)
        save_checkpoint(tmp_path, make(2), keep=1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 9
    loaded = load_newest(tmp_path)
    assert loaded is not None and loaded.step == 1
    save_checkpoint(tmp_path, make(2), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000002"]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, make(1), keep=1)

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(module, "_flush", full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(tmp_path, make(2), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "absent") is None
