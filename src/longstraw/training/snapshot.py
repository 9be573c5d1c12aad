"""Between the trainer's live objects and a checkpoint's tensors."""

from __future__ import annotations

import torch
from torch import nn

from longstraw.training.checkpoint import Checkpoint
from longstraw.training.optimizer import NamedOptimizer
from longstraw.training.rng import RngState


def snapshot_tensors(optimizer: NamedOptimizer, rng: RngState) -> dict[str, dict[str, torch.Tensor]]:
    """Trained parameters, optimizer moments and torch's random state, by file."""
    return {
        "parameters": {name: parameter.detach() for name, parameter in optimizer.parameters.items()},
        "optimizer": optimizer.tensors(),
        "rng": rng.tensors,
    }


def load_parameters(parameters: dict[str, nn.Parameter], checkpoint: Checkpoint) -> None:
    """Copy the checkpoint's values into the trained parameters.

    Raises:
        ValueError: names, shapes or dtypes do not match: the model or its adapters are other ones.
    """
    stored = checkpoint.tensors.get("parameters", {})
    if stored.keys() != parameters.keys():
        odd = sorted(stored.keys() ^ parameters.keys())
        raise ValueError(
            f"the checkpoint's trained parameters are not this model's: {len(odd)} differ, e.g. '{odd[0]}'. Resume "
            "with the "
            "model, lora and adapter options that the run began with."
        )
    for name, parameter in parameters.items():
        value = stored[name]
        if value.shape != parameter.shape or value.dtype != parameter.dtype:
            raise ValueError(
                f"the checkpoint has '{name}' as {tuple(value.shape)} {value.dtype}, the model as "
                f"{tuple(parameter.shape)} "
                f"{parameter.dtype}. Resume with the model and lora options that the run began with."
            )
        with torch.no_grad():
            parameter.copy_(value)


def restore_rng(checkpoint: Checkpoint) -> None:
    """Put every random number generator back to what the checkpoint holds."""
    RngState(checkpoint.state["rng"], checkpoint.tensors["rng"]).restore()
