"""TensorBoard reads back what metrics.jsonl has; Weights & Biases gets the rows; a missing package says so."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tiny_runs import assert_same_run, run
from typer.testing import CliRunner

from longstraw.cli import app
from longstraw.config.load import load_config
from longstraw.config.messages import ConfigError
from longstraw.trainer.loggers import STEP, check_packages, scalars

EVAL = {"held_out": {"source": "tiny:rows", "num_samples": 2}}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def expected_points(path: Path) -> dict[str, list[tuple[int, float]]]:
    points: dict[str, list[tuple[int, float]]] = {}
    for row in rows_of(path):
        for name, value in scalars(row).items():
            points.setdefault(name, []).append((row["step"], value))
    return points


class FakeRun:
    """Stands for a run of Weights & Biases and remembers what it is told."""

    def __init__(self, **options: Any) -> None:
        self.options, self.logged, self.metrics, self.is_finished = options, [], {}, False

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics[name] = step_metric

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def __enter__(self) -> FakeRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_finished = True


@pytest.fixture
def wandb_runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """A module in place of wandb; the runs that were begun with it."""
    runs: list[FakeRun] = []

    def init(**options: Any) -> FakeRun:
        runs.append(FakeRun(**options))
        return runs[-1]

    module = ModuleType("wandb")
    module.__spec__ = importlib.util.spec_from_loader("wandb", None)
    vars(module).update(init=init, Settings=dict, errors=SimpleNamespace(Error=type("Error", (Exception,), {})))
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    return runs


def test_tensorboard_has_every_number_also_after_resuming(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = tmp_path / "run"
    run(path, report_to="tensorboard", eval=EVAL, max_steps=2, eval_steps=1)
    run(path, resume=True, report_to="tensorboard", eval=EVAL, max_steps=3, eval_steps=1)
    events = EventAccumulator(str(path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    expected = expected_points(path)
    assert set(events.Tags()["scalars"]) == set(expected) >= {"train/reward", "eval/held_out/reward"}
    for name, points in expected.items():
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in points], name
        assert [value for _, value in found] == pytest.approx([value for _, value in points], rel=1e-6), name


def test_writing_elsewhere_changes_nothing_of_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run(tmp_path / "plain")
    run(tmp_path / "told", report_to=["tensorboard"])
    assert_same_run(tmp_path / "plain", tmp_path / "told")


def test_wandb_gets_every_row_and_one_id_over_resumptions(tmp_path: Path, wandb_runs: list[FakeRun]) -> None:
    path = tmp_path / "my-run"
    run(path, report_to="wandb", max_steps=2)
    run(path, resume=True, report_to="wandb", max_steps=3)
    first, second = wandb_runs
    assert [values[STEP] for values in first.logged + second.logged] == [1, 2, 3]
    assert first.logged[0]["train/loss"] == rows_of(path)[0]["loss"]
    assert first.options["id"] == second.options["id"] and first.options["resume"] == "allow"
    assert first.options["name"] == "my-run" and first.options["project"] == "longstraw"
    assert first.options["config"]["max_steps"] == 2 and first.metrics["*"] == STEP
    assert first.is_finished and second.is_finished


def test_a_wandb_that_does_not_start_says_what_to_do(
    tmp_path: Path, wandb_runs: list[FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:
        raise sys.modules["wandb"].errors.Error("no API key configured")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(RuntimeError, match=r"no API key configured.*wandb login.*WANDB_MODE=offline"):
        run(tmp_path / "run", report_to="wandb")


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_the_model_loads(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda wanted, *rest: None if wanted == name else find(wanted, *rest)
    )
    with pytest.raises(ConfigError, match=rf"'report_to' names {name}, which is not installed.*pip install {name}\."):
        run(tmp_path / "run", report_to=name, model={"path": str(tmp_path / "absent")})
    assert not (tmp_path / "run").exists()
    words = [f"report_to={name}", "max_steps=1", f"output_dir={tmp_path / 'run'}"]
    result = CliRunner().invoke(app, ["train", *words])
    assert result.exit_code == 2 and f"pip install {name}" in result.output


def test_only_finite_numbers_are_sent() -> None:
    row = {"step": 3, "loss": float("nan"), "reward": None, "kl": 0.5, "eval/a/reward": 1, "is_stale": True}
    assert scalars(row) == {"train/kl": 0.5, "eval/a/reward": 1.0}


def test_one_name_or_none_will_do() -> None:
    base = {"model": "m", "dataset": "d", "reward_funcs": "a:b"}
    assert load_config(base=base | {"report_to": "wandb"}).report_to == ["wandb"]
    assert load_config(base=base | {"report_to": "none"}).report_to == []
    assert load_config(base=base).report_to == []
    check_packages([])
    with pytest.raises(ConfigError, match="report_to"):
        load_config(base=base | {"report_to": "mlflow"})
