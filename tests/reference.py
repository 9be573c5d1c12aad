"""Conventional training in a few lines: one stock forward pass over prompt and response, one full autograd graph.

Nothing here touches longstraw. To treat the state before token `c` as a constant, the whole sequence still runs in one
pass, and what tokens before `c` leave for later ones is detached where the model computes it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

_LEFT_BEHIND = ("k_proj", "k_norm", "v_proj", "in_proj_qkv", "in_proj_qkvz", "kv_a_proj_with_mqa", "kv_a_layernorm")
_LEFT_BEHIND += (
    "q_proj",
    "qkv_proj",
    "k_layernorm",
    "in_proj",
)  # a convolution reads them, or nothing but the token itself does


def response_logps(
    model: Any, prompt: torch.Tensor, response: torch.Tensor, constant: int = 0, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probabilities [R] of `response` after `prompt`; what the first `constant` tokens left is a constant."""
    ids = torch.cat([prompt, response])[None]
    with _detached_before(model, constant):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0, prompt.numel() - 1 :]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return (wide / temperature).log_softmax(-1).gather(-1, response[:, None])[:, 0]


def constant_tokens(prompt_grad: str | int, num_prompt: int) -> int:
    """How many of the prompt's tokens are constants to a `prompt_grad` mode; the last one belongs to the response."""
    if isinstance(prompt_grad, int):
        return max(0, num_prompt - prompt_grad)
    return 0 if prompt_grad == "full" else num_prompt - 1


def step(
    model: Any,
    prompt: torch.Tensor,
    responses: Sequence[torch.Tensor],
    objective: Callable[[list[torch.Tensor]], torch.Tensor],
    prompt_grad: str | int = "full",
    temperature: float = 1.0,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """(loss, log-probabilities, gradients by parameter name) of one conventional step, from empty gradients."""
    model.zero_grad(set_to_none=True)
    constant = constant_tokens(prompt_grad, prompt.numel())
    logps = [
        response_logps(model, prompt, r, constant, temperature) if r.numel() else r.new_zeros(0, dtype=torch.float32)
        for r in responses
    ]
    loss = objective(logps)
    loss.backward()
    found = gradients(model)
    model.zero_grad(set_to_none=True)
    return loss.detach(), [x.detach() for x in logps], found


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float, what: str = ""
) -> None:
    """Relative L2 error over all parameters within tolerance, and none off by itself; names the worst parameter."""
    assert expected, "the reference has no gradient: the test would compare nothing"
    norm = torch.stack([g.double().norm() for g in expected.values()]).norm()
    assert norm > 0, "the reference gradient is zero: the test would compare nothing"
    errors = {}
    for name in sorted(set(found) | set(expected)):
        have, want = found.get(name), expected.get(name)
        have = torch.zeros_like(want) if have is None else have
        want = torch.zeros_like(have) if want is None else want
        assert have.dtype == want.dtype, f"{name}: dtype {have.dtype}, expected {want.dtype}"
        errors[name] = (have.double() - want.double()).norm() / norm
        assert torch.isfinite(have).all(), f"{what}: {name} is not finite"
    total = torch.stack(list(errors.values())).norm()
    worst = max(errors, key=lambda name: errors[name])
    assert total <= tolerance, (
        f"{what}: relative L2 {total:.1e} > {tolerance:.0e}, most in {worst} ({errors[worst]:.1e})"
    )


def relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Relative L2 error over all parameters of the expected gradient; one that is missing counts as zero."""
    gaps = [(found[n].double() if n in found else 0) - g.double() for n, g in expected.items()]
    norms = [torch.stack([g.norm() for g in side]).norm() for side in (gaps, [g.double() for g in expected.values()])]
    return float(norms[0] / norms[1])


@contextmanager
def _detached_before(model: Any, constant: int) -> Iterator[None]:
    if not constant:
        yield
        return

    def cut(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        tokens = 1 if output.shape[1] > constant else 2  # Gemma 3 has its heads before them
        early, late = output.split([constant, output.shape[tokens] - constant], tokens)
        return torch.cat([early.detach(), late], tokens)

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name.rsplit(".", 1)[-1] in _LEFT_BEHIND:
                stack.callback(module.register_forward_hook(cut).remove)
        for source in {type(m).__module__ for m in model.modules()}:
            for name, split in _SPLIT.items():
                rule = getattr(sys.modules[source], name, None)
                if rule is not None:
                    stack.enter_context(mock.patch.object(sys.modules[source], name, split(rule, constant)))
        yield


def _split_recurrence(rule: Any, constant: int) -> Any:
    """The recurrence in two runs: over the constant tokens without a graph, then from their state on."""

    def split(q: Any, k: Any, v: Any, *, g: Any, beta: Any, initial_state: Any, **options: Any) -> Any:
        assert initial_state is None
        early, late = ([x[:, part] for x in (q, k, v, g, beta)] for part in (slice(constant), slice(constant, None)))
        with torch.no_grad():
            q_, k_, v_, g_, beta_ = early
            out, state = rule(
                q_, k_, v_, g=g_, beta=beta_, initial_state=None, **{**options, "output_final_state": True}
            )
        q_, k_, v_, g_, beta_ = late
        rest, state = rule(q_, k_, v_, g=g_, beta=beta_, initial_state=state, **options)
        return torch.cat([out, rest], 1), state

    return split


def _split_mamba2(rule: Any, constant: int) -> Any:
    """As `_split_recurrence`, for Mamba-2."""

    def split(x: Any, dt: Any, a: Any, b: Any, c: Any, *, initial_states: Any, **options: Any) -> Any:
        assert initial_states is None and not options.pop("return_final_states")
        early, late = ([t[:, part] for t in (x, dt, b, c)] for part in (slice(constant), slice(constant, None)))
        with torch.no_grad():
            x_, dt_, b_, c_ = early
            out, state = rule(x_, dt_, a, b_, c_, return_final_states=True, **options)
        x_, dt_, b_, c_ = late
        return torch.cat([out, rule(x_, dt_, a, b_, c_, initial_states=state, **options)], 1)

    return split


_SPLIT = {
    "torch_chunk_gated_delta_rule": _split_recurrence,
    "chunk_kimi_delta_attention": _split_recurrence,
    "mamba2_chunk_scan": _split_mamba2,
}
