"""Whole runs on a tiny model: what they leave behind, the gradient against a plain reference, groups without signal."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from tiny_runs import assert_same_run, completions, metrics, run, weights
from transformers import AutoModelForCausalLM

HELD_OUT = {"held": {"source": "tiny:rows", "args": {"seed": 5}, "num_samples": 3}}


def test_a_run_leaves_everything_behind(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run(out, eval=HELD_OUT, eval_steps=2, save_steps=1, save_total_limit=2)
    assert result.step == 3 and set(result.after) == {"held"}
    assert {path.name for path in out.iterdir()} == {
        "config.yaml", "environment.json", "metrics.jsonl", "completions", "checkpoints", "final", "summary.json"
    }  # fmt: skip
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["checkpoint-000002", "checkpoint-000003"]
    assert yaml.safe_load((out / "config.yaml").read_text())["num_generations"] == 3
    assert json.loads((out / "summary.json").read_text())["status"] == "finished"
    start = json.loads((out / "environment.json").read_text())["starts"][0]
    assert start["packages"]["torch"] == torch.__version__ and "unknown" not in json.dumps(start)

    evaluations = [
        row for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if "loss" not in row
    ]
    assert [row["step"] for row in evaluations] == [0, 2, 3]
    first = metrics(out)[0]
    for key in ("reward", "reward_std", "rewards/closeness/mean", "grad_norm", "completions/mean_length", "kl"):
        assert (key in first) == (key != "kl"), key
    for key in ("clip_ratio/region_mean", "frac_reward_zero_std", "step_time", "time/sweep", "memory/replay"):
        assert key in first, key
    assert first["sampling/sampling_logp_difference/max"] < 1e-5

    sample = json.loads(completions(out)["step-000001.jsonl"].splitlines()[0])
    assert sample.keys() >= {"prompt", "completion", "rewards", "reward", "advantage", "finish_reason"}

    trained = AutoModelForCausalLM.from_pretrained(out / "final").state_dict()
    start_weights = tiny.llama().state_dict()
    assert any(not torch.equal(trained[name], value) for name, value in start_weights.items())


def plain_step(rows: list[dict[str, Any]], prompts: dict[int, list[int]]) -> tuple[torch.nn.Module, float, float]:
    """Stock autograd and AdamW on the same completions: the dapo loss on policy, one full sequence at a time."""
    model = tiny.llama()
    num_tokens = sum(row["completion_tokens"] for row in rows)
    total = 0.0
    for row in rows:
        ids = torch.tensor([prompts[row["row"]] + row["completion"]])
        logps = model(ids).logits[0].log_softmax(-1)
        first = row["prompt_tokens"]
        chosen = logps[torch.arange(first - 1, ids.shape[1] - 1), ids[0, first:]]
        loss = -((chosen - chosen.detach()).exp() * row["advantage"]).sum() / num_tokens
        loss.backward()
        total += float(loss.detach())
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0).step()
    return model, total, norm


def test_how_thinly_states_were_kept_is_in_the_metrics(tmp_path: Path) -> None:
    """One row for a bound that holds all of the windows' states, one for none, and one for a bound that is too low."""
    changes: dict[str, Any] = dict(model={"path": "tiny:mistral"}, segment_tokens=2, max_steps=1)
    for limit, stride in (("256KiB", 1), (None, None)):
        run(tmp_path / str(limit), boundary_bytes=limit, **changes)
        [row] = metrics(tmp_path / str(limit))
        assert row.get("boundary_stride") == stride
    with pytest.warns(UserWarning, match=r"boundary_bytes=1,000 .*at the least"):
        run(tmp_path / "thin", boundary_bytes=1000, **changes)
    [row] = metrics(tmp_path / "thin")
    assert row["boundary_stride"] > 1


def test_a_step_is_the_conventional_one(tmp_path: Path) -> None:
    run(tmp_path / "run", max_steps=1, prompts_per_step=3, lr_scheduler_type="constant")
    rows = [json.loads(line) for line in completions(tmp_path / "run")["step-000001.jsonl"].splitlines()]
    assert len(rows) == 9
    prompts = {number: row["prompt"] for number, row in enumerate(tiny.rows())}
    reference, loss, norm = plain_step(rows, prompts)
    ours = metrics(tmp_path / "run")[0]
    assert ours["loss"] == pytest.approx(loss, abs=1e-7) and ours["grad_norm"] == pytest.approx(norm, rel=1e-5)
    trained = weights(tmp_path / "run")
    for name, parameter in reference.named_parameters():
        if name in trained:
            # AdamW's first step divides by the gradient's size: only entries whose gradient is rounding may differ.
            apart = (trained[name] - parameter.detach()).abs() > 1e-4
            assert apart.float().mean() < 0.01, name


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_any_split_of_the_prompts_is_the_same_step(tmp_path: Path, loss_type: str) -> None:
    changes = {"max_steps": 2, "loss_type": loss_type}
    run(tmp_path / "together", prompts_per_step=4, **changes)
    for split in (1, 2):
        run(tmp_path / f"{split}", prompts_per_step=split, gradient_accumulation_steps=4 // split, **changes)
        assert_same_run(tmp_path / "together", tmp_path / f"{split}")


@pytest.mark.parametrize("reward", ["tiny:closeness", "test_trainer:half_flat"])
def test_the_most_open_tokens_are_those_of_the_whole_step(tmp_path: Path, reward: str) -> None:
    changes = {
        "max_steps": 4, "num_iterations": 2, "top_entropy_quantile": 0.3, "reward_funcs": reward,
        "shuffle_dataset": False,
    }  # fmt: skip
    run(tmp_path / "together", prompts_per_step=4, **changes)
    run(tmp_path / "apart", prompts_per_step=1, gradient_accumulation_steps=4, **changes)
    assert_same_run(tmp_path / "together", tmp_path / "apart")
    rows = metrics(tmp_path / "together")
    assert [row["staleness/recaptured"] for row in metrics(tmp_path / "apart")] == [0, 4, 0, 4]
    assert rows[1]["staleness/recaptured"] == 4  # groups without signal are scored, too
    run(tmp_path / "all", prompts_per_step=4, **changes | {"top_entropy_quantile": 1.0})
    assert rows[0]["grad_norm"] != pytest.approx(metrics(tmp_path / "all")[0]["grad_norm"], rel=0.05)
    assert rows[0]["entropy"] == pytest.approx(metrics(tmp_path / "all")[0]["entropy"])


def constant(completions: list[Any], **_: Any) -> list[float]:
    return [1.0 / 3.0] * len(completions)


def nothing(completions: list[Any], **_: Any) -> list[None]:
    return [None] * len(completions)


def first_only(completion_ids: list[list[int]], target: list[int], **_: Any) -> list[float | None]:
    return [float(ids[0]) if index % 3 else None for index, ids in enumerate(completion_ids)]


@pytest.mark.parametrize("reward", ["constant", "nothing"])
def test_a_step_without_signal_moves_nothing_and_is_reported(tmp_path: Path, reward: str) -> None:
    run(tmp_path / "run", reward_funcs=f"test_trainer:{reward}", prompts_per_step=2, max_steps=2)
    for row in metrics(tmp_path / "run"):
        assert row["groups/skipped"] == 2 and row["grad_norm"] == 0.0 and row["loss"] == 0.0
        assert row["reward"] == (None if reward == "nothing" else pytest.approx(1 / 3))
        assert "time/sweep" not in row
    before = tiny.llama().state_dict()
    assert all(torch.equal(before[name], value) for name, value in weights(tmp_path / "run").items())


def test_a_sample_without_reward_is_left_out(tmp_path: Path) -> None:
    run(tmp_path / "run", reward_funcs="test_trainer:first_only", max_steps=1)
    rows = [json.loads(line) for line in completions(tmp_path / "run")["step-000001.jsonl"].splitlines()]
    assert rows[0]["reward"] is None and rows[0]["advantage"] == 0.0
    given = torch.tensor([row["reward"] for row in rows[1:]], dtype=torch.float64)
    expected = (given - given.mean()) / (given.std() + 1e-4)
    assert torch.allclose(torch.tensor([row["advantage"] for row in rows[1:]], dtype=torch.float64), expected)


def test_all_truncated_and_masked_is_finite(tmp_path: Path) -> None:
    run(tmp_path / "run", mask_truncated_completions=True, max_steps=1)
    row = metrics(tmp_path / "run")[0]
    assert row["completions/clipped_ratio"] == 1.0 and row["loss"] == 0.0 and row["grad_norm"] == 0.0


def half_flat(prompts: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(ids[0]) if len(prompt) % 2 else 0.0 for prompt, ids in zip(prompts, completion_ids, strict=True)]


def test_dynamic_sampling_replaces_groups_without_signal(tmp_path: Path) -> None:
    run(
        tmp_path / "run", reward_funcs="test_trainer:half_flat", prompts_per_step=2, max_steps=1, dynamic_sampling=True,
        shuffle_dataset=False,
    )  # fmt: skip
    row = metrics(tmp_path / "run")[0]
    assert row["groups/replaced"] == 2 and row["groups/skipped"] == 0 and row["epoch"] == pytest.approx(4 / 6)
    kept = {json.loads(line)["row"] for line in completions(tmp_path / "run")["step-000001.jsonl"].splitlines()}
    assert kept == {1, 3}


def test_dynamic_sampling_gives_up_after_its_rounds_and_says_so(tmp_path: Path) -> None:
    printed = StringIO()
    run(
        tmp_path / "run", reward_funcs="test_trainer:constant", max_steps=1, dynamic_sampling=True,
        max_resampling_rounds=3, printed=printed,
    )  # fmt: skip
    assert "3 replaced  no group's rewards differ: nothing to learn from" in printed.getvalue()
    row = metrics(tmp_path / "run")[0]
    assert row["groups/replaced"] == 3 and row["reward"] is None and row["grad_norm"] == 0.0


def test_iterations_reuse_the_rollouts_off_policy(tmp_path: Path) -> None:
    run(tmp_path / "run", num_iterations=3, max_steps=6)
    rows = metrics(tmp_path / "run")
    assert list(completions(tmp_path / "run")) == ["step-000001.jsonl", "step-000004.jsonl"]
    assert [row["ratio/mean"] == 1.0 for row in rows] == [True, False, False, True, False, False]
    assert [row["epoch"] for row in rows] == pytest.approx([1 / 6] * 3 + [2 / 6] * 3)
    assert [f"{row['learning_rate']:.4f}" for row in rows][:2] == ["0.0100", "0.0083"]


def test_the_kl_term_starts_at_zero_and_grows(tmp_path: Path) -> None:
    run(tmp_path / "run", beta=0.1, max_steps=3)
    rows = metrics(tmp_path / "run")
    assert rows[0]["kl"] == 0.0 and rows[1]["kl"] > 0.0 and rows[2]["kl"] > 0.0
    run(tmp_path / "lora", beta=0.1, max_steps=3, lora={"r": 2, "alpha": 4})
    rows = metrics(tmp_path / "lora")
    assert rows[0]["kl"] == 0.0 and rows[1]["kl"] > 0.0


def test_positions_beyond_the_model_are_refused_with_the_ways_out(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"row 5 has 25 tokens; with max_completion_length=250 .* 256 positions"
    ) as raised:
        run(tmp_path / "run", max_completion_length=250)
    assert "max_prompt_length to 6 or less" in str(raised.value) and "model.rope_scaling" in str(raised.value)
    assert not (tmp_path / "run").exists()
