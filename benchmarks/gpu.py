"""What an hour of GPU time is for, in under eight minutes: exactness through the CUDA kernels, then capacity and speed.

    python -m benchmarks.gpu [--out gpu.json] [--minutes 8] [--device cuda]

First the gradients of small models of every family, in float32 and bfloat16, against stock transformers on the same
device; where one is off, no speed follows and the exit code is 1. Then a random model of Qwen2.5-7B's shape with LoRA
at growing prompts: seconds, peak memory by phase, and the share of the card's own matmul rate. Without a GPU
(`--device cpu`) the first part runs as it is and the second on a toy.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peft import LoraConfig, get_peft_model
from rich.console import Console
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GlmMoeDsaConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)

import longstraw
from benchmarks import receipt

VOCAB = 512
DENSE = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**DENSE),
    "qwen2": lambda: Qwen2Config(**DENSE),
    "qwen3": lambda: Qwen3Config(**DENSE, head_dim=32),
    "mistral": lambda: MistralConfig(**DENSE, head_dim=32, sliding_window=50),
    "qwen3_5": lambda: Qwen3_5TextConfig(
        **{**DENSE, "num_hidden_layers": 4},
        head_dim=32,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
    "glm_moe_dsa": lambda: GlmMoeDsaConfig(
        **{**DENSE, "num_key_value_heads": 4},
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        kv_lora_rank=32,
        q_lora_rank=48,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=32,
        head_dim=16,
        index_topk=1024,  # all tokens: which of two near-ties is chosen is no matter of rounding here
        index_head_dim=32,
        index_n_heads=8,
        first_k_dense_replace=1,
        indexer_types=["full", "shared", "full"],
    ),
}
FLOAT32_ALLOWED = 2e-4  # TF32 is off; kernels sum in other orders
BFLOAT16_ALLOWED = 1.5  # times the error of stock bfloat16 training


def main(
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda" if torch.cuda.is_available() else "cpu",
    minutes: Annotated[float, typer.Option(help="Start no further point after so long.")] = 8.0,
    out: Annotated[Path | None, typer.Option(help="Write one JSON here.")] = None,
) -> None:
    """Exactness on every family, then capacity and time of a 7B shape."""
    begin = time.perf_counter()
    console = Console()
    report: dict[str, Any] = {"benchmark": "gpu", "device": _device_name(device), **receipt.provenance()}
    report["exactness"] = []
    for name in FAMILIES:
        row = exactness(name, device)
        report["exactness"].append(row)
        console.print(json.dumps(row))
        _write(out, report)
    if not all(row["passed"] for row in report["exactness"]):
        console.print("A gradient is wrong: no speed is shown.", style="bold red")
        raise typer.Exit(1)
    rate = matmul_rate(device)
    report["matmul_flops"] = rate
    report["points"] = []
    for row in capacity(device, rate, lambda: time.perf_counter() - begin < 60 * minutes):
        report["points"].append(row)
        console.print(json.dumps(row))
        _write(out, report)
    report["seconds"] = time.perf_counter() - begin
    _write(out, report)


def exactness(name: str, device: str) -> dict[str, Any]:
    """Gradient errors of one family: float32 against stock float32; bfloat16, and stock bfloat16, against float32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[name](), attn_implementation="eager").to(device, torch.float32)
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            torch.nn.init.normal_(module.weight, std=0.3)  # zero at birth: every expert would tie
    generator = torch.Generator().manual_seed(1)
    prompt, *responses = (torch.randint(0, VOCAB, (n,), generator=generator) for n in (203, 1, 17, 30))
    exact = _conventional(model, prompt, responses)
    ours = _ours(model, prompt, responses)
    model.to(torch.bfloat16)
    stock16, ours16 = _conventional(model, prompt, responses), _ours(model, prompt, responses)
    row = {
        "family": name,
        "float32": _error(ours, exact),
        "bfloat16": _error(ours16, exact),
        "stock_bfloat16": _error(stock16, exact),
    }
    row["passed"] = row["float32"] <= FLOAT32_ALLOWED and row["bfloat16"] <= BFLOAT16_ALLOWED * row["stock_bfloat16"]
    return row


def matmul_rate(device: str) -> float:
    """bfloat16 matmul FLOP/s, the best of a few."""
    size = 8192 if device != "cpu" else 512
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        _sync(device)
        start = time.perf_counter()
        for _ in range(10):
            a @ b
        _sync(device)
        best = min(best, (time.perf_counter() - start) / 10)
    return 2 * size**3 / best


def capacity(device: str, rate: float, time_left: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """One step (capture, score, replay, sweep) of the 7B shape at growing prompts, both modes and tiers."""
    on_gpu = device != "cpu"
    shape = AutoConfig.for_model(
        "qwen2",
        vocab_size=152064 if on_gpu else VOCAB,
        hidden_size=3584 if on_gpu else 64,
        intermediate_size=18944 if on_gpu else 96,
        num_hidden_layers=28 if on_gpu else 2,
        num_attention_heads=28 if on_gpu else 4,
        num_key_value_heads=4 if on_gpu else 2,
        max_position_embeddings=1 << 20,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets)).eval()
    group, response = 4, 512 if on_gpu else 8
    for prompt in (65536, 131072, 262144) if on_gpu else (256, 512):
        for mode in ("none", "full"):
            for tier in ("device", "host"):
                if not time_left():
                    return
                yield _point(model, device, rate, prompt, group, response, mode, tier)


def _point(
    model: Any, device: str, rate: float, prompt: int, group: int, response: int, mode: str, tier: str
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    vocab = model.config.vocab_size
    ids = torch.randint(0, vocab, (prompt,), generator=generator)
    responses = [torch.randint(0, vocab, (response,), generator=generator) for _ in range(group)]
    row: dict[str, Any] = {"prompt": prompt, "group": group, "response": response, "prompt_grad": mode, "tier": tier}
    engine = longstraw.Engine(
        model, mode, segment_tokens=4096 if device != "cpu" else 64, tier=tier, checkpoint_layers=mode == "full"
    )
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    try:
        with engine.capture(ids) as state:
            capture = engine.meter.phases["capture"]
            row["state_bytes"] = state.nbytes
            outcome = engine.backward(state, responses, lambda logps: -sum(i * lp.mean() for i, lp in enumerate(logps)))
    except torch.cuda.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        return {**row, "out_of_memory": str(error).splitlines()[0]}
    row["seconds"] = time.perf_counter() - start
    phases = {"capture": capture, **outcome.phases}
    row["phases"] = {name: vars(phase) for name, phase in phases.items()}
    passes = 1 if mode == "none" else 4 + 1  # checkpointed layers are computed once more
    row["matmul_share"] = passes * _forward_flops(model, prompt) / row["seconds"] / rate
    return row


def _forward_flops(model: Any, prompt: int) -> float:
    """Multiplications and additions of one causal forward pass over the prompt, the head left out."""
    config = model.config
    weights = sum(p.numel() for n, p in model.named_parameters() if "embed" not in n and "lm_head" not in n)
    return 2.0 * weights * prompt + 2.0 * config.num_hidden_layers * config.hidden_size * prompt**2


def _objective(logps: list[torch.Tensor]) -> torch.Tensor:
    weights = (0.9, -1.3, 0.6)
    return -sum((w * lp.mean() for w, lp in zip(weights, logps)), start=torch.zeros((), device=logps[0].device))


def _conventional(model: Any, prompt: torch.Tensor, responses: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    device = next(model.parameters()).device
    model.zero_grad(set_to_none=True)
    logps = []
    for response in responses:
        ids = torch.cat([prompt, response])[None].to(device)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0, prompt.numel() - 1 :].float()
        logps.append(logits.log_softmax(-1).gather(-1, ids[0, prompt.numel() :, None])[:, 0])
    _objective(logps).backward()
    return _gradients(model)


def _ours(model: Any, prompt: torch.Tensor, responses: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    engine = longstraw.Engine(model, segment_tokens=48, block_tokens=8)
    with engine.capture(prompt) as state:
        engine.backward(state, responses, _objective)
    return _gradients(model)


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}


def _error(ours: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    difference = sum(float((ours[name] - exact[name]).square().sum()) for name in exact)
    return (difference / sum(float(g.square().sum()) for g in exact.values())) ** 0.5


def _sync(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device != "cpu" else "cpu"


def _write(out: Path | None, report: dict[str, Any]) -> None:
    if out is not None:
        receipt.write(out, report)


if __name__ == "__main__":
    typer.run(main)
