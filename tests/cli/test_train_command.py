"""`longstraw train` and `longstraw config` as a user types them: outputs, messages, exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from longstraw.cli import app

MODULE = """
import time, torch
from transformers import LlamaConfig, LlamaForCausalLM

def model():
    config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, max_position_embeddings=64, eos_token_id=None)
    return LlamaForCausalLM(config)

def rows(): return [{"prompt": [number, 7, 9]} for number in range(4)]
def first_token(completion_ids, **_): return [float(ids[0]) for ids in completion_ids]
def slow(completion_ids, **_):
    time.sleep(0.2)
    return first_token(completion_ids)
def broken(**_): raise KeyError("verdict")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a configuration and a module beside it, as a user would have."""
    (tmp_path / "mine.py").write_text(MODULE)
    options: dict[str, Any] = {
        "model": "mine:model", "dataset": "mine:rows", "reward_funcs": "mine:first_token", "num_generations": 3,
        "max_completion_length": 2, "max_steps": 2, "output_dir": "run",
    }  # fmt: skip
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(options))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


def longstraw(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def test_a_run_says_where_it_is(folder: Path) -> None:
    result = longstraw("train", "mine.yaml", "max_steps=1")
    assert result.exit_code == 0, result.output
    assert "step 1/1" in result.output and "The run is in run" in result.output
    assert (folder / "run/final/model.safetensors").exists()
    assert yaml.safe_load((folder / "run/config.yaml").read_text())["max_steps"] == 1


def test_an_existing_run_is_not_written_over_but_resumed(folder: Path) -> None:
    assert longstraw("train", "mine.yaml", "max_steps=1").exit_code == 0
    refused = longstraw("train", "mine.yaml")
    assert refused.exit_code == 2 and "Resume it with `longstraw train run --resume`" in refused.output
    resumed = longstraw("train", "run", "--resume", "max_steps=2")
    assert resumed.exit_code == 0 and "Resuming run after step 1." in resumed.output, resumed.output
    assert "step 2/2" in resumed.output and "step 1/2" not in resumed.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["mine.yaml", "num_generation=3"], "Did you mean 'num_generations'?"),
        (["absent.yaml"], "There is no file absent.yaml"),
        (["mine.yaml", "reward_funcs=mine:absent"], "there is no function 'absent' in mine. It has: "),
        (["mine.yaml", "dataset=absent.jsonl"], "'dataset.source' is absent.jsonl, a file that does not exist"),
        (["mine.yaml", "model=./absent"], "'model.path': ./absent cannot be loaded"),
        (["mine.yaml", "model=./absent"], "There is no folder ./absent here"),
        (["mine.yaml", "reward_funcs=absent.py:score"], "absent.py, which does not exist. Give the path from the"),
        (["absent", "--resume"], "There is no run directory absent"),
        (["mine.yaml", "max_completion_length=100"], "exceeds the model's 64 positions"),
        (["."], "is a directory"),
        ([".", "--resume"], "is no run directory"),
        (["--resume"], "needs to know the run"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(folder: Path, words: list[str], expected: str) -> None:
    result = longstraw("train", *words)
    assert result.exit_code == 2 and expected in result.output, result.output
    assert "Traceback" not in result.output and not (folder / "run").exists()


def test_a_reward_that_raises_ends_with_1_and_the_way_on(folder: Path) -> None:
    result = longstraw("train", "mine.yaml", "reward_funcs=mine:broken")
    assert result.exit_code == 1
    assert "reward function 'broken' raised KeyError at step 1 on sample 0" in result.output
    assert "longstraw train run --resume" in result.output and "Traceback" not in result.output
    debugged = longstraw("train", "mine.yaml", "reward_funcs=mine:broken", "output_dir=other", "--debug")
    assert type(debugged.exception).__name__ == "RewardError"


def test_show_config_prints_yaml_that_can_be_used(folder: Path) -> None:
    result = longstraw("train", "mine.yaml", "beta=0.1", "--show-config")
    assert yaml.safe_load(result.output)["beta"] == 0.1
    (folder / "again.yaml").write_text(result.output)
    assert longstraw("train", "again.yaml", "max_steps=1").exit_code == 0
    assert "longstraw.tasks" in longstraw("train", "--show-config").output


def test_config_lists_the_options() -> None:
    everything = longstraw("config").output
    assert "num_generations" in everything and "eval.NAME.num_samples" in everything and "lora.r" in everything
    assert "lora.r" not in longstraw("config", "temperature").output
    assert "--resume" in longstraw("train", "--help").output
    nothing = longstraw("config", "nowhere-to-be-found")
    assert nothing.exit_code == 2 and "No option speaks of 'nowhere-to-be-found'" in nothing.output


def test_ctrl_c_leaves_a_run_to_go_on_with(folder: Path) -> None:
    command = [sys.executable, "-m", "longstraw.cli", "train", "mine.yaml", "reward_funcs=mine:slow", "max_steps=500"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    metrics = folder / "run/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Go on with: longstraw train run --resume" in errors
    assert "Traceback" not in errors
    done = len(metrics.read_text().splitlines())
    resumed = longstraw("train", "run", "--resume", f"max_steps={done + 1}", "reward_funcs=mine:first_token")
    assert resumed.exit_code == 0 and f"Resuming run after step {done}." in resumed.output, resumed.output
