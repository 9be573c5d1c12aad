"""Rollouts: branches decoded side by side from a captured prompt whose pages they share.

Shapes: B branches still running, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

import torch

from longstraw.engine import run
from longstraw.engine.host import ModelHost
from longstraw.engine.piece import Piece
from longstraw.objective import logprobs
from longstraw.precision import wide_dtype
from longstraw.state.chain import select_rows
from longstraw.state.resident import ResidentState


@dataclass
class Draft:
    """One sampled response.

    Attributes:
        ids: [R] int64 on the CPU, the stop token included.
        logps: [R] log-probabilities under the policy at the sampling temperature, before top-p and top-k cut it.
        finish_reason: "stop" at a stop token, "length" at `max_new_tokens`.
    """

    ids: torch.Tensor
    logps: torch.Tensor
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; `temperature` 0 takes the likeliest (its log-probability is then the one at 1)."""

    num: int
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_ids: Collection[int] = ()

    def __post_init__(self) -> None:
        for name, value, good, wanted in (
            ("num", self.num, _whole(self.num) and self.num >= 1, "a whole number, at least 1"),
            (
                "max_new_tokens",
                self.max_new_tokens,
                _whole(self.max_new_tokens) and self.max_new_tokens >= 1,
                "a whole number, at least 1",
            ),
            ("temperature", self.temperature, self.temperature >= 0, "0 (greedy) or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k, _whole(self.top_k) and self.top_k >= 0, "a whole number, 0 (off) or more"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 (off) to 1"),
            ("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "positive; 1 is off"),
        ):
            if not good:
                raise ValueError(f"{name}={value!r} has to be {wanted}")


@torch.no_grad()
def sample(
    host: ModelHost,
    state: ResidentState,
    how: Sampling,
    on_token: Callable[[int, int], None] | None = None,
) -> list[Draft]:
    """Draws `how.num` responses. Same seed, same model, same state: same drafts.

    Args:
        on_token: called after every step with (tokens decoded, `max_new_tokens`).
    """
    generator = torch.Generator().manual_seed(how.seed)
    device = host.device
    ids: list[list[int]] = [[] for _ in range(how.num)]
    logps: list[list[float]] = [[] for _ in range(how.num)]
    stopped = [False] * how.num
    running = torch.arange(how.num)
    cache = state.chain.decoder(how.num)
    inputs_B1 = state.prompt_ids[-1:].to(device).expand(how.num, 1)
    seen_BV = _seen(state, how, host.vocab_size, device)
    stop_ids = torch.tensor(sorted(how.stop_ids), dtype=torch.long)
    for step in range(how.max_new_tokens):
        logits_BV = run.decode(host, cache, Piece(inputs_B1, state.chain.stop + step))
        if logits_BV.isnan().any():
            raise FloatingPointError(
                f"logits at token {step} of a response to the prompt of {len(state)} tokens are not numbers: "
                "its weights have diverged, or its dtype is too narrow"
            )
        uniforms = torch.rand(how.num, generator=generator, dtype=torch.float64)  # a column a step, whoever still runs
        picked_B = draw(logits_BV, uniforms[running].to(device), how, seen_BV)
        logps_B = logprobs.token_logps(logits_BV, picked_B, how.temperature or 1.0).cpu()
        if seen_BV is not None:
            seen_BV.scatter_(1, picked_B[:, None], True)
        picked = picked_B.cpu()
        for row, member in enumerate(running.tolist()):
            ids[member].append(int(picked[row]))
            logps[member].append(float(logps_B[row]))
        if on_token is not None:
            on_token(step + 1, how.max_new_tokens)
        ends = torch.isin(picked, stop_ids)
        if ends.any():
            for member in running[ends].tolist():
                stopped[member] = True
            running, keep = running[~ends], (~ends).nonzero()[:, 0].to(device)
            if not len(running):
                break
            select_rows(cache, keep)
            picked_B = picked_B[keep]
            seen_BV = seen_BV[keep] if seen_BV is not None else None
        inputs_B1 = picked_B[:, None]
    wide = wide_dtype(next(host.head.parameters()).dtype)
    return [
        Draft(torch.tensor(i, dtype=torch.long), torch.tensor(p, dtype=wide), "stop" if s else "length")
        for i, p, s in zip(ids, logps, stopped)
    ]


def draw(
    logits_BV: torch.Tensor, uniforms_B: torch.Tensor, how: Sampling, seen_BV: torch.Tensor | None = None
) -> torch.Tensor:
    """One token a row, [B], by inverting the cumulative distribution at the given uniform numbers.

    Order of the cuts, as in transformers: repetition penalty, temperature, top-k, top-p, min-p.

    Args:
        seen_BV: tokens that the repetition penalty applies to.
    """
    logits = logits_BV.double()
    if seen_BV is not None:
        punished = torch.where(logits > 0, logits / how.repetition_penalty, logits * how.repetition_penalty)
        logits = torch.where(seen_BV, punished, logits)
    if how.temperature == 0:
        return logits.argmax(-1)
    logits = logits / how.temperature
    if 0 < how.top_k < logits.shape[-1]:
        least = logits.topk(how.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if how.top_p < 1:
        ordered, places = logits.sort(stable=True, dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        cut = probabilities.cumsum(-1) - probabilities >= how.top_p  # the likeliest always stays
        logits = logits.masked_fill(torch.zeros_like(cut).scatter(1, places, cut), float("-inf"))
    if how.min_p > 0:
        probabilities = logits.softmax(-1)
        least = probabilities.amax(-1, keepdim=True) * how.min_p
        logits = logits.masked_fill(probabilities < least, float("-inf"))
    cumulative = logits.softmax(-1).cumsum(-1)
    target = uniforms_B[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)


def default_stops(host: ModelHost) -> tuple[int, ...]:
    """The model's end-of-sequence ids; none where it names none."""
    found = getattr(getattr(host.model, "generation_config", None), "eos_token_id", None)
    found = getattr(host.config, "eos_token_id", None) if found is None else found
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _seen(state: ResidentState, how: Sampling, vocab_size: int, device: torch.device) -> torch.Tensor | None:
    if how.repetition_penalty == 1:
        return None
    seen = torch.zeros(how.num, vocab_size, dtype=torch.bool, device=device)
    seen[:, state.prompt_ids.to(device)] = True
    return seen
