"""A step on a captured prompt: its scored responses, what an objective says of them, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from longstraw.engine import branches
from longstraw.engine.host import ModelHost
from longstraw.engine.kept import KeptGraphs
from longstraw.engine.meter import Phase
from longstraw.engine.piece import Bundle
from longstraw.engine.run import HeadOptions
from longstraw.precision import wide_dtype
from longstraw.state.resident import ResidentState

Objective = Callable[[list[torch.Tensor]], torch.Tensor]


@dataclass
class Scored:
    """A group's responses, scored under the present parameters and ready to be pulled back once.

    Attributes:
        state: the prompt's.
        logps: log-probabilities, one leaf [R_i] a response, float32 at least; any trainer's loss may be computed from
            them, and their `.grad` then is what `Engine.pull_back` takes.
        entropies: of the distribution that each token is from, in nats, [R_i] each, without a gradient.
        bundles: the responses as they run.
        options: temperature and head chunk that they were scored with.
        kept: what the pullback need not run again.
        parameter_version: of the parameters that they were scored under.
    """

    state: ResidentState
    logps: list[torch.Tensor]
    entropies: list[torch.Tensor]
    bundles: list[Bundle]
    options: HeadOptions
    kept: KeptGraphs
    parameter_version: int
    used: bool = False

    def release(self) -> None:
        """Frees what was kept for the pullback; safe to call again."""
        self.used = True
        self.kept.release()


@dataclass
class Outcome:
    """What `Engine.backward` found.

    Attributes:
        loss: the objective's value, a detached scalar.
        logps: the policy's log-probabilities, one [R_i] tensor a response, detached.
        cotangents: the gradient of the loss with respect to each of them.
        entropies: of the distribution that each token is from, in nats, one [R_i] tensor a response.
        phases: seconds and peak memory of "score", "replay" and "sweep".
        response_side: the part of the added gradient that does not pass through the prompt's state, one entry a
            trainable parameter, in float32 at least; None for a parameter without one. None unless it was asked for.
    """

    loss: torch.Tensor
    logps: list[torch.Tensor]
    cotangents: list[torch.Tensor]
    entropies: list[torch.Tensor]
    phases: dict[str, Phase] = field(default_factory=dict)
    response_side: list[torch.Tensor | None] | None = None


def score(
    host: ModelHost,
    state: ResidentState,
    responses: Sequence[torch.Tensor],
    bundles: Sequence[Bundle],
    options: HeadOptions,
    kept: KeptGraphs | None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probabilities and entropies, one [R_i] tensor a response each; an empty response has an empty one."""
    wide = wide_dtype(next(host.head.parameters()).dtype)
    logps = [torch.zeros(r.numel(), dtype=wide, device=host.device) for r in responses]
    entropies = [torch.zeros_like(logp) for logp in logps]
    for bundle, found in zip(bundles, branches.score(host, state, bundles, options, kept)):
        for into, found_BT in zip((logps, entropies), found):
            for member, values in bundle.rows_of(found_BT):
                into[member] = values.to(wide)
    return logps, entropies


def evaluate(objective: Objective, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The objective's value, a detached scalar, and its gradient with respect to each leaf.

    Raises:
        ValueError: it returned no scalar, or one that depends on none of the leaves.
    """
    with torch.inference_mode(False), torch.enable_grad():  # whatever the caller is under
        loss = objective(leaves)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"objective has to return a scalar tensor, got {found}: sum or average its terms")
        if loss.grad_fn is None and not any(loss is leaf for leaf in leaves):
            raise ValueError(
                "objective returned a value without a gradient: compute it from the log-probabilities it is given, "
                "without .detach(), .item() or torch.no_grad()"
            )
        gradients = torch.autograd.grad(loss.reshape(()), leaves, allow_unused=True)
    if all(g is None for g in gradients):
        raise ValueError("objective returned a value that depends on none of the log-probabilities it was given")
    cotangents = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, gradients)]
    return loss.detach().reshape(()), cotangents
