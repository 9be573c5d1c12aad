"""The learning study: its runs are valid configurations on equal data, the best settings are chosen, all is shown."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from longstraw.training.config import TrainConfig


@pytest.fixture(scope="module")
def learning() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts/learning.py"
    spec = importlib.util.spec_from_file_location("learning_study", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def fake(run: Any, runs: Path, reward: float) -> None:
    """The directory of a finished run whose rewards rise to `reward`."""
    directory = run.directory(runs)
    (directory / "final").mkdir(parents=True)
    rows = [
        {
            "step": step,
            "reward": reward if step > run.steps // 2 else 0.1,
            "step_time": 1.0,
            "grad_norm/response": 3.0,
            "grad_norm/prompt": 4.0 if run.mode != "none" else 0.0,
            "grad_cosine": 0.5 if run.mode != "none" else None,
        }
        for step in range(1, run.steps + 1)
    ]
    for step in ([0] if run.before else []) + ([run.steps] if run.evaluates else []):
        held_out = run.configuration()["eval"]
        rows.append({"step": step, **{f"eval/{name}/reward": reward if step else 0.25 for name in held_out}})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_every_run_is_a_valid_configuration(learning: ModuleType) -> None:
    for study in learning.STUDIES:
        settings = learning.Settings(1e-3, 0.0)
        for mode in study.modes:
            run = learning.Run(study, mode, settings, 1, study.steps, evaluates=True, before=True)
            config = TrainConfig.model_validate(run.configuration())
            assert config.prompt_grad == mode and config.max_grad_norm == 0
            assert config.eval[f"at_{study.tokens}"].num_samples == learning.HELD_OUT_ROWS


def test_gradients_see_equal_data_and_seeds_do_not(learning: ModuleType) -> None:
    study = learning.STUDIES[0]

    def data(mode: str, seed: int) -> Any:
        run = learning.Run(study, mode, learning.Settings(1e-3, 1.0), seed, study.steps, evaluates=True)
        return run.configuration()["dataset"]

    assert data("none", 1) == data("full", 1) != data("full", 2)
    held_out = {name: options["args"]["seed"] for name, options in _evaluation(learning, study).items()}
    assert set(held_out.values()).isdisjoint({learning.TUNE_SEED, *learning.TRAIN_SEEDS})


def _evaluation(learning: ModuleType, study: Any) -> dict[str, Any]:
    return learning.Run(study, "full", learning.Settings(1e-3, 1.0), 1, 10, evaluates=True).configuration()["eval"]


def test_each_gradient_gets_its_own_best_settings_and_all_is_shown(learning: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    study = learning.STUDIES[0]
    runs = tmp_path / "runs"
    for place, run in enumerate(learning.tuning(study)):
        fake(run, runs, 0.2 + 0.01 * place)  # the last settings of each gradient are its best
    best = learning.chosen(study, runs)
    assert set(best) == set(study.modes)
    assert set(best.values()) == {learning.Settings(learning.LEARNING_RATES[-1], learning.CLIPS[-1])}
    for place, run in enumerate(learning.final(study, runs)):
        fake(run, runs, 0.5 + 0.02 * place)
    arguments = ["show", "--studies", study.name, "--runs", str(runs), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(learning.app, arguments)
    assert result.exit_code == 0, result.output
    assert "0.25" in result.output and "before" in result.output and "4.00" in result.output
    report = json.loads((tmp_path / "out.json").read_text())
    (shown,) = report["studies"].values()
    assert len(shown["runs"]) == len(learning.TRAIN_SEEDS) * len(study.modes)
    assert len(shown["tuning"]) == len(learning.tuning(study))
    assert (tmp_path / "out.svg").stat().st_size > 0


def test_final_runs_wait_for_the_tuning(learning: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="not tuned"):
        learning.final(learning.STUDIES[0], tmp_path)


def test_an_unknown_study_names_the_known_ones(learning: ModuleType, tmp_path: Path) -> None:
    result = CliRunner().invoke(learning.app, ["show", "--studies", "recal-2048", "--runs", str(tmp_path)])
    assert result.exit_code == 2 and "recall-2048" in result.output
