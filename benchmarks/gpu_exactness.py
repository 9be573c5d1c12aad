"""Gradients of small models of every family on one device: against stock transformers, over tiers, and run to run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV32Config,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
    YoutuConfig,
)

import longstraw
from benchmarks.gate import relative_distance
from benchmarks.workload import token_logps
from longstraw.attention import indexer, sparse_reference
from longstraw.pages import PageStore
from longstraw.pages.prefix import Prefix

VOCAB = 512
DENSE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Every expert is taken: which of two near-ties a router picks is a matter of rounding, and would be all that shows.
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts_per_tok": 8}
DELTA: dict[str, Any] = {
    **DENSE,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
DELTA_EXPERTS = DELTA | EXPERTS | {"num_experts": 8, "shared_expert_intermediate_size": 64}
LATENT: dict[str, Any] = {
    **DENSE,
    **EXPERTS,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
}
SPARSE = LATENT | {"index_topk": 1024, "index_head_dim": 32, "index_n_heads": 8}  # all tokens: see `choices_agree`
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**DENSE),
    "qwen2": lambda: Qwen2Config(**DENSE),
    "qwen3": lambda: Qwen3Config(**DENSE, head_dim=32),
    "mistral": lambda: MistralConfig(**DENSE, head_dim=32, sliding_window=50),
    "qwen3_5": lambda: Qwen3_5TextConfig(**DELTA),
    "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(**DELTA_EXPERTS),
    "qwen3_next": lambda: Qwen3NextConfig(**DELTA_EXPERTS),
    "glm_moe_dsa": lambda: GlmMoeDsaConfig(**SPARSE, head_dim=16, indexer_types=["full", "shared", "full"]),
    "deepseek_v32": lambda: DeepseekV32Config(**SPARSE),
    "deepseek_v3": lambda: DeepseekV3Config(**LATENT),
    "glm4_moe_lite": lambda: Glm4MoeLiteConfig(**LATENT),
    "youtu": lambda: YoutuConfig(**LATENT),
}
FLOAT32_ALLOWED = 2e-4  # TF32 is off; kernels sum in other orders
BFLOAT16_ALLOWED = 1.5  # times the error of stock bfloat16 training
PIECES: dict[str, Any] = {"segment_tokens": 48, "block_tokens": 8}

Gradients = dict[str, torch.Tensor]


def exactness(name: str, device: str) -> dict[str, Any]:
    """Gradient errors of one family, and whether a bfloat16 step has the same bits again and on other tiers.

    float32 against stock float32; bfloat16, and stock bfloat16, against stock float32.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[name](), attn_implementation="eager").to(device, torch.float32)
    model.eval()
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            torch.nn.init.normal_(module.weight, std=0.3)  # zero at birth: every expert would weigh the same
    generator = torch.Generator().manual_seed(1)
    prompt, *responses = (torch.randint(0, VOCAB, (n,), generator=generator) for n in (203, 1, 17, 30))
    exact = _conventional(model, prompt, responses)
    ours = _ours(model, prompt, responses)
    model.to(torch.bfloat16)
    stock16, ours16 = _conventional(model, prompt, responses), _ours(model, prompt, responses)
    again = [_ours(model, prompt, responses, tier) for tier in ("device", "host", "disk")]
    row = {
        "family": name,
        "float32": relative_distance(ours, exact),
        "bfloat16": relative_distance(ours16, exact),
        "stock_bfloat16": relative_distance(stock16, exact),
        "same_bits": all(torch.equal(ours16[key], other[key]) for other in again for key in ours16),
    }
    row["passed"] = (
        row["float32"] <= FLOAT32_ALLOWED
        and row["bfloat16"] <= BFLOAT16_ALLOWED * row["stock_bfloat16"]
        and row["same_bits"]
    )
    return row


def choices_agree(device: str, num_before: int = 9000, num_live: int = 5000, num: int = 512) -> bool:
    """Whether sparse attention's choice of tokens is a plain sort's, on scores that no order of summation rounds.

    Small integers: most scores are tied, so this also holds the order of ties.
    """
    generator = torch.Generator().manual_seed(3)
    num_queries, num_heads, size = 24, 8, 32

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    q, w, k = draw(1, num_queries, num_heads, size), draw(1, num_queries, num_heads), draw(num_before + num_live, size)
    expected = sparse_reference.choose(sparse_reference.scores(q[0], w[0], k), num)
    store = PageStore(device)
    cuts = [*range(0, num_before, 2048), num_before]
    pages = [store.put("index", a, (k[None, a:b].to(device),)) for a, b in pairwise(cuts)]
    q, w, live = (x.to(device) for x in (q, w, k[None, num_before:]))
    found = indexer.choose(q, w, live, Prefix(store, pages), num)
    store.close()
    return found[0].tolist() == expected


def _objective(logps: list[torch.Tensor]) -> torch.Tensor:
    weights = (0.9, -1.3, 0.6)
    return -sum((w * lp.mean() for w, lp in zip(weights, logps)), start=torch.zeros((), device=logps[0].device))


def _conventional(model: Any, prompt: torch.Tensor, responses: list[torch.Tensor]) -> Gradients:
    device = next(model.parameters()).device
    model.zero_grad(set_to_none=True)
    logps = []
    for response in responses:
        ids = torch.cat([prompt, response])[None].to(device)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0, prompt.numel() - 1 :].float()
        logps.append(token_logps(logits, ids[0, prompt.numel() :]))
    _objective(logps).backward()
    return _gradients(model)


def _ours(model: Any, prompt: torch.Tensor, responses: list[torch.Tensor], tier: str = "device") -> Gradients:
    model.zero_grad(set_to_none=True)
    engine = longstraw.Engine(model, tier=tier, **PIECES)
    with engine.capture(prompt) as state:
        engine.backward(state, responses, _objective)
    return _gradients(model)


def _gradients(model: Any) -> Gradients:
    return {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}
