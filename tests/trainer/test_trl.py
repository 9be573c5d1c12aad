"""Whole training runs against TRL's GRPOTrainer on the same completions: losses and gradient norms of every step."""

from __future__ import annotations

import dataclasses
import logging
import random
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from tiny_runs import metrics, run

from longstraw.config.train import TrainConfig

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

NUM_GENERATIONS = 4
PROMPTS = ["w1 w2 w3 w4 w5 w6 w7", "w8 w9 w10 w11", "w12 w13 w14 w15 w16 w17", "w20 w21 w22"]
COMMON = {
    "num_generations": NUM_GENERATIONS, "max_completion_length": 6, "learning_rate": 5e-3, "max_steps": 4,
    "max_grad_norm": 0.5, "lr_scheduler_type": "linear", "warmup_steps": 1, "weight_decay": 0.0, "seed": 1,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, "num_iterations": 2},
    "gspo off policy": {
        "loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2, "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "off policy, two-sided": {"loss_type": "dapo", "num_iterations": 4, "epsilon_high": 0.28, "delta": 1.5},
    "kl": {"loss_type": "dapo", "beta": 0.5, "num_iterations": 2},
    "plain kl": {"loss_type": "grpo", "beta": 0.5, "use_bias_correction_kl": False},
    "masked, unscaled": {"loss_type": "dapo", "mask_truncated_completions": True, "scale_rewards": "none"},
    "batch scale": {"loss_type": "grpo", "scale_rewards": "batch"},
    "most open tokens": {
        "loss_type": "dapo", "top_entropy_quantile": 0.3, "beta": 0.3, "num_iterations": 2, "temperature": 0.7,
    },
    "most open tokens, gspo": {
        # no threshold falls among a group's first tokens, whose entropies differ by rounding alone
        "loss_type": "grpo", "importance_sampling_level": "sequence", "top_entropy_quantile": 0.35, "num_iterations": 2,
        "mask_truncated_completions": True,
    },
}  # fmt: skip


def canned(text: str) -> list[list[int]]:
    """Completions that depend on the prompt alone; some end with <eos>, some are cut."""
    chooser = random.Random(text)
    drafts = [[chooser.randrange(4, 60) for _ in range(chooser.randrange(1, 7))] for _ in range(NUM_GENERATIONS)]
    return [ids if len(ids) == 6 else [*ids, 1] for ids in drafts]


def ours(prompt: str, **_: Any) -> dict[str, Any]:
    return {"completion_ids": canned(prompt)}


def theirs(prompts: list[str], trainer: Any) -> dict[str, Any]:
    ids = [canned(prompt)[index % NUM_GENERATIONS] for index, prompt in enumerate(prompts)]
    return {
        "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": ids,
        "logprobs": None,
    }


def spread(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids[:3]) / 60 for ids in completion_ids]


def text_rows() -> list[dict[str, Any]]:
    return [{"prompt": prompt} for prompt in PROMPTS]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    tiny.llama(eos_token_id=1, pad_token_id=0).save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_and_gradient_norms_are_trls(tmp_path: Path, saved: Path, variant: str) -> None:
    options = COMMON | VARIANTS[variant]
    logging.getLogger("trl").setLevel(logging.ERROR)
    trainer = trl.GRPOTrainer(
        model=str(saved),
        reward_funcs=spread,
        rollout_func=theirs,
        train_dataset=datasets.Dataset.from_list(text_rows()),
        processing_class=tiny.tokenizer(),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path / "trl"), per_device_train_batch_size=2 * NUM_GENERATIONS, use_cpu=True, bf16=False,
            logging_steps=1, report_to="none", shuffle_dataset=False, gradient_checkpointing=False, save_strategy="no",
            disable_tqdm=True, **options,
        ),
    )  # fmt: skip
    trainer.train()
    expected = [row for row in trainer.state.log_history if "grad_norm" in row]

    run(
        tmp_path / "ours", model=str(saved), dataset="test_trl:text_rows", rollout_func="test_trl:ours",
        reward_funcs="test_trl:spread", prompts_per_step=2, shuffle_dataset=False, **options,
    )  # fmt: skip
    rows = metrics(tmp_path / "ours")
    assert len(rows) == len(expected) == 4
    for row, twin in zip(rows, expected, strict=True):
        assert row["loss"] == pytest.approx(twin["loss"], rel=2e-4, abs=2e-6), f"loss at step {row['step']}"
        assert row["grad_norm"] == pytest.approx(twin["grad_norm"], rel=2e-4), f"norm at step {row['step']}"
        assert row["learning_rate"] == pytest.approx(twin["learning_rate"])
        if "kl" in twin:
            assert row["kl"] == pytest.approx(twin["kl"], rel=1e-3, abs=1e-6)
        for name in ("entropy", "reward", "reward_std", "frac_reward_zero_std", "completions/mean_length"):
            if name in row:
                assert row[name] == pytest.approx(twin[name], rel=1e-5), f"{name} at step {row['step']}"
        for name in ("clip_ratio/low_mean", "clip_ratio/high_mean", "cispo_clip_ratio"):
            if name in row and name in twin:
                assert row[name] == pytest.approx(twin[name], abs=1e-6), f"{name} at step {row['step']}"


def test_the_documented_defaults_are_trls() -> None:
    document = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
    section = document.split("### The same name, meaning and default")[1].split("###")[0]
    named = re.findall(r"`(\w+)` ([^\s,(|]+)", section)
    assert len(named) > 25
    fields = {field.name: field for field in dataclasses.fields(trl.GRPOConfig)}
    defaults = TrainConfig.model_fields
    for name, text in named:
        value = yaml.safe_load(text) if name not in ("learning_rate", "adam_epsilon") else float(text)
        assert defaults[name].get_default() == value, name
        assert fields[name].default == value, f"TRL's {name} is {fields[name].default}"
