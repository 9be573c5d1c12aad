"""The run directory: each run has its own, and a disk that is full leaves what can be resumed."""

from __future__ import annotations

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny
from safetensors import SafetensorError
from tiny_runs import assert_same_run, metrics, run

from longstraw.config.load import load_config
from longstraw.config.messages import ConfigError
from longstraw.trainer import checkpoint
from longstraw.trainer.run import train
from longstraw.trainer.run_dir import RunDir
from longstraw.trainer.written import WriteError

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_runs_that_start_together_have_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(None, (), tiny.options())
    with ThreadPoolExecutor(8) as pool:
        opened = list(pool.map(lambda _: RunDir.open(config, resume=False).path, range(8)))
    assert len(set(opened)) == 8 and all(path.is_dir() for path in opened)


def test_of_two_runs_with_one_name_the_second_is_refused(tmp_path: Path) -> None:
    config = load_config(None, (), tiny.options(output_dir=str(tmp_path / "run")))
    first, second = (RunDir.open(config, resume=False) for _ in range(2))
    first.begin(config)
    with pytest.raises(ConfigError, match=r"another run has just begun in .*run. Choose another output_dir"):
        second.begin(config)
    first.begin(config, resume=True)


def test_a_run_that_cannot_begin_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no prompt of 6 is left"):
        train(load_config(None, (), tiny.options(max_prompt_length=1)))
    assert not list(Path("runs").iterdir())


@pytest.mark.parametrize("error", [FULL, SafetensorError("Error while serializing: I/O error: No space left")])
@pytest.mark.parametrize("what", ["checkpoint", "metrics", "completions", "final"])
def test_a_full_disk_is_one_message_and_the_run_goes_on_later(
    what: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what in ("metrics", "completions") and isinstance(error, SafetensorError):
        pytest.skip("text files are written without that library")
    options: dict[str, Any] = dict(max_steps=3, save_steps=1)
    run(tmp_path / "whole", **options)

    def full(*_: Any, **__: Any) -> Any:
        raise error

    real_save, real_replace, real_open = checkpoint.save_file, os.replace, Path.open

    class Filling:
        """A file of which only the beginning fits."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Filling:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, text: str) -> None:
            self.file.write(text[:9])
            self.file.flush()
            full()

    def opened(self: Path, mode: str = "r", *given: Any, **named: Any) -> Any:
        filling = self.name == "metrics.jsonl" and mode == "a" and self.exists()
        filling = filling and '"step": 1' in self.read_text()
        file = real_open(self, mode, *given, **named)
        return Filling(file) if filling else file

    with monkeypatch.context() as patched:
        if what == "final":
            patched.setattr("transformers.PreTrainedModel.save_pretrained", full)
        elif what == "checkpoint":
            patched.setattr(checkpoint, "save_file", lambda t, to: full() if "000002" in str(to) else real_save(t, to))
        elif what == "completions":
            patched.setattr(os, "replace", lambda a, to: full() if "step-000002" in str(to) else real_replace(a, to))
        else:
            patched.setattr(Path, "open", opened)
        with pytest.raises(
            WriteError, match=r"cannot be written: .*[Nn]o space left.*Free space on its disk"
        ) as raised:
            run(tmp_path / "run", **options)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed" and summary["step"] == (3 if what == "final" else 1)
    assert f"The state after step {summary['step']} is saved." in raised.value.__notes__[-1]
    run(tmp_path / "run", resume=True, **options)
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert len(metrics(tmp_path / "run")) == 3
    assert not list((tmp_path / "run").rglob(".*writing*"))


def fails(**_: Any) -> list[float]:
    raise ArithmeticError("the judge is away")


def test_a_full_disk_does_not_hide_what_went_wrong_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise FULL

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(RuntimeError, match="the judge is away") as raised:
        run(tmp_path, reward_funcs="test_run_directory:fails", eval_on_start=False)
    assert any("cannot be written" in note for note in raised.value.__notes__)
