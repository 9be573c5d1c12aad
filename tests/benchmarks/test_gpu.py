"""The GPU script's CPU subset: every family's gradient, then the toy's points, in one JSON."""

import json

import pytest
import torch
import typer
from families import FAMILIES
from typer.testing import CliRunner

from benchmarks import gpu, gpu_capacity, gpu_exactness


@pytest.fixture
def run(tmp_path):
    app = typer.Typer()
    app.command()(gpu.main)

    def run(*options):
        out = tmp_path / "gpu.json"
        result = CliRunner().invoke(app, ["--device", "cpu", "--out", str(out), *options])
        return result, json.loads(out.read_text())

    return run


def test_cpu_subset(run):
    result, report = run()
    assert result.exit_code == 0, result.output
    assert {row["family"] for row in report["exactness"]} == set(gpu.FAMILIES)
    assert all(row["passed"] and row["same_bits"] for row in report["exactness"])
    assert report["choices_agree"]
    assert len(report["points"]) == 12
    for row in report["points"]:
        assert set(row["phases"]) == {"capture", "score", "replay", "sweep"}
        assert row["seconds"] > 0 and row["matmul_share"] > 0


def test_every_family_that_is_served_is_there():
    variants = {"qwen3_mixed", "qwen3_5_image", "deepseek_v3_halves"}  # of families that are there
    assert set(gpu_exactness.FAMILIES) == set(FAMILIES) - variants


@pytest.mark.parametrize("broken", ["gradient", "bits"])
def test_wrong_results_show_no_speed(run, monkeypatch, broken):
    monkeypatch.setattr(gpu, "FAMILIES", ["qwen2"])
    if broken == "gradient":
        monkeypatch.setattr(gpu_exactness, "FLOAT32_ALLOWED", 0.0)
    else:
        ours = gpu_exactness._ours

        def other(model, prompt, responses, tier="device"):
            found = ours(model, prompt, responses, tier)
            if tier == "host":
                next(iter(found.values())).add_(1e-12)
            return found

        monkeypatch.setattr(gpu_exactness, "_ours", other)
    result, report = run()
    assert result.exit_code == 1
    assert "points" not in report


@pytest.mark.parametrize("broken", ["llama", "choice"])
def test_another_failure_is_told_and_hides_nothing(run, monkeypatch, broken):
    monkeypatch.setattr(gpu, "FAMILIES", ["llama", "qwen2"])
    monkeypatch.setattr(gpu, "capacity", lambda *_: iter([{"prompt": 1}]))
    monkeypatch.setattr(gpu, "choices_agree", lambda device: broken != "choice")
    if broken == "llama":
        exactness = gpu_exactness.exactness

        def failing(name, device):
            if name == "llama":
                raise RuntimeError("no kernel")
            return exactness(name, device)

        monkeypatch.setattr(gpu, "exactness", failing)
    result, report = run()
    assert result.exit_code == 1 and "Wrong: " in result.output
    assert [row["passed"] for row in report["exactness"]] == [broken != "llama", True]
    assert report["points"] == [{"prompt": 1}]


def test_a_point_that_would_not_end_in_time_is_skipped(monkeypatch):
    """The estimate is the last point's pace of the same kind, so one that took too long already stops the next."""
    clock = iter([1e9] * 4 + [0.0] * 100)
    rows = list(gpu_capacity.capacity("cpu", 1e9, lambda: next(clock)))
    assert [("skipped" in row) for row in rows] == [False] * 4 + [True] * 8
    assert all(row["skipped"].startswith("about ") and "0 s left" in row["skipped"] for row in rows[4:])


def test_no_time_skips_every_point(run, monkeypatch):
    monkeypatch.setattr(gpu, "FAMILIES", ["qwen2"])
    result, report = run("--minutes", "0")
    assert result.exit_code == 0, result.output
    assert len(report["points"]) == 12 and all("skipped" in row for row in report["points"])


def test_a_point_that_does_not_fit_is_told_and_the_next_is_tried(monkeypatch):
    measure = gpu_capacity._measure

    def too_large(model, device, point):
        if point.prompt == 512:
            raise torch.cuda.OutOfMemoryError("out of memory\nand more")
        return measure(model, device, point)

    monkeypatch.setattr(gpu_capacity, "_measure", too_large)
    rows = list(gpu_capacity.capacity("cpu", 1e9, lambda: 1e9))
    assert [row.get("out_of_memory") for row in rows] == [
        "out of memory" if row["prompt"] == 512 else None for row in rows
    ]
    assert len(rows) == 12 and all(("seconds" in row) == (row["prompt"] != 512) for row in rows)


def test_a_choice_that_breaks_ties_otherwise_is_seen(monkeypatch):
    from longstraw.attention import indexer

    assert gpu_exactness.choices_agree("cpu", 700, 300, 64)
    ranks = indexer.ranks  # scores are whole numbers: what is added for the position decides between equal ones alone
    monkeypatch.setattr(indexer, "ranks", lambda scores, positions: ranks(scores + 1e-4 * positions, positions))
    assert not gpu_exactness.choices_agree("cpu", 700, 300, 64)
