"""From YAML and key=value words to a TrainConfig and back; messages a user can act on; the list of options."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from longstraw.training.config import TrainConfig
from longstraw.training.config_parts import StrictGroup

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
    "gradient_checkpointing": "The live graph is one piece: set 'segment_tokens' and 'block_tokens' to bound it.",
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


def load_config(
    path: Path | None = None, overrides: Sequence[str] = (), base: dict[str, Any] | None = None
) -> TrainConfig:
    """Read a YAML file (or `base`), apply `key=value` words in order, validate.

    Args:
        path: YAML file; None starts from `base`.
        overrides: words `dotted.key=value`; the value is YAML (`lora=null`, `eval.long.num_samples=8`).
        base: options to start from when there is no file.
    Raises:
        ConfigError: one message that lists every problem.
    """
    values = dict(base or {})
    if path is not None:
        values = _read_yaml(path)
    for word in overrides:
        _apply_override(values, word)
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_messages(error, str(path) if path else None))) from None


def config_to_yaml(config: TrainConfig) -> str:
    """The resolved configuration as YAML; `load_config` reads it back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def list_options() -> Iterator[tuple[str, str, str, str]]:
    """Yield (dotted key, type, default, help) of every option, in order."""
    yield from _list_options(TrainConfig, "")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"There is no file {path}. Give the path of a YAML configuration, or none for the embedded task."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no options: a mapping of names to values is expected, e.g. `model: PATH`.")
    return values


def _apply_override(values: dict[str, Any], word: str) -> None:
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ConfigError(f"'{word}' is no override. Write key=value, e.g. learning_rate=1e-5 or model.dtype=bfloat16.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"The value of '{key}' is not valid YAML: {error}") from None
    group: type[BaseModel] | None = TrainConfig
    target = values
    *parents, leaf = key.split(".")
    for parent in parents:
        group = _group_at(group, parent)
        inner = target.get(parent)
        if isinstance(inner, str) and group is not None and issubclass(group, StrictGroup):
            try:
                inner = group.expand(inner)
            except ValueError as error:
                raise ConfigError(str(error)) from None
        if inner is None:
            inner = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"'{key}' cannot be set: '{parent}' is {inner!r}, not a group of options.")
        target[parent] = dict(inner)
        target = target[parent]
    target[leaf] = value


def _group_at(group: type[BaseModel] | None, key: str) -> type[BaseModel] | None:
    """The class of the options below `key`; for a mapping of groups (`eval`), any key leads to the group."""
    if group is None:
        return None
    field = group.model_fields.get(key)
    return _nested_class(field) if field else group if group is not TrainConfig else None


def _nested_class(field: FieldInfo) -> type[BaseModel] | None:
    pending = [field.annotation]
    while pending:
        annotation = pending.pop()
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation
        pending.extend(get_args(annotation))
    return None


def _messages(error: ValidationError, where: str | None) -> list[str]:
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
        group = _group_at(group, part)
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
        group = _group_at(group, parent)
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


def _list_options(group: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    for name, field in group.model_fields.items():
        default = "required" if field.is_required() else _show(field)
        yield prefix + name, _type_name(field), default, field.description or ""
        nested = _nested_class(field)
        if nested is not None:
            yield from _list_options(nested, f"{prefix}{name}.NAME." if name == "eval" else f"{prefix}{name}.")


def _show(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        value = value.model_dump()
    return yaml.safe_dump(value, default_flow_style=True).replace("\n...", "").strip()


def _type_name(field: FieldInfo) -> str:
    text = (
        str(field.annotation)
        if get_args(field.annotation)
        else getattr(field.annotation, "__name__", str(field.annotation))
    )
    for ugly in ("typing.", "longstraw.training.config_parts.", "annotated_types.", "longstraw.training.config."):
        text = text.replace(ugly, "")
    while "Annotated[" in text:
        start = text.index("Annotated[")
        inner = text[start + len("Annotated[") :]
        text = text[:start] + inner.split(",", 1)[0] + inner[inner.index("])]") + 3 :]
    return text
