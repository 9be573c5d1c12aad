"""`longstraw report` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from longstraw.cli import app


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The least that makes a run directory, in a working directory of its own."""
    path = tmp_path / "runs" / "one"
    path.mkdir(parents=True)
    rows = [
        {"step": step, "loss": 0.5, "reward": 0.1 * step, "reward_std": 0.1, "step_time": 2.0} for step in (1, 2, 3)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "lo')
    monkeypatch.chdir(tmp_path)
    return path


def longstraw(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def test_it_says_where_the_page_is(run_dir: Path) -> None:
    result = longstraw("report", "runs/one")
    assert result.exit_code == 0 and "runs/one/report.html" in result.output, result.output
    assert (run_dir / "report.html").read_text().startswith("<!doctype html>")


def test_out_is_another_file_and_folders_are_made(run_dir: Path) -> None:
    assert longstraw("report", "runs/one", "--out", "pages/one.html").exit_code == 0
    assert Path("pages/one.html").is_file() and not (run_dir / "report.html").exists()
    assert [entry.name for entry in Path("pages").iterdir()] == ["one.html"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["absent"], "absent is not there. Give a run directory, e.g. one of: runs/one"),
        (["runs"], "runs is no run directory: it has no metrics.jsonl. Give a run directory, e.g. one of: runs/one"),
        (["runs/one/metrics.jsonl"], "is a file. Give "),
        (["runs/one", "--out", "runs"], "'--out': runs is a directory. Give a file, e.g. --out runs/report.html"),
    ],
)
def test_a_mistake_is_one_message_with_the_way_out(run_dir: Path, words: list[str], expected: str) -> None:
    result = longstraw("report", *words)
    assert result.exit_code == 2 and expected in result.output, result.output
    assert "Traceback" not in result.output and result.output.count("\n") == 1


def test_a_run_without_metrics_says_how_to_go_on(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text('{"step"')
    result = longstraw("report", "runs/one")
    assert result.exit_code == 2 and "longstraw train runs/one --resume" in result.output
