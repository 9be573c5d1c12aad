"""From YAML and key=value words to a TrainConfig, and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from longstraw.config.listing import group_at
from longstraw.config.messages import ConfigError, describe_problems
from longstraw.config.strict import StrictGroup
from longstraw.config.train import TrainConfig


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
        raise ConfigError("\n".join(describe_problems(error, str(path) if path else None))) from None


def config_to_yaml(config: TrainConfig) -> str:
    """The resolved configuration as YAML; `load_config` reads it back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


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
        group = group_at(group, parent)
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
