"""The million-token command, at a size that a test can afford."""

import json
import math

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import million
from benchmarks.measure import measure_here
from benchmarks.workload import TextWorkload, from_dict, topics


def test_the_text_is_real_and_repeats():
    text = topics()
    assert text.numel() > 400_000 and int(text.min()) >= 0 and int(text.max()) < 256
    workload = TextWorkload(prompt=text.numel() + 10, group=2, response=16)
    group = workload.data()
    assert torch.equal(group.prompt[-10:], text[:10])
    assert from_dict(workload.as_dict()) == workload
    assert len({tuple(r.tolist()) for r in group.responses}) == 2


def test_attention_is_not_the_last_layer():
    """There the prompt's attention would never be computed, as nothing reads it, and the length would cost nothing."""
    assert TextWorkload().model().config.layer_types[-1] == "linear_attention"


def test_exponents_are_slopes_of_logarithms():
    rows = [
        {
            "prompt": n,
            "seconds": 3e-9 * n**2,
            "peak_bytes": 5e7,
            "state_bytes": {"kv": {"disk": 256 * n}},
            "phases": {"capture": {"seconds": 1e-9 * n**2}},
        }
        for n in map(int, million.CURVE.split(","))
    ]
    found = million._exponents(rows)
    assert found["seconds"] == pytest.approx(2) and found["bytes on disk"] == pytest.approx(1)
    assert found["peak memory above the model"] == pytest.approx(0)
    assert "seconds of sweep" not in found


def test_the_command_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(million, "measure", measure_here)  # a process a run takes half a minute
    app = typer.Typer()
    app.command()(million.main)
    sizes = ["--tokens", "600", "--gate-tokens", "100", "--segment-tokens", "256", "--group", "2", "--modes", "full"]
    places = ["--cache", str(tmp_path / "rows"), "--out", str(tmp_path / "m.json"), "--page-dir", str(tmp_path)]
    result = CliRunner().invoke(app, [*sizes, *places])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "m.json").read_text())
    (row,) = report["rows"]
    assert row["prompt"] == 600 and row["private_bytes"] < million.LIMIT
    assert row["state_bytes"]["kv"]["disk"] == 599 * 2 * 16 * 4
    assert row["state_bytes"]["cotangent"]["disk"] > 0
    assert list(row["phases"]) == ["capture", "score", "replay", "sweep"]
    assert not list(tmp_path.glob("longstraw-*"))  # the pages are gone


def test_a_curve_over_lengths_of_ones_own(tmp_path):
    app = typer.Typer()
    app.command()(million.main)
    sizes = ["--gate-tokens", "100", "--segment-tokens", "256", "--group", "2", "--modes", "none", "--curve"]
    places = ["--cache", str(tmp_path / "rows"), "--out", str(tmp_path / "m.json"), "--page-dir", str(tmp_path)]
    refused = CliRunner().invoke(app, [*sizes, *places, "--lengths", "300,many"])
    assert refused.exit_code == 2 and "--lengths" in refused.output and "whole" in refused.output
    result = CliRunner().invoke(app, [*sizes, *places, "--lengths", "600,300"])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "m.json").read_text())
    assert [row["prompt"] for row in report["rows"]] == [300, 600]
    short, long = (num_captured * 128 + 40_960 for num_captured in (299, 599))  # keys and values, recurrent states
    assert report["exponents"]["none"]["bytes on disk"] == pytest.approx(math.log2(long / short))
