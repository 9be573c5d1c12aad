"""What is wrong with a configuration, in messages that a user can act on."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ValidationError

from longstraw.config.listing import group_at, list_options
from longstraw.config.train import TrainConfig

# What users of other trainers look for, and what answers it here.
OTHER_NAMES = {
    "per_device_train_batch_size": "Set 'prompts_per_step': it counts prompts; each gets 'num_generations' responses.",
    "generation_batch_size": "Set 'prompts_per_step': it counts prompts; each gets 'num_generations' responses.",
    "steps_per_generation": "Set 'num_iterations' to take several steps on the same responses.",
    "bf16": "Set 'model.dtype' to bfloat16.",
    "fp16": "Set 'model.dtype' to float16.",
    "use_vllm": "Responses are sampled from the captured prompt state; there is no second engine to set up.",
    "model_name_or_path": "Set 'model.path'.",
    "model_init_kwargs": "Set the options under 'model'.",
    "dataset_name": "Set 'dataset.source'.",
    "dataset_path": "Set 'dataset.source'.",
    "gradient_checkpointing": "One piece at a time has a graph: set 'segment_tokens' and 'block_tokens' to bound it.",
    "resume_from_checkpoint": "Run `longstraw train RUN_DIR --resume`.",
    "resume": "Run `longstraw train RUN_DIR --resume`.",
    "warmup_ratio": "Set 'warmup_steps' to a share below 1.",
    "lora_alpha": "Set 'lora.alpha'.",
    "lora_r": "Set 'lora.r'.",
    "rank": "Set 'lora.r'.",
    "lora_dropout": "Dropout is not possible: a recomputed graph must be the same function. Leave it out.",
    "dropout": "Dropout is not possible: a recomputed graph must be the same function. Leave it out.",
    "reward_func": "Set 'reward_funcs'.",
    "reward": "Set 'reward_funcs'.",
}


class ConfigError(ValueError):
    """A configuration that cannot be used. The message names the key and the remedy."""


def describe_problems(error: ValidationError, where: str | None) -> list[str]:
    """One line a problem, each beginning with `where` (the file) if it is given."""
    prefix = f"{where}: " if where else ""
    expectations: dict[str, list[str]] = {}
    texts: dict[str, str] = {}
    for problem in error.errors(include_url=False):
        location = [str(part) for part in problem["loc"]]
        key = ".".join(_known_part(location))
        if problem["type"] in ("extra_forbidden", "missing", "value_error"):
            texts[f"{key} {problem['type']}"] = _message(problem, key, location)
        else:  # a union reports one problem a branch: they are alternatives
            expectations.setdefault(key, []).append(problem["msg"][:1].lower() + problem["msg"][1:])
            texts[key] = (
                f"'{key}' is {problem.get('input')!r}, which is not possible: {', or '.join(expectations[key])}. "
                f"{_help_of(key)}"
            )
    return [prefix + line for text in texts.values() for line in text.splitlines()]


def _known_part(location: list[str]) -> list[str]:
    group: type[BaseModel] | None = TrainConfig
    known: list[str] = []
    for part in location:
        if group is None and known and not part.isdigit() and known[0] != "eval":
            break
        known.append(part)
        group = group_at(group, part)
    return known


def _message(problem: Any, key: str, location: list[str]) -> str:
    if problem["type"] == "extra_forbidden":
        return f"unknown key '{key}'. {_suggestion(location)}"
    if problem["type"] == "missing":
        return f"'{key}' is missing. {_help_of(key)}"
    text = str(problem["ctx"]["error"])
    return f"{key}: {text}" if key and f"'{key}" not in text else text


def _suggestion(location: list[str]) -> str:
    *parents, wrong = location
    if wrong in OTHER_NAMES:
        return OTHER_NAMES[wrong]
    group: type[BaseModel] | None = TrainConfig
    for parent in parents:
        group = group_at(group, parent)
    here = list(group.model_fields) if group else []
    close = difflib.get_close_matches(wrong, here, n=1, cutoff=0.6)
    if close:
        return f"Did you mean '{'.'.join([*parents, close[0]])}'?"
    everywhere = [key for key, *_ in list_options()]
    same_leaf = [key for key in everywhere if key.rsplit(".", 1)[-1] == wrong]
    close = same_leaf or difflib.get_close_matches(wrong, everywhere, n=1, cutoff=0.6)
    if close:
        return f"Did you mean '{close[0]}'?"
    return "`longstraw config` lists all keys."


def _help_of(key: str) -> str:
    for name, _, _, text in list_options():
        if name == key or (key.startswith("eval.") and name == "eval.NAME." + key.rsplit(".", 1)[-1]):
            return text
    return "`longstraw config` lists all keys."
