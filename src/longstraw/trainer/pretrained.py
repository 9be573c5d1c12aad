"""Stored models and tokenizers: by path or hub name, GGUF, NF4, with a RoPE override."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longstraw.config.locate import install_command, missing_folder_hint, resolve_path
from longstraw.config.model import ModelConfig

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


def load_model(path: str, options: ModelConfig, device: torch.device) -> nn.Module:
    """The model at a path or hub name, on `device`. Raises ValueError where it cannot be loaded as asked."""
    from transformers import AutoConfig, AutoModelForCausalLM

    common: dict[str, Any] = {"trust_remote_code": options.trust_remote_code, "revision": options.revision or "main"}
    load: dict[str, Any] = dict(common, dtype=torch_dtype(options.dtype))
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


def load_config(path: str, options: ModelConfig) -> Any:
    """The checkpoint's config, of the class that it was published as."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(
        path, trust_remote_code=options.trust_remote_code, revision=options.revision or "main"
    )


def _require(package: str, option: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"'{option}' needs the package '{package}', which is not installed. Install it: {install_command(package)}"
        )


def _nf4(options: ModelConfig) -> Any:
    from transformers import BitsAndBytesConfig

    compute = torch.bfloat16 if options.dtype == "auto" else torch_dtype(options.dtype)
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
        f"model.rope_scaling lets positions run to {positions:,}, where the model was trained on {trained:,}: quality "
        "beyond is unproven. Evaluate at the lengths you train on.",
        stacklevel=2,
    )


def load_tokenizer(path: str, options: ModelConfig) -> Any | None:
    """The tokenizer beside the model at `path`, or the one that is named; None for a model of token ids."""
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


def torch_dtype(name: str) -> torch.dtype | str:
    """The torch dtype of that name; "auto" as it is."""
    return name if name == "auto" else getattr(torch, name)
