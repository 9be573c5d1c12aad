"""What a user may pass, checked before any work: each error names the argument and the way out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from longstraw.engine.host import ModelHost
from longstraw.engine.ids import refuse_outside
from longstraw.engine.ids import token_ids as as_ids
from longstraw.engine.step import Scored
from longstraw.engine.tree import Tree
from longstraw.engine.walk import TreeScored
from longstraw.pages import Tier
from longstraw.parallel.context import Context
from longstraw.state.resident import ResidentState

PromptGrad = str | int


def prompt_grad(value: Any) -> PromptGrad:
    """ "full", "none", or how many of the prompt's last tokens stay in the graph.

    Raises:
        ValueError: anything else.
    """
    if value in ("full", "none") and isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ValueError(
        f'prompt_grad={value!r}: choose "full" (the exact gradient), "none" (responses only) or a positive number of '
        "the prompt's last tokens to keep in the graph"
    )


def positive(name: str, value: Any, unit: str = "tokens") -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} has to be a positive whole number of {unit}")
    return value


def not_negative(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name}={value!r} has to be a whole number of bytes, 0 or more")
    return value


def tier_bytes(value: Mapping[str, int] | None) -> dict[str, int]:
    """Bounds by tier.

    Raises:
        ValueError: an unknown tier, or not a number of bytes.
    """
    bounds = dict(value or {})
    unknown = set(bounds) - set(Tier)
    if unknown:
        raise ValueError(f'tier_bytes has {sorted(unknown)}: its keys are "device", "host" and "disk"')
    return {tier: not_negative(f"tier_bytes[{tier!r}]", nbytes) for tier, nbytes in bounds.items()}


def temperature(value: float) -> float:
    if not value > 0:
        raise ValueError(f"temperature={value!r} has to be positive: it divides the logits")
    return float(value)


def token_ids(what: str, ids: Any, vocab_size: int) -> torch.Tensor:
    """A 1-D int64 tensor on the CPU.

    Raises:
        ValueError: not one-dimensional, not whole numbers, or outside the vocabulary.
    """
    tensor = as_ids(what, ids)
    refuse_outside(what, tensor, vocab_size)
    return tensor


def responses(values: Sequence[Any], vocab_size: int) -> list[torch.Tensor]:
    """See `token_ids`; an empty response is legal, an empty group is not."""
    if isinstance(values, torch.Tensor) and values.dim() == 1:
        raise ValueError("responses is one tensor of ids: pass a list with one tensor of ids a response")
    if len(values) == 0:
        raise ValueError("responses is empty: pass at least one response")
    return [token_ids(f"responses[{i}]", ids, vocab_size) for i, ids in enumerate(values)]


def length(host: ModelHost, num_prompt: int, num_response: int, what: str) -> None:
    """Refuses positions beyond the model's range.

    Raises:
        ValueError: names the lengths, the limit and the ways out.
    """
    limit = host.position_limit
    if limit is not None and num_prompt + num_response > limit:
        raise ValueError(
            f"prompt of {num_prompt} and {what} of {num_response} tokens need {num_prompt + num_response} positions, "
            f"beyond max_position_embeddings={limit}: shorten them, or load the model with an explicit RoPE override "
            '(rope_parameters={"rope_type": "yarn", "factor": ..., "original_max_position_embeddings": '
            f"{limit}, ...}}), whose quality is yours to check"
        )


def state(host: ModelHost, found: ResidentState) -> None:
    """Refuses a state that is gone, or another model's.

    Raises:
        ValueError: says which.
    """
    if found.released:
        raise ValueError("this state was released: capture the prompt again")
    if found.backbone() is not host.backbone:
        raise ValueError(
            "this state was captured with another model, whose keys and values it holds: capture the prompt with "
            "this engine, as every model (policy, reference) needs a state of its own"
        )


def captured(found: ResidentState) -> None:
    """Refuses a fork where gradients are asked for: they would go through chains that it keeps no states of.

    Raises:
        ValueError: names the way.
    """
    if found.parent is not None:
        raise ValueError(
            "this state was forked, to be scored and sampled from: take the gradient of whole trajectories with "
            "backward_tree, or of responses to a captured prompt"
        )


def tree(host: ModelHost, found: Tree) -> None:
    """Refuses a tree that the model can not run.

    Raises:
        ValueError: not a tree, ids outside the vocabulary, or longer than the model's range.
    """
    if not isinstance(found, Tree):
        raise ValueError(f"tree is a {type(found).__name__}: make one with longstraw.Tree.from_sequences")
    refuse_outside("the tree's sequences", found.ids_P, host.vocab_size)
    length(host, found.num_prompt, found.longest - found.num_prompt, "a trajectory")


def scored(found: Scored | TreeScored, parameter_version: int) -> None:
    """Refuses what cannot be pulled back any more.

    Raises:
        ValueError: says why.
    """
    if found.used:
        raise ValueError("these responses were pulled back or released before: score them again with score_for")
    if found.parameter_version != parameter_version:
        raise ValueError(
            "parameters have changed since the responses were scored, whose loss is of the ones before: call "
            "pull_back before the optimizer's step, or score_for again"
        )


def cotangents(logps: Sequence[torch.Tensor], values: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """One a response, of its log-probabilities' shape; None counts as zero.

    Raises:
        ValueError: not as many as responses, or another shape.
    """
    if len(values) != len(logps):
        raise ValueError(f"{len(values)} cotangents for {len(logps)} responses: pass one a response, or None for it")
    for place, (logp, value) in enumerate(zip(logps, values)):
        if value is not None and value.shape != logp.shape:
            raise ValueError(f"cotangents[{place}] has shape {tuple(value.shape)} for {logp.numel()} tokens")
    given = [v.clone() if v is not None and v.is_inference() else v for v in values]
    return [torch.zeros_like(p, requires_grad=False) if v is None else v.to(p) for p, v in zip(logps, given)]


def finite(
    context: Context, prompt_ids: torch.Tensor, cotangents: Sequence[torch.Tensor], loss: torch.Tensor | None = None
) -> None:
    """Refuses to pull back what is not finite.

    Raises:
        FloatingPointError: names the prompt.
    """
    good = all(bool(torch.isfinite(c).all()) for c in cotangents) and (loss is None or bool(torch.isfinite(loss)))
    if not context.agree(good, min):
        what = "the loss's gradient" if loss is None else f"the loss ({float(loss)}) or its gradient"
        raise FloatingPointError(
            f"{what} is not finite for the prompt of {len(prompt_ids)} tokens that starts with ids "
            f"{prompt_ids[:8].tolist()}; nothing was added to .grad. Look at its responses' log-probabilities "
            "and advantages, or lower the learning rate"
        )
