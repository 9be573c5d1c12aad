"""A number that changes with what a model computes: its tensors, which of them train, and its adapters' settings."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

_SAMPLES = 64  # elements of a tensor
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OF_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


def version_of(model: torch.nn.Module, told: int = 0) -> int:
    """Changes when a tensor is written, replaced, frozen or unfrozen, or an adapter is switched, merged or weighted.

    PyTorch counts most writes. Those that it does not count (through `.data`, `set_` or NumPy, by a fused optimizer or
    a kernel of one's own) are seen by a sample of every tensor's bytes: one of an optimizer shows, one to a few
    elements may not.

    Args:
        told: how many writes were reported.
    """
    tensors = [*model.parameters(), *model.buffers()]
    counted = tuple((t.data_ptr(), t._version, t.requires_grad) for t in tensors)
    return hash((told, counted, _sampled(tensors), _adapters(model)))


def _sampled(tensors: list[torch.Tensor]) -> tuple[bytes, ...]:
    """Bytes of at most `_SAMPLES` elements of each tensor, brought from each device at once."""
    samples: dict[tuple[torch.device, int], list[torch.Tensor]] = defaultdict(list)
    with torch.no_grad():
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor).detach()  # of a DTensor: this rank's part
            if local.numel() and local.device.type != "meta" and local.element_size() in _INTEGERS:
                as_integers = _strided(local).view(_INTEGERS[local.element_size()])
                samples[local.device, local.element_size()].append(as_integers)
        return tuple(torch.cat(parts).cpu().numpy().tobytes() for parts in samples.values())


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """Elements at equal distances in memory; an odd distance, so that they are of different columns."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    step = -(-extent // _SAMPLES) | 1
    return tensor.as_strided((-(-extent // step),), (step,))


def _adapters(model: Any) -> tuple[Any, ...]:
    if not hasattr(model, "peft_config"):
        return ()
    found = []
    for module in model.modules():
        settings = vars(module)
        found += [repr(settings[name]) for name in _OF_ADAPTERS if name in settings]
    return tuple(found)
