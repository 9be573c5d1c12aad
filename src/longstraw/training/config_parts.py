"""The nested groups of a training configuration: model, lora, dataset and evaluation sets. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)


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


_UNITS = {
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "B": 1,
}


def parse_bytes(value: Any) -> Any:
    """'8GiB' or '500 MB' as a number of bytes; anything else as it is, for the type's own check."""
    if isinstance(value, str):
        for unit, size in _UNITS.items():
            number = value.strip().upper().removesuffix(unit).strip()
            if number != value.strip().upper() and number.replace(".", "", 1).isdigit():
                return int(float(number) * size)
    return value


def _admits_bool(annotation: Any) -> bool:
    if annotation in (bool, Any):
        return True
    return any(
        argument is bool or isinstance(argument, bool) or _admits_bool(argument) for argument in get_args(annotation)
    )


class ModelConfig(StrictGroup):
    """Which model is trained and how it is loaded. `model: PATH` is short for `model: {path: PATH}`."""

    shorthand: ClassVar[str | None] = "path"
    path: str = Field(
        description="Folder or hub name for from_pretrained; 'package:NAME/sub/folder' for weights inside an installed "
        "Python package; or 'module:function', a function that returns a model or (model, tokenizer)."
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments for a 'module:function' path.")
    revision: str | None = Field(default=None, description="Branch, tag or commit of a hub model.")
    dtype: Literal["float32", "bfloat16", "float16", "float64", "auto"] = Field(
        default="float32", description="Parameter dtype; 'auto' keeps the checkpoint's own."
    )
    device: str = Field(
        default="auto", description="'auto' (cuda when there is one, else cpu), 'cpu', 'cuda', 'cuda:1'."
    )
    adapter: str | None = Field(
        default=None, description="A trained PEFT adapter to go on training (folder or hub name)."
    )
    reference_adapter: str | None = Field(
        default=None,
        description="With beta above 0: a PEFT adapter that is the reference policy. Default: the model without "
        "adapters, or `adapter` as it came.",
    )
    gguf_file: str | None = Field(default=None, description="Name of a GGUF file inside `path`; it is dequantized.")
    quantization: Literal["nf4"] | None = Field(
        default=None,
        description="'nf4' keeps the base weights in 4 bits through bitsandbytes; needs `lora` or `adapter`.",
    )
    tokenizer: str | None = Field(
        default=None, description="Where the tokenizer is, if not beside the model; 'none' for no tokenizer."
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that ships with the model. Off unless you set it."
    )
    rope_scaling: dict[str, Any] | None = Field(
        default=None,
        description="RoPE override to go beyond the model's positions, e.g. {rope_type: yarn, factor: 4.0}. "
        "Quality beyond the trained range is unproven.",
    )
    max_position_embeddings: int | None = Field(
        default=None,
        ge=1,
        description="Positions to allow with `rope_scaling`; default: the model's own times the factor.",
    )

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.gguf_file and self.quantization:
            raise ValueError(
                "'model.gguf_file' and 'model.quantization' exclude each other: a GGUF file is dequantized on loading. "
                "Remove one of them."
            )
        if self.max_position_embeddings and not self.rope_scaling:
            raise ValueError(
                "'model.max_position_embeddings' without 'model.rope_scaling' would let positions run past what the "
                "model "
                "was trained on unscaled. Set model.rope_scaling, e.g. {rope_type: yarn, factor: 4.0}."
            )
        return self


class LoraConfig(StrictGroup):
    """LoRA adapters through PEFT. No dropout: a recomputed graph must be the same function."""

    r: int = Field(default=16, ge=1, description="Rank of the adapters.")
    alpha: float = Field(default=32, gt=0, description="Scale numerator: the update is scaled by alpha / r.")
    target_modules: str | list[str] = Field(
        default="all-linear",
        description="Module names, a regular expression, or 'all-linear' (every linear layer but the head).",
    )
    exclude_modules: str | list[str] | None = Field(
        default=None, description="Module names or expression to leave out."
    )
    modules_to_save: list[str] | None = Field(default=None, description="Modules trained in full beside the adapters.")
    use_rslora: bool = Field(default=False, description="Scale by alpha / sqrt(r) instead of alpha / r.")


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
