"""Tiny random models of every family that the engine serves, from stock transformers classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import transformers

VOCAB = 67
POSITIONS = 4096
_DENSE: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=POSITIONS,
    initializer_range=0.15,  # far from a uniform policy, so that a wrong state shows
    bos_token_id=None,
    eos_token_id=None,
)
_SOURCES = ["llama", "qwen2", "qwen3", "mistral", "qwen3_5", "qwen3_5_moe", "qwen3_next"]
_SOURCES += ["glm_moe_dsa", "deepseek_v32", "deepseek_v3", "glm4_moe_lite", "youtu"]
_SOURCES += ["bamba", "granitemoehybrid", "nemotron_h", "kimi_linear", "olmo_hybrid", "lfm2", "lfm2_moe", "falcon_h1"]
_SOURCES += ["ministral3", "olmo3", "phi3", "smollm3", "qwen3_moe", "mixtral", "minimax_m2", "gpt_oss", "granite"]
_SOURCES += ["gemma2", "gemma3", "gemma4"]
_DELTA = dict(
    head_dim=16,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
_LATENT = dict(
    num_key_value_heads=4,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    n_group=2,
    topk_group=1,
    kv_lora_rank=12,
    q_lora_rank=20,
    qk_rope_head_dim=8,
    qk_nope_head_dim=6,
    v_head_dim=10,
    first_k_dense_replace=1,
)
_SPARSE = _LATENT | dict(index_topk=9, index_head_dim=16, index_n_heads=16)  # topk far below the prompt; no ties
_YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=512, mscale_all_dim=1.0)

_MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=2, mamba_chunk_size=16)

_RECIPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", dict(head_dim=16, tie_word_embeddings=True)),
    "mistral": ("MistralConfig", "MistralForCausalLM", dict(sliding_window=13)),
    "qwen3_mixed": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        dict(head_dim=16, use_sliding_window=True, sliding_window=11, max_window_layers=1),
    ),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _DELTA | _EXPERTS),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", _DELTA | _EXPERTS),
    "qwen3_5_image": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", _DELTA),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        _SPARSE | dict(num_hidden_layers=5, indexer_types=["full", "full", "shared", "shared", "full"]),
    ),
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32ForCausalLM", _SPARSE),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", _LATENT | dict(rope_parameters=_YARN)),
    "deepseek_v3_halves": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        _LATENT | dict(rope_interleave=False, q_lora_rank=None),
    ),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", _LATENT),
    "youtu": ("YoutuConfig", "YoutuForCausalLM", _LATENT),
}
_RECURRENT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bamba": ("BambaConfig", "BambaForCausalLM", _MAMBA | dict(attn_layer_indices=[1], time_step_limit=(0.01, 1.5))),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        _MAMBA
        | dict(layer_types=["mamba", "attention", "mamba"], num_local_experts=4, num_experts_per_tok=2)
        | dict(shared_intermediate_size=16, attention_multiplier=0.2, residual_multiplier=0.5),
    ),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        dict(head_dim=8, mamba_num_heads=4, mamba_head_dim=8, ssm_state_size=8, n_groups=2, chunk_size=16)
        | dict(moe_intermediate_size=16, moe_shared_expert_intermediate_size=16, n_routed_experts=4)
        | dict(layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "mlp"]),
    ),
    "falcon_h1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        _MAMBA
        | dict(
            pad_token_id=None,
            mamba_d_ssm=64,
            attention_in_multiplier=0.7,
            attention_out_multiplier=1.2,
            ssm_multipliers=[0.5, 0.7, 0.9, 1.1, 1.3],
        )
        | dict(ssm_in_multiplier=1.1, ssm_out_multiplier=0.8, key_multiplier=0.6, embedding_multiplier=3.0),
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        dict(pad_token_id=None, linear_head_dim=8, linear_num_heads=4, num_local_experts=4, num_experts_per_tok=2)
        | dict(kv_lora_rank=12, qk_rope_head_dim=8, qk_nope_head_dim=6, v_head_dim=10, num_key_value_heads=4)
        | dict(moe_intermediate_size=16, layer_types=["linear_attention", "full_attention", "linear_attention"]),
    ),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", _DELTA | dict(pad_token_id=None)),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", dict(layer_types=["conv", "full_attention", "conv"])),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        dict(layer_types=["conv", "full_attention", "conv"], num_dense_layers=1, moe_intermediate_size=16)
        | dict(num_experts=4, num_experts_per_tok=2),
    ),
}
_ROUTED = dict(num_experts_per_tok=2, moe_intermediate_size=16)
_WINDOWS = dict(
    head_dim=16, sliding_window=11, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
)
_GEMMA_4 = dict(
    head_dim=16,
    global_head_dim=24,
    sliding_window=11,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=VOCAB,
    pad_token_id=0,
    num_hidden_layers=4,
    layer_types=["sliding_attention", "full_attention"] * 2,
    final_logit_softcapping=2.0,
)
_ATTENTION: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ministral3": ("Ministral3Config", "Ministral3ForCausalLM", dict(head_dim=16, sliding_window=13)),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", dict(sliding_window=11)),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", dict(sliding_window=13, pad_token_id=0)),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", dict(no_rope_layers=[1, 0, 1], pad_token_id=None)),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", _ROUTED | dict(head_dim=16, num_experts=4)),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", _ROUTED | dict(num_local_experts=4, sliding_window=13)),
    "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM", _ROUTED | dict(head_dim=16, num_local_experts=4)),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", _ROUTED | _WINDOWS | dict(num_local_experts=4, pad_token_id=0)),
    "granite": (
        "GraniteConfig",
        "GraniteForCausalLM",
        dict(logits_scaling=4.0, attention_multiplier=0.2, embedding_multiplier=3.0, residual_multiplier=0.5),
    ),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        _WINDOWS | dict(attn_logit_softcapping=1.5, final_logit_softcapping=2.0, query_pre_attn_scalar=16),
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", _WINDOWS | dict(query_pre_attn_scalar=16)),
    "gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM", _GEMMA_4),
    "gemma4_shared": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        _GEMMA_4 | dict(num_hidden_layers=6, num_kv_shared_layers=3)
        | dict(layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2),
    ),
    "gemma4_experts": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        _GEMMA_4
        | dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=16)
        | dict(attention_k_eq_v=True, num_global_key_value_heads=1),
    ),
}  # fmt: skip

FAMILIES = list(_RECIPES)
ATTENTION = list(_ATTENTION)
RECURRENT = [*_RECURRENT, "qwen3_5", "qwen3_next"]  # their recurrence runs on a forward of the engine's own
DENSE_AND_HYBRID = FAMILIES[: FAMILIES.index("qwen3_5_image") + 1]
WITH_RECURRENCE = [name for name, recipe in _RECIPES.items() if "linear_key_head_dim" in recipe[2]]


def build(family: str, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A model in evaluation mode. A float64 one is exact to 1e-11 only within `computing_in_float64`."""
    config_name, model_name, extra = (_RECIPES | _RECURRENT | _ATTENTION)[family]
    torch.manual_seed(seed)
    options = deepcopy({**_DENSE, **extra, **changes})  # configs keep the lists that they are given
    if family == "qwen3_5_image":
        vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
        config = transformers.Qwen3_5Config(text_config=options, vision_config=vision, tie_word_embeddings=False)
    else:
        config = getattr(transformers, config_name)(**options)
    model = getattr(transformers, model_name)(config).eval()
    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):  # zero at birth: every expert would tie
            torch.nn.init.normal_(module.weight, std=0.5)
    experts = ("num_experts", "n_routed_experts", "num_local_experts")
    if dtype == torch.float64 and any(hasattr(config, name) for name in experts):
        model.set_experts_implementation("eager")  # the grouped kernel knows no float64
    return model.to(dtype)


def tied(family: str) -> Any:
    """A model whose index keys carry no position and whose few heads often score zero: its first layer ties exactly."""
    model = build(family, index_n_heads=2)
    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            norm = layer.self_attn.indexer.k_norm
            with torch.no_grad():
                norm.weight[: model.config.qk_rope_head_dim] = 0
                norm.bias[: model.config.qk_rope_head_dim] = 0
    return model


@contextmanager
def computing_in_float64() -> Iterator[None]:
    """Stock models compute norms, rotary factors, routers and the recurrence in float32 whatever their dtype; in this
    context they do so in float64, so that a wrong gradient cannot hide behind rounding."""

    class Wide:
        def __getattr__(self, name: str) -> Any:
            return torch.float64 if name in ("float32", "float") else getattr(torch, name)

    sources = {f"transformers.models.{name}.modeling_{name}" for name in _SOURCES}
    with ExitStack() as stack:
        for source in sources:
            stack.enter_context(mock.patch.object(import_module(source), "torch", Wide()))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield
