"""The options of the trained model, its adapters included."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from longstraw.config.strict import StrictGroup


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
        default="float32", description="Parameter dtype; 'auto' keeps the one that the weights are stored in."
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
                "model was trained on unscaled. Set model.rope_scaling, e.g. {rope_type: yarn, factor: 4.0}."
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
