"""The options by dotted key, for the command line and for messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import get_args

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from longstraw.config.train import TrainConfig


def list_options(group: type[BaseModel] = TrainConfig, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield (dotted key, type, default, help) of every option of a group, in order; its key begins with `prefix`."""
    for name, field in group.model_fields.items():
        default = "required" if field.is_required() else _show(field)
        yield prefix + name, _type_name(field), default, field.description or ""
        if (nested := nested_class(field)) is not None:
            yield from list_options(nested, f"{prefix}{name}.NAME." if name == "eval" else f"{prefix}{name}.")


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


def _show(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        value = value.model_dump()
    return yaml.safe_dump(value, default_flow_style=True).replace("\n...", "").strip()


def _type_name(field: FieldInfo) -> str:
    kind = field.annotation
    text = str(kind) if get_args(kind) else getattr(kind, "__name__", str(kind))
    text = re.sub(r"typing\.|annotated_types\.|longstraw\.config\.\w+\.", "", text)
    while "Annotated[" in text:
        start = text.index("Annotated[")
        inner = text[start + len("Annotated[") :]
        text = text[:start] + inner.split(",", 1)[0] + inner[inner.index("])]") + 3 :]
    return text
