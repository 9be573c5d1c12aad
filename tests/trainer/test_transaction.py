"""A step happens whole or not at all: what is not finite is refused, and whatever fails leaves everything as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from tiny_runs import metrics, run

from longstraw.engine.engine import Engine
from longstraw.rollout.errors import StepRefused
from longstraw.trainer import update


def poisoned() -> Any:
    """Every log-probability is NaN, so that every group looks alike."""
    model = tiny.llama()
    model.model.norm.weight.data.fill_(float("nan"))
    return model


def test_a_loss_that_is_not_finite_is_refused_with_the_prompt_named(tmp_path: Path) -> None:
    with pytest.raises(StepRefused, match=r"the prompt of dataset row 0 \(20 tokens\): .* not numbers") as refused:
        run(tmp_path, model="test_transaction:poisoned", shuffle_dataset=False)
    assert "The state after step 0 is saved" in refused.value.__notes__[0]
    assert not metrics(tmp_path)


def test_a_loss_that_is_not_finite_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def infinite(self: Any, logps: list[torch.Tensor], *_: Any, **__: Any) -> Any:
        return torch.cat(logps).sum() * float("inf"), {}

    monkeypatch.setattr("longstraw.objective.policy.PolicyLoss.__call__", infinite)
    with pytest.raises(StepRefused, match=r"the prompt of dataset row \d \(2\d tokens\): the loss \(-inf\)"):
        run(tmp_path)
    assert not metrics(tmp_path)


def test_a_gradient_that_is_not_finite_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = update._all_finite
    calls = []

    def second_is_infinite(model: Any) -> bool:
        calls.append(model)
        if len(calls) == 2:
            next(model.parameters()).grad[0, 0] = float("inf")
        return whole(model)

    monkeypatch.setattr(update, "_all_finite", second_is_infinite)
    with pytest.raises(StepRefused, match=r"prompt of dataset row 1 .* its gradient is not finite"):
        run(tmp_path, prompts_per_step=2, shuffle_dataset=False)
    assert all(parameter.grad is None for parameter in calls[0].parameters())


@pytest.mark.parametrize("where", ["accumulate", "collect"])
def test_a_failure_before_the_optimizer_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    run(tmp_path / "two", max_steps=2, lr_scheduler_type="constant")
    states: list[Any] = []
    engine_capture = Engine.capture

    def remembering(self: Any, ids: Any) -> Any:
        states.append(engine_capture(self, ids))
        return states[-1]

    monkeypatch.setattr(Engine, "capture", remembering)
    if where == "accumulate":
        original = update.StepGradient.take

        def failing(*arguments: Any, **keywords: Any) -> Any:
            found = original(*arguments, **keywords)
            if len(metrics(tmp_path / "cut")) == 2:
                raise MemoryError("out of memory after the backward pass")
            return found

        monkeypatch.setattr(update.StepGradient, "take", failing)
    else:
        original_sample = Engine.sample

        def failing_sample(self: Any, *arguments: Any, **keywords: Any) -> Any:
            if len(metrics(tmp_path / "cut")) == 2:
                raise MemoryError("out of memory while sampling")
            return original_sample(self, *arguments, **keywords)

        monkeypatch.setattr(Engine, "sample", failing_sample)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/.keep").touch()
    with pytest.raises(MemoryError):
        run(tmp_path / "cut", max_steps=3, lr_scheduler_type="constant")
    assert states and all(state.released for state in states)
    for file in ("parameters", "optimizer"):
        ours = load_file(tmp_path / f"cut/checkpoints/checkpoint-000002/{file}.safetensors")
        theirs = load_file(tmp_path / f"two/checkpoints/checkpoint-000002/{file}.safetensors")
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
