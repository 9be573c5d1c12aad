"""Configurations: what passes, and what a user reads when something does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from longstraw.config.listing import list_options
from longstraw.config.load import config_to_yaml, load_config
from longstraw.config.messages import ConfigError
from longstraw.config.train import TrainConfig

BASE = {"model": "some/model", "dataset": "data.jsonl", "reward_funcs": "rewards:exact"}


def message(*words: str, **changes: object) -> str:
    with pytest.raises(ConfigError) as raised:
        load_config(None, words, BASE | changes)
    return str(raised.value)


def test_shorthands_and_defaults_are_trls_where_the_meaning_is() -> None:
    config = load_config(None, (), BASE)
    assert config.model.path == "some/model" and config.dataset.source == "data.jsonl"
    assert config.reward_funcs == ["rewards:exact"]
    assert (config.num_generations, config.max_completion_length, config.temperature) == (8, 512, 1.0)
    assert (config.loss_type, config.beta, config.epsilon, config.learning_rate) == ("dapo", 0.0, 0.2, 1e-6)
    assert (config.scale_rewards, config.lr_scheduler_type, config.max_grad_norm) == ("group", "linear", 1.0)


def test_words_set_dotted_keys_with_yaml_values() -> None:
    config = load_config(
        None,
        ["learning_rate=1e-4", "model.dtype=bfloat16", "lora.target_modules=[q_proj, v_proj]", "prompt_grad=256",
         "eval.long.source=long.jsonl", "eval.long.num_samples=3", "scale_rewards=false", "warmup_steps=0.1"],
        BASE,
    )  # fmt: skip
    assert config.learning_rate == 1e-4 and config.model.path == "some/model" and config.model.dtype == "bfloat16"
    assert config.lora is not None and config.lora.target_modules == ["q_proj", "v_proj"]
    assert config.prompt_grad == 256 and config.eval["long"].num_samples == 3 and config.scale_rewards == "none"


def test_the_resolved_configuration_reads_back_equal(tmp_path: Path) -> None:
    config = load_config(None, ["lora.r=4", "eval.a.source=m:f", "prompt_grad=none", "delta=2.5"], BASE)
    path = tmp_path / "config.yaml"
    path.write_text(config_to_yaml(config))
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("num_generation=4", "unknown key 'num_generation'. Did you mean 'num_generations'?"),
        ("r=4", "Did you mean 'lora.r'?"),
        ("model.dtyp=auto", "unknown key 'model.dtyp'. Did you mean 'model.dtype'?"),
        ("eval.long.num_sample=4", "Did you mean 'eval.long.num_samples'?"),
        ("per_device_train_batch_size=8", "Set 'prompts_per_step'"),
        ("bf16=true", "Set 'model.dtype' to bfloat16"),
        ("lora.lora_dropout=0.1", "Dropout is not possible"),
        ("learning_rate=fast", "'learning_rate' is 'fast', which is not possible"),
        ("max_steps=true", "'max_steps' is true, but it is not a switch"),
        ("model.dtype=fp8", "'float32', 'bfloat16'"),
        ("prompt_grad=half", "'prompt_grad' is 'half'"),
        ("num_generations=1", "'num_generations' is 1"),
        ("max_steps=0", "'max_steps' is 0"),
        ("model.quantization=nf4", "'model.quantization: nf4' freezes the base weights"),
        ("reward_weights=[1, 2]", "'reward_weights' has 2 values for 1 reward functions"),
        ("eval_steps=5", "'eval_steps' is set, but 'eval' names no set"),
        ("temperature=0", "'temperature' is 0"),
        ("justaword", "'justaword' is no override"),
        ("model.max_position_embeddings=100", "model.rope_scaling"),
    ],
)
def test_a_mistake_names_the_key_and_the_remedy(word: str, expected: str) -> None:
    assert expected in message(word)


def test_combinations_that_cannot_be() -> None:
    assert "'lora' makes new adapters" in message("lora.r=8", "model.adapter=there")
    assert "delta" in message("delta=2.0", "loss_type=cispo")
    assert "'model.reference_adapter'" in message("model.reference_adapter=there", "lora.r=8")
    assert "'dynamic_sampling'" in message("dynamic_sampling=true", "beta=0.1")
    assert "exclude each other" in message("model.gguf_file=a.gguf", "model.quantization=nf4", "lora.r=8")
    assert "give a whole number of steps, or a share below 1" in message("warmup_steps=9.5")
    assert "would repeat one completion" in message("eval.a.source=x", "eval.a.num_generations=2")


def test_all_mistakes_are_reported_at_once_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(BASE | {"sead": 1, "top_p": 2}))
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    lines = str(raised.value).splitlines()
    assert len(lines) == 2 and all(line.startswith(f"{path}: ") for line in lines)
    assert "Did you mean 'seed'?" in str(raised.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no file"):
        load_config(tmp_path / "absent.yaml")
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(tmp_path / "broken.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="holds no options"):
        load_config(tmp_path / "list.yaml")


def test_every_option_has_a_help_text() -> None:
    assert all(text for _, _, _, text in list_options())
    assert {key for key, *_ in list_options()} >= set(TrainConfig.model_fields)


def test_configuration_needs_no_torch() -> None:
    code = "import sys, longstraw.config.load, longstraw.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
