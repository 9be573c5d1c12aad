"""The study of stale states: its two measures against plain ones, and the script as a user runs it."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import reference
import tiny
import torch
import yaml

import longstraw
from longstraw.data.prompts import Prompt
from longstraw.objective import Normalizer, PolicyLoss
from longstraw.rollout.records import Group, Rollout
from longstraw.studies.oracle import compare


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts/staleness.py"
    spec = importlib.util.spec_from_file_location("staleness_script", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_oracle_compares_with_what_stock_autograd_scores() -> None:
    model, prompt = tiny.llama(), torch.arange(4, 34)
    responses = [torch.tensor([9, 8, 7, 6]), torch.tensor([5, 4])]
    masks = [torch.tensor([True, True, False, True]), torch.tensor([True, True])]
    engine = longstraw.Engine(model, segment_tokens=8)
    kept = engine.capture(prompt)
    before = [reference.response_logps(model, prompt, response).detach() for response in responses]
    advantages = [1.0, -0.5]
    rollouts = [
        Rollout(*pair, "length", advantage=advantage, old_logps=old)
        for *pair, advantage, old in zip(responses, masks, advantages, before, strict=True)
    ]
    group = Group(0, Prompt(0, np.arange(4, 34, dtype=np.int32), "", {}), rollouts)
    loss, normalizer = PolicyLoss(loss_type="dapo"), Normalizer.from_masks(masks)

    same = compare(engine, group, kept, kept, normalizer, loss, 1.0)
    assert same.logp_difference == 0.0 and same.loss_kept == same.loss_fresh
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(1.5)
    with engine.capture(prompt) as fresh:
        found = compare(engine, group, kept, fresh, normalizer, loss, 1.0)
    now = [reference.response_logps(model, prompt, response).detach() for response in responses]
    expected, _ = loss(now, advantages, normalizer, old_logps=before, masks=masks)
    assert found.loss_fresh == pytest.approx(float(expected), abs=1e-6)
    stale = [logp.cpu() for logp in engine.score(kept, responses)]
    apart = torch.cat([(old - new)[mask].abs() for old, new, mask in zip(stale, now, masks, strict=True)])
    assert found.logp_difference == pytest.approx(float(apart.mean()), rel=1e-3) and found.logp_difference > 1e-3
    kept.release()


def test_rank_correlation(script: ModuleType) -> None:
    assert script.rank_correlation([1, 2, 3, 4], [10, 20, 25, 100]) == pytest.approx(1.0)
    assert script.rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    # Ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4: Pearson's of those by hand.
    assert script.rank_correlation([1, 5, 5, 9], [0, 7, 3, 8]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert script.rank_correlation([1, 1], [2, 3]) is None and script.rank_correlation([1], [2]) is None


def config(folder: Path, **changes: Any) -> str:
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(tiny.options(**changes)))
    return str(path)


def test_the_script_prints_a_table_and_writes_what_it_measured(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep/study"
    words = ["--steps", "4", "--prompts", "2", "--rounds", "2", "--out", str(out), config(tmp_path, segment_tokens=4)]
    script.main([*words, "learning_rate=1e-3"])
    assert "steps since" in capsys.readouterr().out
    with out.with_suffix(".csv").open() as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    assert [(row["round"], row["steps"]) for row in rows] == [
        (number, steps) for number in (0, 1) for steps in (1, 2, 3, 4) for _ in range(2)
    ]
    for steps in (1, 2, 3):
        for age in ("probe", "logp_difference"):
            mean, later = (np.mean([row[age] for row in rows if row["steps"] == s]) for s in (steps, steps + 1))
            assert 0 < mean < later, (age, steps)
    found = json.loads(out.with_suffix(".json").read_text())
    assert [row["steps"] for row in found["table"]] == [1, 2, 4]
    second = [row for row in rows if row["steps"] == 2]
    percent = [
        100 * abs(sum(r["loss_kept"] for r in part) / sum(r["loss_fresh"] for r in part) - 1)
        for part in (second[:2], second[2:])
    ]
    assert found["table"][1]["loss_difference_percent"] == pytest.approx(sum(percent) / 2, rel=1e-6)
    assert found["table"][0]["probe_cost_percent"] > 0
    assert 0.5 < found["rank_correlation"]["all"] <= 1 and "learning_rate: 0.001" in found["config"]
    if importlib.util.find_spec("matplotlib"):
        assert "<svg" in out.with_suffix(".svg").read_text()


def constant(completions: list[Any], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def test_what_cannot_be_studied_is_one_message(script: ModuleType, tmp_path: Path) -> None:
    flat = config(tmp_path, reward_funcs="test_staleness:constant")
    with pytest.raises(SystemExit, match="error: round 1: no prompt's responses differ in their rewards"):
        script.main(["--out", str(tmp_path / "study"), flat])
    with pytest.raises(SystemExit, match=r"error: .*num_generation.*Did you mean"):
        script.main([flat, "num_generation=3"])
