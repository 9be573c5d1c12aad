"""The commands around the measurements: no speed on a red gate, rows that are kept, receipts without gaps."""

import json

import pytest
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner

from benchmarks import compare, grid, receipt, step
from benchmarks.workload import Workload


def fake_measure(seconds, wrong=()):
    """Stands in for a measured process: known seconds, and a gradient that is off for the named prompt modes."""
    calls = []

    def measure(spec):
        calls.append(spec)
        mode = spec.options.get("prompt_grad", spec.method)
        exact = torch.ones(4) if mode in ("none", "constant_prompt") else torch.full((4,), 2.0)
        save_file({"weight": exact + (1.0 if mode in wrong else 0.0)}, spec.gradient)
        spent = seconds.get(mode, 1.0)
        phases = {"step": {"seconds": spent, "peak_bytes": 10**6}}
        return {"seconds": spent, "peak_bytes": 10**6, "phases": phases, "threads": 1}

    measure.calls = calls
    return measure


def invoke(main, *arguments):
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, list(arguments))


def test_step_prints_ratios_and_a_receipt(monkeypatch, tmp_path):
    monkeypatch.setattr(step, "measure", fake_measure({"conventional": 40.0, "none": 2.0, "full": 5.0}))
    result = invoke(step.main, "--repeats", "2", "--out", str(tmp_path / "r.json"))
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["ratios"]["none"]["times_faster"] == 20.0
    assert report["ratios"]["full"]["times_faster"] == 8.0
    assert "20.0" in result.output
    assert "unknown" not in json.dumps(report).lower()


@pytest.mark.parametrize("mode", ["none", "full"])
def test_step_shows_no_speed_on_a_red_gate(monkeypatch, tmp_path, mode):
    monkeypatch.setattr(step, "measure", fake_measure({"conventional": 40.0, "none": 2.0, "full": 5.0}, wrong=[mode]))
    result = invoke(step.main, "--repeats", "1", "--out", str(tmp_path / "r.json"))
    assert result.exit_code == 1
    assert "WRONG" in result.output and "seconds" not in result.output and "40.0" not in result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert "ratios" not in report and "methods" not in report


def test_compare_keeps_rows_and_goes_on(monkeypatch, tmp_path):
    measure = fake_measure({"conventional": 40.0, "none": 2.0, "full": 5.0})
    monkeypatch.setattr(grid, "measure", measure)
    paths = ("--cache", str(tmp_path / "cache"), "--docs", str(tmp_path / "docs"))
    first = invoke(compare.main, "--prompts", "512", "--groups", "2,4", *paths)
    assert first.exit_code == 0, first.output
    num_first = len(measure.calls)
    assert num_first == 2 * (len(grid.contestants()) + 1)  # and the reference of `none`
    again = invoke(compare.main, "--prompts", "512", "--groups", "2,4", "--again", "full", *paths)
    assert again.exit_code == 0 and len(measure.calls) == num_first + 2
    assert (tmp_path / "docs" / "figures" / "comparison.svg").exists()
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert page.count("<!-- comparison") == 1 and "| full | 5.0 | 8.0 |" in page
    assert invoke(compare.main, "--prompts", "512", "--groups", "2", "--again", "fool", *paths).exit_code == 2


def test_compare_writes_nothing_on_a_red_gate(monkeypatch, tmp_path):
    monkeypatch.setattr(grid, "measure", fake_measure({"full": 5.0}, wrong=["full"]))
    paths = ("--cache", str(tmp_path / "cache"), "--docs", str(tmp_path / "docs"))
    result = invoke(compare.main, "--prompts", "512", "--groups", "2", *paths)
    assert result.exit_code == 1 and "WRONG" in result.output and "| full |" not in result.output
    assert not (tmp_path / "docs").exists()


def test_a_failed_process_is_reported_and_tried_again(monkeypatch, tmp_path):
    def broken(spec):
        raise RuntimeError("trl ended with exit code 1:\nModuleNotFoundError: No module named 'trl'")

    good = fake_measure({})
    monkeypatch.setattr(grid, "measure", lambda spec: broken(spec) if spec.method == "trl" else good(spec))
    paths = ("--cache", str(tmp_path / "cache"), "--docs", str(tmp_path / "docs"))
    result = invoke(compare.main, "--prompts", "512", "--groups", "2", *paths)
    assert result.exit_code == 1 and "No module named 'trl'" in result.output
    table = grid.Grid(tmp_path / "cache", [], grid.contestants())
    assert [c.name for c in table.missing(Workload(prompt=512, group=2))] == ["trl"]


def test_receipts_leave_out_what_is_not_known(monkeypatch):
    monkeypatch.setattr(receipt, "_git", lambda *arguments: "")
    found = receipt.provenance()
    assert "commit" not in found and found["versions"]["torch"]
