"""The tokens of highest entropy, to which the policy term may be limited (arXiv:2506.01939)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_MOST_FOR_TORCH = 2**24  # torch.quantile takes no more values


def high_entropy_masks(entropies: Sequence[Tensor], masks: Sequence[Tensor], share: float) -> list[Tensor]:
    """Mark the scored tokens whose entropy is among the highest.

    A token counts if its entropy is at least the (1 − share) quantile, linearly interpolated, of all scored tokens that
    are given: those of the whole optimizer step, if the result is not to depend on how the step is cut. TRL's
    `top_entropy_quantile`, which takes the quantile over a micro-batch.

    Args:
        entropies: floating [R_i] each.
        masks: bool [R_i] each, True where a token is scored.
        share: of the tokens that count, above 0 and at most 1.

    Returns:
        Bool masks [R_i] each; False wherever `masks` is.

    Raises:
        ValueError: `share` is out of range.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share}")
    scored = torch.cat([entropy[mask].float() for entropy, mask in zip(entropies, masks, strict=True)])
    if not scored.numel():
        return [mask.clone() for mask in masks]
    threshold = _quantile(scored, 1 - share)
    return [(entropy.float() >= threshold) & mask for entropy, mask in zip(entropies, masks, strict=True)]


def _quantile(values: Tensor, rank: float) -> float:
    if values.numel() <= _MOST_FOR_TORCH:
        return float(values.quantile(rank))
    return float(np.quantile(values.cpu().numpy(), rank))
