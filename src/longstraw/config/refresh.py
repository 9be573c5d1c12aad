"""The rule by which a kept prompt state is captured again."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from longstraw.config.strict import StrictGroup


class RefreshConfig(StrictGroup):
    """When a kept prompt state is captured again. `always`, `every N`, `drift TOLERANCE`, or the options."""

    every: int | None = Field(
        default=None, ge=1, description="Capture again once the state is this many optimizer steps old."
    )
    drift: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="Probe the state before every reuse and capture again when it has drifted by more than this "
        "(relative L2 distance; 0.05 is five percent).",
    )
    num_segments: int = Field(default=2, ge=1, description="Random prompt segments that a probe recomputes.")

    @property
    def is_always(self) -> bool:
        """Whether no state outlives an optimizer step."""
        return self.every is None and self.drift is None

    @classmethod
    def expand(cls, word: str) -> Any:
        match word.split():
            case ["always"]:
                return {}
            case ["every" | "drift" as rule, number]:
                return {rule: number}
        raise ValueError(
            f"'refresh' is '{word}', which is no rule. Write always, {{every: N}} or {{drift: TOLERANCE}}."
        )

    @model_validator(mode="after")
    def _check(self) -> RefreshConfig:
        if self.every is not None and self.drift is not None:
            raise ValueError("'refresh.every' and 'refresh.drift' are two rules. Remove one of them.")
        return self

    @model_serializer(mode="wrap")
    def _as_written(self, handler: SerializerFunctionWrapHandler) -> Any:
        if self.is_always:
            return "always"
        return {name: value for name, value in handler(self).items() if value is not None}
