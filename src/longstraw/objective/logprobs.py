"""Token log-probabilities and their gradient in chunks of tokens: no [R, vocab] tensor, forward or backward.

Shapes: N tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from longstraw.precision import wide_dtype

Head = Callable[[torch.Tensor], torch.Tensor]


def tokens_a_chunk(vocab_size: int, nbytes: int) -> int:
    """How many tokens' logits, in float32, fit into `nbytes`; at least one."""
    return max(1, nbytes // (4 * vocab_size))


def token_logps(logits_NV: torch.Tensor, targets_N: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """log softmax(logits / temperature)[target], [N], differentiable.

    Computed in float32, or float64 for float64 logits.
    """
    return _TokenLogps.apply(logits_NV, targets_N, temperature)


class _TokenLogps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
        scaled = _scaled(logits, temperature)
        lse = scaled.logsumexp(-1)
        picked = scaled.gather(-1, targets[:, None])[:, 0]
        ctx.save_for_backward(logits, targets, lse)
        ctx.temperature = temperature
        return picked - lse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        logits, targets, lse = ctx.saved_tensors
        grad = grads[0] / ctx.temperature
        result = logits.to(lse.dtype, copy=True)
        result.div_(ctx.temperature).sub_(lse[:, None]).exp_().mul_(-grad[:, None])
        result.scatter_add_(1, targets[:, None], grad[:, None])
        return result.to(logits.dtype), None, None


@torch.no_grad()
def entropies(logits_NV: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Entropy −Σ p · log p of softmax(logits / temperature), [N] in nats; float32, or float64 for float64 logits.

    A token of logit −inf contributes 0.
    """
    logp_NV = _scaled(logits_NV, temperature).log_softmax(-1)
    return -logp_NV.mul_(logp_NV.exp()).nan_to_num_(nan=0.0).sum(-1)


@torch.no_grad()
def score(
    head: Head, hidden_NE: torch.Tensor, targets_N: torch.Tensor, temperature: float, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [N] of the targets, and the entropies [N] of the distributions they are from; no graph."""
    logps, spreads = [], []
    for hidden, targets in zip(hidden_NE.split(chunk), targets_N.split(chunk)):
        logits = head(hidden)
        logps.append(token_logps(logits, targets, temperature))
        spreads.append(entropies(logits, temperature))
    return torch.cat(logps), torch.cat(spreads)


def hidden_gradient(
    head: Head,
    hidden_NE: torch.Tensor,
    targets_N: torch.Tensor,
    cotangents_N: torch.Tensor,
    temperature: float,
    chunk: int,
) -> torch.Tensor:
    """Gradient with respect to the hidden states, [N, E]; the head's parameters collect theirs.

    Args:
        cotangents_N: the gradient of the loss with respect to each target's log-probability.
    """
    gradient = torch.zeros_like(hidden_NE, requires_grad=False)
    with torch.enable_grad():
        for first in range(0, hidden_NE.shape[0], chunk):
            part = slice(first, first + chunk)
            if not cotangents_N[part].any():
                continue
            hidden = hidden_NE[part].detach().requires_grad_()
            logps = token_logps(head(hidden), targets_N[part], temperature)
            logps.backward(cotangents_N[part].to(logps.dtype))
            if hidden.grad is not None:
                gradient[part] = hidden.grad
    return gradient


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    wide = logits.to(wide_dtype(logits.dtype))
    return wide if temperature == 1.0 else wide / temperature
