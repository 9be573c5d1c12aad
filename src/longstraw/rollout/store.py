"""A batch of rollouts as JSON and tensors, for checkpoints between two iterations over the same responses."""

from __future__ import annotations

from typing import Any

import torch

from longstraw.data.stream import PromptStream
from longstraw.rollout.records import Batch, Group, Rollout

# What a checkpoint calls the fields of a group's rollouts.
_TENSORS = {"responses": "ids", "sampled_logps": "sampled_logps", "masks": "mask"}
_TENSORS |= {name: name for name in ("old_logps", "reference_logps")}
_VALUES = {f"{field}s": field for field in ("finish_reason", "reward", "advantage", "policy_version")}


def batch_to_stored(batch: Batch | None) -> tuple[dict[str, Any] | None, dict[str, torch.Tensor]]:
    """What the next iteration needs of a batch: everything but prompts, which their positions name."""
    if batch is None:
        return None, {}
    tensors: dict[str, torch.Tensor] = {}
    groups = []
    for number, group in enumerate(batch.groups):
        lists: dict[str, int] = {}
        for name, field in _TENSORS.items():
            entries = [getattr(rollout, field) for rollout in group.rollouts]
            if all(entry is not None for entry in entries):
                lists[name] = len(entries)
                tensors |= {f"{number}.{name}.{index}": entry.detach().cpu() for index, entry in enumerate(entries)}
        values = {name: [getattr(rollout, field) for rollout in group.rollouts] for name, field in _VALUES.items()}
        groups.append({"position": group.position, "owner": group.owner, **values, "lists": lists})
    return {"groups": groups, "next_position": batch.next_position, "num_replaced": batch.num_replaced}, tensors


def batch_from_stored(
    stored: dict[str, Any] | None, tensors: dict[str, torch.Tensor], stream: PromptStream
) -> Batch | None:
    """The inverse; states are captured again when they are needed."""
    if stored is None:
        return None
    groups = []
    for number, entry in enumerate(stored["groups"]):
        fields = {field: entry[name] for name, field in _VALUES.items() if name in entry}
        for name, length in entry["lists"].items():
            fields[_TENSORS[name]] = [tensors[f"{number}.{name}.{index}"] for index in range(length)]
        rollouts = [Rollout(**dict(zip(fields, values, strict=True))) for values in zip(*fields.values(), strict=True)]
        position = entry["position"]
        groups.append(Group(position, stream.at(position), rollouts, owner=entry.get("owner", 0)))
    return Batch(groups, stored["next_position"], stored["num_replaced"])
