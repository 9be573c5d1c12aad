"""Rotary frequencies in float32, as their config has them, whatever happened to the model since it was built.

`model.to(torch.bfloat16)` rounds the frequencies too: at position 60,000 the angles are then off by tens of radians.
The table is in no checkpoint, so the same model loaded again has the right one.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

_TOLERANCE = 1e-6  # of a frequency: a few roundings of float32
_ENDING = "inv_freq"  # also "full_attention_inv_freq", "original_inv_freq", ...


def repair(backbone: torch.nn.Module) -> list[str]:
    """Puts every rotary table of the backbone right, in place and for good, and warns of what was done.

    A table that is narrower than float32, or is not what its config says, is computed again by its own class. For good,
    not only while the engine runs: sampling, evaluation and saving by the stock model have to be the function that was
    trained. A table in float64 with float32's values stays.

    Returns:
        Names of the modules that were repaired.

    Raises:
        ValueError: a table is narrower than float32 and its class does not say how it is computed.
    """
    repaired = []
    for name, module in backbone.named_modules():
        tables = {key: t for key, t in module.named_buffers(recurse=False) if key.endswith(_ENDING)}
        if not tables or any(table.is_meta for table in tables.values()):
            continue
        fresh = _computed_again(module)
        if fresh is None:
            narrow = [key for key, table in tables.items() if _is_narrow(table)]
            if narrow:
                raise ValueError(
                    f"the rotary frequencies {name}.{narrow[0]} are in {_word(tables[narrow[0]])}, which is off by "
                    f"tens of radians at long prompts, and {type(module).__name__} cannot be built again from its "
                    "config: load the model with from_pretrained(dtype=...), which keeps them in float32, in place of "
                    ".to(...) or .half()"
                )
            continue
        if _put_right(module, fresh, tables):
            repaired.append(name)
    if repaired:
        warnings.warn(
            f"the rotary frequencies in {', '.join(repaired)} were rounded, or are not those of its config: they "
            "are now computed again in float32, in the model itself. .to(dtype) rounds them, "
            "from_pretrained(dtype=...) does not. For other frequencies set rope_parameters in the config",
            stacklevel=4,
        )
    return repaired


def _computed_again(module: torch.nn.Module) -> torch.nn.Module | None:
    """A module of the same class from the same config, on the CPU; None if that is not how it is built."""
    config = getattr(module, "config", None)
    if config is None:
        return None
    build: Any = type(module)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            return build(config)
    except Exception:
        return None
    finally:
        torch.set_default_dtype(before)


def _put_right(module: torch.nn.Module, fresh: Any, tables: dict[str, torch.Tensor]) -> bool:
    changed = False
    for key, table in tables.items():
        right = getattr(fresh, key, None)
        if not isinstance(right, torch.Tensor):
            if _is_narrow(table):
                raise ValueError(f"{type(module).__name__} built again has no {key}: load the model anew")
            continue
        if _is_narrow(table) or not _same(table, right):
            setattr(module, key, right.to(device=table.device, dtype=torch.promote_types(table.dtype, torch.float32)))
            changed = True
    if changed:  # what goes with the table
        for key, value in vars(fresh).items():
            if key == "rope_type" or key.endswith("attention_scaling"):
                setattr(module, key, value)
    return changed


def _same(table: torch.Tensor, right: torch.Tensor) -> bool:
    return table.shape == right.shape and torch.allclose(table.double().cpu(), right.double(), rtol=_TOLERANCE, atol=0)


def _is_narrow(table: torch.Tensor) -> bool:
    return table.is_floating_point() and table.dtype.itemsize < 4


def _word(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
