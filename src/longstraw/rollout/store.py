"""A batch of rollouts as JSON and tensors, for checkpoints between two iterations over the same responses."""

from __future__ import annotations

from typing import Any

import torch

from longstraw.data.stream import PromptStream
from longstraw.rollout.groups import Batch, Group

_LISTS = ("responses", "sampled_logps", "masks", "old_logps", "reference_logps")


def batch_to_stored(batch: Batch | None) -> tuple[dict[str, Any] | None, dict[str, torch.Tensor]]:
    """What the next iteration needs of a batch: everything but prompts, which their positions name."""
    if batch is None:
        return None, {}
    tensors: dict[str, torch.Tensor] = {}
    groups = []
    for number, group in enumerate(batch.groups):
        lists = {name: getattr(group, name) for name in _LISTS if getattr(group, name) is not None}
        for name, entries in lists.items():
            tensors |= {f"{number}.{name}.{index}": tensor.detach().cpu() for index, tensor in enumerate(entries)}
        groups.append(
            {
                "position": group.position,
                "owner": group.owner,
                "finish_reasons": group.finish_reasons,
                "rewards": group.rewards,
                "advantages": group.advantages,
                "lists": {name: len(entries) for name, entries in lists.items()},
            }
        )
    return {"groups": groups, "next_position": batch.next_position, "num_replaced": batch.num_replaced}, tensors


def batch_from_stored(
    stored: dict[str, Any] | None, tensors: dict[str, torch.Tensor], stream: PromptStream
) -> Batch | None:
    """The inverse; states are captured again when they are needed."""
    if stored is None:
        return None
    groups = []
    for number, entry in enumerate(stored["groups"]):
        lists: dict[str, Any] = {
            name: [tensors[f"{number}.{name}.{index}"] for index in range(length)]
            for name, length in entry["lists"].items()
        }
        groups.append(
            Group(
                entry["position"],
                stream.at(entry["position"]),
                finish_reasons=entry["finish_reasons"],
                rewards=entry["rewards"],
                advantages=entry["advantages"],
                sampled_logps=lists.pop("sampled_logps", None),
                owner=entry.get("owner", 0),
                **lists,
            )
        )
    return Batch(groups, stored["next_position"], stored["num_replaced"])
