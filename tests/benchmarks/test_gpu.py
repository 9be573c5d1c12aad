"""The GPU script's CPU subset: every family's gradient, then the toy's points, in one JSON."""

import json

import typer
from typer.testing import CliRunner

from benchmarks import gpu


def test_cpu_subset(tmp_path):
    app = typer.Typer()
    app.command()(gpu.main)
    out = tmp_path / "gpu.json"
    result = CliRunner().invoke(app, ["--device", "cpu", "--out", str(out)])
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert {row["family"] for row in report["exactness"]} == set(gpu.FAMILIES)
    assert all(row["passed"] for row in report["exactness"])
    assert len(report["points"]) == 8
    assert all(set(row["phases"]) == {"capture", "score", "replay", "sweep"} for row in report["points"])


def test_wrong_gradient_shows_no_speed(tmp_path, monkeypatch):
    app = typer.Typer()
    app.command()(gpu.main)
    monkeypatch.setattr(gpu, "FAMILIES", {"llama": gpu.FAMILIES["llama"]})
    monkeypatch.setattr(gpu, "FLOAT32_ALLOWED", 0.0)
    out = tmp_path / "gpu.json"
    assert CliRunner().invoke(app, ["--device", "cpu", "--out", str(out)]).exit_code == 1
    assert "points" not in json.loads(out.read_text())
