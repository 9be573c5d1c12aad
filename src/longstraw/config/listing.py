"""The options by dotted key, for the command line and for messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import get_args

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from longstraw.config.train import TrainConfig


def list_options() -> Iterator[tuple[str, str, str, str]]:
    """Yield (dotted key, type, default, help) of every option, in order."""
    yield from _list_options(TrainConfig, "")


def group_at(group: type[BaseModel] | None, key: str) -> type[BaseModel] | None:
    """The class of the options below `key`; for a mapping of groups (`eval`), any key leads to the group."""
    if group is None:
        return None
    field = group.model_fields.get(key)
    return nested_class(field) if field else group if group is not TrainConfig else None


def nested_class(field: FieldInfo) -> type[BaseModel] | None:
    pending = [field.annotation]
    while pending:
        annotation = pending.pop()
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation
        pending.extend(get_args(annotation))
    return None


def _list_options(group: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    for name, field in group.model_fields.items():
        default = "required" if field.is_required() else _show(field)
        yield prefix + name, _type_name(field), default, field.description or ""
        nested = nested_class(field)
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
    text = re.sub(r"typing\.|annotated_types\.|longstraw\.config\.\w+\.", "", text)
    while "Annotated[" in text:
        start = text.index("Annotated[")
        inner = text[start + len("Annotated[") :]
        text = text[:start] + inner.split(",", 1)[0] + inner[inner.index("])]") + 3 :]
    return text
