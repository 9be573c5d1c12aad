"""What every group of options has in common: strict validation, and a short form."""

from __future__ import annotations

from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator


class StrictGroup(BaseModel):
    """A group of options: an unknown key is an error, and true or false is not taken for a number."""

    model_config = ConfigDict(extra="forbid", validate_default=True, protected_namespaces=())
    shorthand: ClassVar[str | None] = None
    """The option that a bare string stands for, where a group may be written as one."""

    @classmethod
    def expand(cls, word: str) -> Any:
        """The options that a bare string stands for; the string itself where it stands for none."""
        return {cls.shorthand: word} if cls.shorthand else word

    @model_validator(mode="before")
    @classmethod
    def _expand_shorthand(cls, values: Any) -> Any:
        return cls.expand(values) if isinstance(values, str) else values

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_boolean_for_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and not _admits_bool(cls.model_fields[str(info.field_name)].annotation):
            raise ValueError(f"'{info.field_name}' is {str(value).lower()}, but it is not a switch. Give it a value.")
        return value


def _admits_bool(annotation: Any) -> bool:
    if annotation in (bool, Any):
        return True
    return any(
        argument is bool or isinstance(argument, bool) or _admits_bool(argument) for argument in get_args(annotation)
    )
