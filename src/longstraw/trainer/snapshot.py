"""Where a run stands between two optimizer steps, and its way into a checkpoint and back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from longstraw.data.stream import PromptStream
from longstraw.rollout.records import Batch
from longstraw.rollout.store import batch_from_stored, batch_to_stored
from longstraw.trainer.checkpoint import Checkpoint
from longstraw.trainer.optimizer import NamedOptimizer
from longstraw.trainer.rng import RngState


@dataclass
class Progress:
    """Where a run is between two optimizer steps.

    Attributes:
        step: optimizer steps done.
        position: prompts drawn.
        num_tokens: tokens of prompts and responses seen.
        batch: rollouts that further iterations will use.
    """

    step: int = 0
    position: int = 0
    num_tokens: int = 0
    batch: Batch | None = field(default=None, repr=False)


def take_snapshot(
    progress: Progress, optimizer: NamedOptimizer, rng: RngState, fingerprint: str, num_iterations: int
) -> Checkpoint:
    """A checkpoint of the present moment; on a CPU its tensors are those of the model and optimizer, not copies.

    Args:
        rng: the random state that the next step starts from.
        fingerprint: of the prompts.
    """
    stored, rollouts = batch_to_stored(progress.batch)
    state: dict[str, Any] = {
        "position": progress.position,
        "num_tokens": progress.num_tokens,
        "prompts": fingerprint,
        "rng": rng.numbers,
        "batch": stored,
        "iteration": progress.step % num_iterations,
    }
    tensors = {
        "parameters": {name: parameter.detach() for name, parameter in optimizer.parameters.items()},
        "optimizer": optimizer.tensors(),
        "rng": rng.tensors,
        "rollouts": rollouts,
    }
    return Checkpoint(progress.step, state, tensors)


def copied(checkpoint: Checkpoint) -> Checkpoint:
    """The same with tensors of its own, in the CPU's memory: what comes later does not change it."""
    tensors = {
        stem: {name: tensor.to("cpu", copy=True) for name, tensor in named.items()}
        for stem, named in checkpoint.tensors.items()
    }
    return replace(checkpoint, tensors=tensors)


def restore_snapshot(
    checkpoint: Checkpoint, optimizer: NamedOptimizer, stream: PromptStream, fingerprint: str
) -> Progress:
    """Put parameters, optimizer, schedule and random state back.

    Raises:
        ValueError: the checkpoint belongs to other prompts or other parameters.
    """
    if checkpoint.state["prompts"] != fingerprint:
        raise ValueError(
            "'dataset': the prompts are not those that the checkpoint was made with, so the run cannot go on exactly. "
            "Restore the data and the length limits, or start a new run."
        )
    _load_parameters(optimizer.parameters, checkpoint)
    optimizer.load_tensors(checkpoint.tensors.get("optimizer", {}), checkpoint.step)
    RngState(checkpoint.state["rng"], checkpoint.tensors["rng"]).restore()
    return Progress(
        checkpoint.step,
        checkpoint.state["position"],
        checkpoint.state["num_tokens"],
        batch_from_stored(checkpoint.state.get("batch"), checkpoint.tensors.get("rollouts", {}), stream),
    )


def _load_parameters(parameters: dict[str, nn.Parameter], checkpoint: Checkpoint) -> None:
    stored = checkpoint.tensors.get("parameters", {})
    if stored.keys() != parameters.keys():
        odd = sorted(stored.keys() ^ parameters.keys())
        raise ValueError(
            f"the checkpoint's trained parameters are not this model's: {len(odd)} differ, e.g. '{odd[0]}'. Resume "
            "with the model, lora and adapter options that the run began with."
        )
    for name, parameter in parameters.items():
        value = stored[name]
        if value.shape != parameter.shape or value.dtype != parameter.dtype:
            raise ValueError(
                f"the checkpoint has '{name}' as {tuple(value.shape)} {value.dtype}, the model as "
                f"{tuple(parameter.shape)} {parameter.dtype}. Resume with the model and lora options that the run "
                "began with."
            )
        with torch.no_grad():
            parameter.copy_(value)
