"""One step of a 7B shape at growing prompts on one device: seconds, peak memory by phase, share of its matmul rate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import longstraw

FAMILY = "qwen2"
GROUP, RESPONSE = 4, 512
BACKWARD_ATTENTION = 2.5  # times the forward's matrix products: five for two, the scores being computed once more
HOST_SLOWER = 1.3  # a guess, until the first point on the host tier is there


@dataclass(frozen=True)
class Point:
    """One measurement to be made."""

    prompt: int
    prompt_grad: str
    tier: str


def points(on_gpu: bool) -> list[Point]:
    """The dearest last, so that what no time is left for is the least missed."""
    short, middle, long = (65536, 131072, 262144) if on_gpu else (256, 512, 768)
    order = [(short, "device"), (short, "host"), (middle, "device"), (long, "device"), (middle, "host"), (long, "host")]
    return [Point(prompt, mode, tier) for prompt, tier in order for mode in ("none", "full")]


def matmul_rate(device: str) -> float:
    """bfloat16 matmul FLOP/s, the best of a few."""
    size = 8192 if device != "cpu" else 512
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(10):
            a @ b
        _synchronize(device)
        best = min(best, (time.perf_counter() - start) / 10)
    return 2 * size**3 / best


def capacity(device: str, rate: float, seconds_left: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """A row a point, also for those that would not end in time: they are skipped, with the estimate."""
    on_gpu = device != "cpu"
    model = _model(device)
    _measure(model, device, Point(8192 if on_gpu else 64, "full", "device"))  # kernels are loaded
    pace: dict[tuple[str, str], float] = {}  # seconds an operation
    for point in points(on_gpu):
        operations = _operations(model, point)
        known = pace.get((point.prompt_grad, point.tier))
        on_device = pace.get((point.prompt_grad, "device"), 0.0)
        estimate = operations * (HOST_SLOWER * on_device if known is None else known)
        row: dict[str, Any] = vars(point).copy()
        if estimate > seconds_left():
            yield {**row, "skipped": f"about {estimate:.0f} s, with {max(0.0, seconds_left()):.0f} s left"}
            continue
        try:
            row |= _measure(model, device, point)
        except torch.cuda.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            yield {**row, "out_of_memory": str(error).splitlines()[0]}
            continue
        pace[point.prompt_grad, point.tier] = row["seconds"] / operations
        yield {**row, "matmul_share": operations / row["seconds"] / rate}


def _model(device: str) -> Any:
    on_gpu = device != "cpu"
    shape = AutoConfig.for_model(
        FAMILY,
        vocab_size=152064 if on_gpu else 512,
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
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets)).eval()


def _measure(model: Any, device: str, point: Point) -> dict[str, Any]:
    """Fields of a row. On the host tier they include page-locking the memory, which a training run pays once."""
    on_gpu = device != "cpu"
    generator = torch.Generator().manual_seed(2)
    vocab = model.config.vocab_size
    ids = torch.randint(0, vocab, (point.prompt,), generator=generator)
    response = RESPONSE if on_gpu else 8
    responses = [torch.randint(0, vocab, (response,), generator=generator) for _ in range(GROUP)]
    segment_tokens = 4096 if on_gpu else 64
    engine = longstraw.Engine(model, point.prompt_grad, segment_tokens=segment_tokens, tier=point.tier)
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    with engine.capture(ids) as state:
        capture = engine.meter.phases["capture"]
        state_bytes = state.nbytes
        outcome = engine.backward(state, responses, lambda logps: -sum(i * lp.mean() for i, lp in enumerate(logps)))
    phases = {"capture": capture, **outcome.phases}
    return {
        "group": GROUP,
        "response": response,
        "segment_tokens": segment_tokens,
        "state_bytes": state_bytes,
        "seconds": time.perf_counter() - start,
        "phases": {name: vars(phase) for name, phase in phases.items()},
    }


def _operations(model: Any, point: Point) -> float:
    """Multiplications and additions of prompt and responses; head and adapters are small and left out.

    The last layer of a segment stops at its keys and values, in every pass. Frozen weights get no gradient, so the
    linear layers' backward is one product for the forward's one. Responses are scored, run again and pulled back.
    """
    config = model.config
    weights = sum(p.numel() for n, p in model.named_parameters() if ".layers." in n and "lora" not in n)
    width = config.num_hidden_layers * config.hidden_size
    answered = GROUP * RESPONSE
    responses = 3 * 2.0 * weights * answered + (2 + BACKWARD_ATTENTION) * 4.0 * width * point.prompt * answered
    done = (config.num_hidden_layers - 1) / config.num_hidden_layers
    linear, attention = done * 2.0 * weights * point.prompt, done * 2.0 * width * point.prompt**2
    if point.prompt_grad == "none":
        return linear + attention + responses
    return 3 * linear + (2 + BACKWARD_ATTENTION) * attention + responses


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
