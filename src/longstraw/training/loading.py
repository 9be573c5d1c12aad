"""The policy as people have it: by path or name, LoRA, a trained adapter, NF4, GGUF, a RoPE override."""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longstraw.training.adapters import add_lora, add_reference_adapter, load_adapter
from longstraw.training.config import TrainConfig
from longstraw.training.config_parts import ModelConfig
from longstraw.training.locate import (
    install_command,
    is_function_reference,
    load_function,
    missing_folder_hint,
    resolve_path,
)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


@dataclass
class Policy:
    """A loaded model and what belongs to it.

    Attributes:
        model: on its device, in eval mode; a PeftModel where adapters are trained.
        tokenizer: None for a model that is given token ids.
        stop_ids: ids that end a response.
        device: where the model is.
    """

    model: Any
    tokenizer: Any | None
    stop_ids: list[int]
    device: torch.device

    @property
    def is_peft(self) -> bool:
        return hasattr(self.model, "peft_config")

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def max_positions(self) -> int | None:
        """Positions the model has, None where its config names no limit."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters with requires_grad by name; tied ones once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def load_policy(config: TrainConfig) -> Policy:
    """Load model and tokenizer as the configuration says.

    Raises:
        ValueError: something named in the configuration is missing or does not fit; nothing to train. The message names
            the option and the remedy.
    """
    options = config.model
    device = _device(options.device)
    torch.manual_seed(config.seed)  # adapters and models from functions may be random at birth
    if is_function_reference(options.path):
        model, tokenizer = _from_function(options)
        model = model.to(device)
    else:
        path = resolve_path(options.path, "model.path")
        model = _from_pretrained(path, options, device)
        tokenizer = _load_tokenizer(path, options)
    if options.adapter:
        model = load_adapter(model, resolve_path(options.adapter, "model.adapter"))
    elif config.lora:
        model = add_lora(model, config.lora)
    reference = options.reference_adapter or (options.adapter if config.beta > 0 else None)
    if reference:
        add_reference_adapter(model, resolve_path(reference, "model.reference_adapter"))
    model.eval()
    _check_trainable(model, options)
    return Policy(model, tokenizer, _stop_ids(model, tokenizer, config.stop_token_ids), device)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"'model.device' is '{name}'; use auto, cpu, cuda or cuda:N.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("'model.device' is cuda, but PyTorch finds no CUDA device. Set model.device to auto or cpu.")
    return device


def _dtype(name: str) -> torch.dtype | str:
    return name if name == "auto" else getattr(torch, name)


def _from_function(options: ModelConfig) -> tuple[nn.Module, Any | None]:
    for option in ("gguf_file", "quantization", "rope_scaling", "revision"):
        if getattr(options, option):
            raise ValueError(
                f"'model.{option}' applies to loading a checkpoint, but model.path is a function. Remove it."
            )
    function = load_function(options.path, "model.path")
    try:
        made = function(**options.args)
    except TypeError as error:
        raise ValueError(f"'model.path': calling {options.path} with {options.args} failed: {error}") from error
    model, tokenizer = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"'model.path': {options.path} returned {type(model).__name__}; a model or (model, tokenizer) is needed."
        )
    if options.dtype != "auto":
        model = model.to(_dtype(options.dtype))
    if options.tokenizer and options.tokenizer != "none":
        tokenizer = _load_tokenizer("", options)
    return model, tokenizer


def _from_pretrained(path: str, options: ModelConfig, device: torch.device) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    common: dict[str, Any] = {"trust_remote_code": options.trust_remote_code, "revision": options.revision or "main"}
    load: dict[str, Any] = dict(common, dtype=_dtype(options.dtype))
    if options.gguf_file:
        _require("gguf", "model.gguf_file")
        from transformers import GgufConfig

        common["gguf_file"] = load["gguf_file"] = options.gguf_file
        load["quantization_config"] = GgufConfig(dequantize=True)
    else:
        load["use_safetensors"] = True
    if options.quantization == "nf4":
        _require("bitsandbytes", "model.quantization")
        load |= {"quantization_config": _nf4(options), "device_map": {"": str(device)}}
    try:
        if options.rope_scaling:
            model_config = AutoConfig.from_pretrained(path, **common)
            _override_rope(model_config, options)
            load["config"] = model_config
        model = AutoModelForCausalLM.from_pretrained(path, **load)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"'model.path': {options.path} cannot be loaded: {error}{missing_folder_hint(options.path)}"
        ) from error
    if options.quantization:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for module in model.modules():
            # In eval mode on CPUs with AVX512-BF16 the library repacks 4-bit weights for a kernel without a backward:
            # every gradient through the layer is lost without an error.
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
        return model
    return model.to(device)


def _require(package: str, option: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"'{option}' needs the package '{package}', which is not installed. Install it: {install_command(package)}"
        )


def _nf4(options: ModelConfig) -> Any:
    from transformers import BitsAndBytesConfig

    compute = torch.bfloat16 if options.dtype == "auto" else _dtype(options.dtype)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
    )


def _override_rope(model_config: Any, options: ModelConfig) -> None:
    assert options.rope_scaling is not None
    text = model_config.get_text_config()
    own = dict(getattr(text, "rope_parameters", None) or {})
    if not own or any(isinstance(value, dict) for value in own.values()):
        raise ValueError(
            "'model.rope_scaling': this model has no single set of RoPE parameters to override. Remove the option."
        )
    override = dict(options.rope_scaling)
    if "type" in override:
        override["rope_type"] = override.pop("type")
    if "rope_type" not in override:
        raise ValueError("'model.rope_scaling' has no rope_type. Write e.g. {rope_type: yarn, factor: 4.0}.")
    trained = own.get("original_max_position_embeddings") or text.max_position_embeddings
    if override["rope_type"] in ("yarn", "longrope", "llama3"):
        override.setdefault("original_max_position_embeddings", trained)
    positions = options.max_position_embeddings or int(trained * float(override.get("factor", 1.0)))
    text.rope_parameters = {**own, **override}
    text.max_position_embeddings = positions
    warnings.warn(
        f"model.rope_scaling lets positions run to {positions:,}, where the model was trained on {trained:,}: "
        "quality beyond is "
        "unproven. Evaluate at the lengths you train on.",
        stacklevel=2,
    )


def _load_tokenizer(path: str, options: ModelConfig) -> Any | None:
    from transformers import AutoTokenizer

    if options.tokenizer == "none":
        return None
    where = resolve_path(options.tokenizer, "model.tokenizer") if options.tokenizer else path
    extra: dict[str, Any] = {"gguf_file": options.gguf_file} if options.gguf_file and not options.tokenizer else {}
    if (
        not options.tokenizer
        and not extra
        and Path(where).is_dir()
        and not any((Path(where) / f).exists() for f in _TOKENIZER_FILES)
    ):
        return None  # a model that is given token ids
    try:
        return AutoTokenizer.from_pretrained(where, trust_remote_code=options.trust_remote_code, **extra)
    except (OSError, ValueError) as error:
        raise ValueError(f"'model.tokenizer': no tokenizer can be loaded from {where}: {error}") from error


def _check_trainable(model: nn.Module, options: ModelConfig) -> None:
    parameters = trainable_parameters(model)
    if not parameters:
        raise ValueError(
            "No parameter of the model requires a gradient, so there is nothing to train. Add a `lora` group, or "
            "load the model "
            "without freezing it."
        )
    low = [name for name, parameter in parameters.items() if parameter.dtype in (torch.float16, torch.bfloat16)]
    if low:
        warnings.warn(
            f"{len(low)} trained tensors are {str(parameters[low[0]].dtype).removeprefix('torch.')}: steps smaller "
            "than their "
            "rounding are lost. Train adapters (`lora`), or set model.dtype to float32.",
            stacklevel=2,
        )


def _stop_ids(model: Any, tokenizer: Any | None, further: list[int]) -> list[int]:
    found: list[int] = []
    for source in (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found += [] if ids is None else ids if isinstance(ids, (list, tuple)) else [ids]
    return sorted({int(token) for token in [*found, *further] if token is not None})
