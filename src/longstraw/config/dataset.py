"""The options of a source of prompts, for training or held out."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from longstraw.config.strict import StrictGroup


class DatasetConfig(StrictGroup):
    """Where prompts come from. `dataset: SOURCE` is short for `dataset: {source: SOURCE}`."""

    shorthand: ClassVar[str | None] = "source"
    source: str = Field(
        description="A .jsonl, .json, .parquet or .csv file; a folder or hub name for datasets.load_dataset; or "
        "'module:function', a function that returns rows. Each has a `prompt` (text, chat messages or token "
        "ids); other columns go to the rewards."
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments for the function, or for datasets.load_dataset."
    )
    split: str = Field(default="train", description="Split of a `datasets` source.")


class EvalConfig(DatasetConfig):
    """A held-out set. Reported as the mean reward over its rows, before, during and after training."""

    num_samples: int = Field(default=32, ge=1, description="Rows to evaluate, from the start of the set.")
    num_generations: int = Field(default=1, ge=1, description="Completions a row.")
    greedy: bool = Field(
        default=True, description="Take the likeliest token; false samples at the training temperature."
    )
    max_completion_length: int | None = Field(default=None, ge=1, description="Default: the training value.")

    @model_validator(mode="after")
    def _check(self) -> EvalConfig:
        if self.greedy and self.num_generations > 1:
            raise ValueError(
                "'num_generations' above 1 with 'greedy: true' would repeat one completion. Set greedy: false, or "
                "num_generations: 1."
            )
        return self
