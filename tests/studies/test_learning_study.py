"""The learning study: its runs are valid configurations on equal data, the best settings are chosen, all is shown."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from longstraw.config.train import TrainConfig


@pytest.fixture(scope="module")
def learning() -> Iterator[ModuleType]:
    """The modules of the script, as names of one."""
    folder = str(Path(__file__).parents[2] / "scripts")
    sys.path.insert(0, folder)
    yield importlib.import_module("learning_runs")
    sys.path.remove(folder)


def fake(run: Any, runs: Path, early: float, late: float) -> None:
    """The directory of a finished run: its reward in the first and in the second half of the steps."""
    directory = run.directory(runs)
    (directory / "final").mkdir(parents=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(run.configuration()))
    (directory / "environment.json").write_text(json.dumps({"starts": [{"cpu_threads": 1}]}))
    rows = [
        {
            "step": step,
            "reward": late if step > run.steps // 2 else early,
            "step_time": 1.0,
            "grad_norm/response": 3.0,
            "grad_norm/prompt": 4.0 if run.mode != "none" else 0.0,
            "grad_cosine": -0.5 if run.mode != "none" else None,
        }
        for step in range(1, run.steps + 1)
    ]
    for step in ([0] if run.before else []) + ([run.steps] if run.evaluates else []):
        held_out = run.configuration()["eval"]
        rows.append({"step": step, **{f"eval/{name}/reward": late if step else 0.25 for name in held_out}})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def command(*words: str) -> Any:
    return CliRunner().invoke(importlib.import_module("learning").app, list(words))


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


def test_each_gradient_gets_its_own_best_settings_and_all_is_shown(
    learning: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    study = learning.STUDIES[0]
    longer = replace(study, tokens=2 * study.tokens, windows=tuple(2 * window for window in study.windows[:1]), steps=4)
    for module in (learning, importlib.import_module("learning")):
        monkeypatch.setattr(module, "STUDIES", (study, longer))
    runs, wanted = tmp_path / "runs", {}
    for mode, tuned in groupby(learning.tuning(study), key=lambda run: run.mode):
        tuned = list(tuned)
        best = study.modes.index(mode)  # another place for each; the first half of the steps speaks for another one
        for place, run in enumerate(tuned):
            fake(run, runs, early=0.9 if place == best + 1 else 0.1, late=0.5 if place == best else 0.4)
        wanted[mode] = tuned[best].settings
    assert len(set(wanted.values())) == len(study.modes)
    assert learning.chosen(study, runs) == wanted
    assert learning.chosen(longer, runs) == {
        "none": wanted["none"], longer.windows[0]: wanted[study.windows[0]], "full": wanted["full"]
    }  # fmt: skip

    for place, run in enumerate(learning.final(study, runs)):
        fake(run, runs, early=0.2, late=0.5 + 0.02 * place)
    assert "nothing is written: " + longer.name in command("show", "--runs", str(runs)).output
    for run in learning.final(longer, runs):
        fake(run, runs, early=0.2, late=0.6)
    (tmp_path / "figures").mkdir()
    page, places = (
        tmp_path / "learning.md",
        [
            f"<!-- {name}: written by scripts/learning.py show -->\nold\n<!-- end of {name} -->"
            for name in (study.name, longer.name)
        ],
    )
    page.write_text("\n".join(["Before.", *places, "After."]))
    for _ in range(2):  # the second time it replaces what the first wrote
        result = command("show", "--runs", str(runs), "--docs", str(tmp_path))
        assert result.exit_code == 0, result.output
    text = page.read_text()
    assert text.startswith("Before.") and text.endswith("After.") and "old" not in text
    assert text.count("| before | 0.25 |") == 2 and text.count("| 3.00 | 4.00 | 0.5000 |") == 10
    report = json.loads((tmp_path / "figures/learning.json").read_text())
    assert len(report["studies"][study.name]["runs"]) == len(learning.TRAIN_SEEDS) * len(study.modes)
    assert report["studies"][study.name]["held_out_rows"][str(study.tokens)] == learning.HELD_OUT_ROWS
    assert (tmp_path / "figures/learning.svg").stat().st_size > 0


def test_final_runs_wait_for_the_tuning(learning: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not tuned"):
        learning.final(learning.STUDIES[0], tmp_path)


def test_a_directory_of_another_run_is_not_taken_for_this_one(learning: ModuleType, tmp_path: Path) -> None:
    run = learning.tuning(learning.STUDIES[0])[0]
    assert not learning.complete(run, tmp_path)
    fake(run, tmp_path, 0.1, 0.2)
    assert learning.complete(run, tmp_path)
    file = run.directory(tmp_path) / "metrics.jsonl"
    file.write_text(file.read_text() + file.read_text().splitlines()[-1] + "\n")
    with pytest.raises(ValueError, match="every step once"):
        learning.complete(run, tmp_path)
    (run.directory(tmp_path) / "config.yaml").write_text(yaml.safe_dump(run.configuration() | {"num_generations": 2}))
    with pytest.raises(ValueError, match="another configuration"):
        learning.complete(run, tmp_path)


def test_a_run_is_trained_resumed_and_not_trained_again(learning: ModuleType, tmp_path: Path) -> None:
    study = learning.Study("recall", 64, (), 2, 64)
    run = learning.Run(study, "none", learning.Settings(1e-3, 1.0), 1, 2)
    learning.execute_all([run], tmp_path, 1)
    assert learning.complete(run, tmp_path)
    written = (run.directory(tmp_path) / "metrics.jsonl").read_text()
    learning.execute_all([run], tmp_path, 1)
    assert (run.directory(tmp_path) / "metrics.jsonl").read_text() == written
    shutil.rmtree(run.directory(tmp_path) / "final")
    with learning.only_one(tmp_path), pytest.raises(RuntimeError, match="another study"):
        learning.execute_all([run], tmp_path, 1)
    learning.execute_all([run], tmp_path, 1)
    assert learning.complete(run, tmp_path)


def test_the_first_failure_ends_the_study(
    learning: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def fail(run: Any, *_: Any) -> None:
        begun.append(run)
        raise RuntimeError("no room")

    monkeypatch.setattr(learning, "execute", fail)
    with pytest.raises(RuntimeError, match="no room"):
        learning.execute_all(learning.tuning(learning.STUDIES[0]), tmp_path, 1)
    assert len(begun) < 5


def test_an_unknown_study_names_the_known_ones(learning: ModuleType, tmp_path: Path) -> None:
    result = command("tune", "--studies", "recal-2048", "--runs", str(tmp_path))
    assert result.exit_code == 2 and "recall-2048" in result.output


def test_a_run_again_is_held_against_its_seeds(
    learning: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = learning.Study("recall", 64, (), 2, 64, rates=(1e-3,))
    monkeypatch.setattr(learning, "EVALUATED", {})
    monkeypatch.setattr(learning, "HELD_OUT_ROWS", 2)
    for module in (learning, importlib.import_module("learning")):
        monkeypatch.setattr(module, "STUDIES", (study,))
    for run in learning.tuning(study):
        fake(run, tmp_path, 0.1, 0.2)
    for run in learning.final(study, tmp_path):  # `full` between nothing and everything, `none` at what cannot be
        fake(run, tmp_path, 0.1, (run.seed - 1) / 2 if run.mode == "full" else 2.0)
    words = ("rerun", "--study", study.name, "--runs", str(tmp_path))
    inside, outside = command(*words), command(*words, "--mode", "none")
    assert inside.exit_code == 0 and "inside the spread" in inside.output, inside.output
    assert outside.exit_code == 1 and "OUTSIDE the spread" in outside.output, outside.output
    unknown = command(*words, "--seed", "9")
    assert isinstance(unknown.exception, ValueError) and "of seed 9" in str(unknown.exception)
