"""Reading a run directory in whatever state a run leaves it."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import FOUR_STEPS, eval_row, step_row, write_run

from longstraw.audit.run_data import finite, read_run


def test_rows_of_steps_and_evaluations_are_told_apart(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert [row["step"] for row in run.steps] == [1, 2, 3, 4]
    assert [row["step"] for row in run.evaluations] == [0, 4]
    assert not any(key.startswith("eval/") for row in run.steps for key in row)
    assert run.set_names == ["held_out"] and run.last_step == 4 and run.planned_steps == 4
    assert run.num_unreadable == 0 and run.has_final


def test_a_half_written_last_line_is_left_out_and_counted(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", FOUR_STEPS[:3], tail='{"step": 3, "loss": 0.0'))
    assert [row["step"] for row in run.steps] == [1, 2]
    assert run.num_unreadable == 1


def test_the_later_row_of_a_step_wins_and_a_further_one_adds_to_it(tmp_path: Path) -> None:
    rows = [step_row(1, loss=1.0), step_row(1, loss=2.0), {"step": 1, "drift/probe": 0.25}]
    (row,) = read_run(write_run(tmp_path / "run", rows)).steps
    assert row["loss"] == 2.0 and row["drift/probe"] == 0.25 and row["reward"] == 0.2


def test_a_set_may_have_a_slash_in_its_name(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", [eval_row(0, name="long/8k"), step_row(1)]))
    assert run.set_names == ["long/8k"]


def test_broken_files_leave_their_part_empty(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "config.yaml").write_text("model: [unclosed")
    (path / "environment.json").write_text('{"starts": ')
    (path / "summary.json").write_text("")
    run = read_run(path)
    assert run.config == {} and run.starts == [] and run.summary == {} and run.option("model", "path") is None


@pytest.mark.parametrize("value", [None, "text", True, float("nan"), float("inf"), [1]])
def test_only_finite_numbers_count(value: object) -> None:
    assert finite({"key": value}, "key") is None
    assert finite({"key": 2}, "key") == 2.0


def test_a_path_that_is_no_run_names_the_runs_beside_it(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "one")
    for path in (tmp_path / "runs" / "absent", tmp_path / "runs", tmp_path):
        with pytest.raises(ValueError, match=r"Give a run directory, e\.g\. one of: .*runs/one"):
            read_run(path)


def test_a_run_without_a_row_says_how_to_go_on(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [], tail='{"step": 0, "eval/held')
    with pytest.raises(ValueError, match=f"longstraw train {path} --resume"):
        read_run(path)
    (path / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=f"has no metrics.jsonl.*longstraw train {path} --resume"):
        read_run(path)
    (path / "config.yaml").unlink()
    with pytest.raises(ValueError, match="is no run directory"):
        read_run(path)
