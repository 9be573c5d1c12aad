"""The two sides of a step's gradient in the metrics: of the whole step, before clipping, and without changing it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny_runs import assert_same_run, metrics, run

from longstraw.engine.engine import Engine
from longstraw.trainer.gradient_parts import GradientParts

SIDES = ("grad_norm/response", "grad_norm/prompt", "grad_cosine")
COMMON: dict[str, Any] = {"prompts_per_step": 4, "max_steps": 2, "log_gradient_parts": True, "max_grad_norm": 0.01}


def test_the_sides_make_up_the_gradient_however_it_is_accumulated(tmp_path: Path) -> None:
    run(tmp_path / "plain", **COMMON | {"log_gradient_parts": False})
    run(tmp_path / "together", **COMMON)
    run(tmp_path / "apart", **COMMON | {"prompts_per_step": 2, "gradient_accumulation_steps": 2})
    assert_same_run(tmp_path / "plain", tmp_path / "together")
    assert not set(SIDES) & metrics(tmp_path / "plain")[0].keys()
    rows = metrics(tmp_path / "together")
    for row, twin in zip(rows, metrics(tmp_path / "apart"), strict=True):
        response, prompt, cosine = (row[key] for key in SIDES)
        assert response > 0 and prompt > 0.01 * response and -1 < cosine < 1
        square = response**2 + prompt**2 + 2 * cosine * response * prompt
        assert square == pytest.approx(row["grad_norm"] ** 2, rel=1e-5)
        assert row["grad_norm"] > COMMON["max_grad_norm"]  # it was clipped afterwards
        assert [twin[key] for key in SIDES] == [response, prompt, cosine]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_response_side_is_the_gradient_of_a_run_without_the_prompt(tmp_path: Path, dtype: str) -> None:
    """The first step's responses are the same; in bfloat16 rounding is not taken for a prompt side."""
    changes = COMMON | {"max_steps": 1, "model": {"path": "tiny:llama", "dtype": dtype}}
    run(tmp_path / "full", **changes)
    run(tmp_path / "none", prompt_grad="none", **changes)
    (full,), (none,) = metrics(tmp_path / "full"), metrics(tmp_path / "none")
    assert none["grad_norm/prompt"] == 0.0 and none["grad_cosine"] is None
    assert full["grad_norm/response"] == none["grad_norm/response"]
    assert none["grad_norm/response"] == pytest.approx(none["grad_norm"], rel=1e-5)
    assert full["grad_norm/prompt"] > 0.01 * full["grad_norm"]


def test_a_step_without_signal_has_no_sides(tmp_path: Path) -> None:
    run(tmp_path, **COMMON | {"reward_funcs": "test_gradient_parts:constant", "max_steps": 1})
    assert [metrics(tmp_path)[0][key] for key in SIDES] == [0.0, 0.0, None]


def constant(completions: list[Any], **_: Any) -> list[float]:
    return [0.5] * len(completions)


def test_sides_of_known_gradients() -> None:
    """Response (3, 0), prompt (1, 2): over two groups, one without a part; what no group reached is left out."""
    model = tiny.llama().requires_grad_(False)
    norm, other = model.model.norm.weight.requires_grad_(), model.model.layers[0].input_layernorm.weight
    other.requires_grad_()
    parts = GradientParts(Engine(model))
    order = [parameter for parameter in model.parameters() if parameter.requires_grad]
    first, second, total = torch.zeros(3, 32)
    first[0], second[0], total[:2] = 1.0, 2.0, torch.tensor([4.0, 2.0])
    for side in (first, None, second):
        parts.add([side if parameter is norm else None for parameter in order])
    norm.grad = total
    found = parts.metrics()
    assert found["grad_norm/response"] == pytest.approx(3.0)
    assert found["grad_norm/prompt"] == pytest.approx(5**0.5)
    assert found["grad_cosine"] == pytest.approx(1 / 5**0.5)


def test_a_sum_over_processes_is_rounded_as_the_gradient_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without a group of its own gets the others' sum in float32."""
    model = tiny.llama().bfloat16().requires_grad_(False)
    weight = model.model.norm.weight.requires_grad_()
    engine, total = Engine(model), torch.full((32,), 1 / 3)
    monkeypatch.setattr(engine, "reduce", lambda tensors: [total])
    weight.grad = total.bfloat16()
    found = GradientParts(engine).metrics()
    assert found["grad_norm/response"] > 1 and found["grad_norm/prompt"] == 0.0 and found["grad_cosine"] is None
