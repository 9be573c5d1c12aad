"""Group-relative advantages from rewards; names and meaning are TRL's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

ScaleRewards = Literal["group", "batch", "none"]
Reward = float | None

STD_EPSILON = 1e-4
_SCALES: dict[str | bool, str] = {"group": "group", "batch": "batch", "none": "none", True: "group", False: "none"}


def group_advantages(
    rewards: Tensor | Sequence[Reward] | Sequence[Sequence[Reward]],
    num_generations: int | None = None,
    scale_rewards: ScaleRewards | bool = "group",
) -> Tensor:
    r"""How much better each response did than the others to the same prompt.

        A_ij = (r_ij − mean_j r_i·) / (σ + 1e-4)

    with σ the standard deviation (n − 1 in its denominator, as TRL) of the group for `"group"` (GRPO, arXiv:2402.03300,
    section 4.1) and of all rewards given for `"batch"` (arXiv:2508.08221); `"none"` leaves the difference as it is
    (Dr. GRPO, arXiv:2503.20783). A group whose rewards are equal gives exactly 0, rounding of the mean
    notwithstanding. A reward of None or NaN excludes its sample from every statistic and gets advantage 0.

    Args:
        rewards: [num_prompts, num_generations], or flat with the responses to one prompt next to each other and
            `num_generations` given. None and NaN mean "not scored".
        num_generations: the group's size; needed for flat rewards.
        scale_rewards: `"group"` (or True), `"batch"`, `"none"` (or False).

    Returns:
        [num_prompts, num_generations], float64, on the CPU, finite.

    Raises:
        ValueError: a group of one; rewards that do not divide into groups; an infinite reward; an unknown scale.
    """
    if scale_rewards not in _SCALES:
        raise ValueError(f"scale_rewards must be 'group', 'batch' or 'none', got {scale_rewards!r}")
    grouped = _as_groups(rewards, num_generations)

    scored = ~grouped.isnan()
    # A mean of equal floats may differ from them in its last bit, and 1e-17 over 1e-4 is not 0.
    lowest = grouped.masked_fill(~scored, math.inf).amin(dim=1, keepdim=True)
    highest = grouped.masked_fill(~scored, -math.inf).amax(dim=1, keepdim=True)
    deviation = grouped - grouped.nanmean(dim=1, keepdim=True)
    deviation = torch.where(scored & (highest > lowest), deviation, 0.0)

    match _SCALES[scale_rewards]:
        case "group":
            degrees = (scored.sum(dim=1, keepdim=True) - 1).clamp(min=1)
            return deviation / ((deviation.square().sum(dim=1, keepdim=True) / degrees).sqrt() + STD_EPSILON)
        case "batch":
            values = grouped[scored]
            return deviation / (values.std() + STD_EPSILON) if values.numel() > 1 else deviation
        case _:
            return deviation


def combine_rewards(
    rewards_per_func: Tensor | Sequence[Sequence[Reward]], reward_weights: Sequence[float] | None = None
) -> Tensor:
    """The weighted sum of several reward functions' values, over those that scored the sample.

    Args:
        rewards_per_func: [num_samples, num_functions]; None and NaN mean that the function did not score the sample.
        reward_weights: one weight a function; None weighs each with 1.

    Returns:
        [num_samples], float64, on the CPU; NaN for a sample that no function scored, which `group_advantages` then
        leaves out.

    Raises:
        ValueError: as many weights as functions are needed; an infinite reward.
    """
    values = _as_matrix(rewards_per_func, "rewards_per_func must be [num_samples, num_functions]")
    num_functions = values.shape[1]
    weights = [1.0] * num_functions if reward_weights is None else list(reward_weights)
    if len(weights) != num_functions:
        raise ValueError(
            f"reward_weights has {len(weights)} entries for {num_functions} reward functions; "
            "give one weight a function, or none at all to weigh each with 1"
        )
    total = (values * values.new_tensor(weights)).nansum(dim=1)
    return total.masked_fill(values.isnan().all(dim=1), math.nan)


def _as_groups(rewards: Tensor | Sequence, num_generations: int | None) -> Tensor:
    """[num_prompts, num_generations] float64, None as NaN."""
    if _is_flat(rewards):
        if num_generations is None:
            raise ValueError("num_generations is missing: flat rewards need it to tell one group from the next")
        if num_generations < 1 or len(rewards) % num_generations:
            raise ValueError(
                f"{len(rewards)} rewards do not divide into groups of num_generations={num_generations}; "
                "pass one reward a response (None for a response that was not scored)"
            )
        one_row = rewards[None] if isinstance(rewards, Tensor) else [rewards]
        grouped = _as_matrix(one_row, "rewards must hold one number a response").view(-1, num_generations)
    else:
        grouped = _as_matrix(rewards, "rewards must be [num_prompts, num_generations]")
        if num_generations is not None and grouped.shape[1] != num_generations:
            raise ValueError(f"rewards has groups of {grouped.shape[1]}, but num_generations is {num_generations}")
    if grouped.shape[1] == 1:
        raise ValueError(
            "a group of one response has no advantage: it is its own mean, so the gradient would be 0 whatever the "
            "reward; set num_generations to 2 or more"
        )
    return grouped


def _as_matrix(values: Tensor | Sequence, expectation: str) -> Tensor:
    """A non-empty 2-D float64 tensor on the CPU with None as NaN."""
    if not isinstance(values, Tensor):
        rows = [[math.nan if value is None else float(value) for value in row] for row in values]
        if len({len(row) for row in rows}) > 1:
            raise ValueError(f"{expectation}, got rows of lengths {[len(row) for row in rows]}")
        values = torch.tensor(rows, dtype=torch.float64)
    if values.dim() != 2 or values.numel() == 0:
        raise ValueError(f"{expectation}, and not empty, got shape {list(values.shape)}")
    values = values.detach().to(device="cpu", dtype=torch.float64)
    if values.isinf().any():
        row, column = values.isinf().nonzero()[0].tolist()
        raise ValueError(
            f"{expectation}: the value at [{row}, {column}] is infinite and would turn its whole group into NaN; "
            "return a finite reward, or None to leave the sample out"
        )
    return values


def _is_flat(rewards: Tensor | Sequence) -> bool:
    if isinstance(rewards, Tensor):
        return rewards.dim() == 1
    return not any(isinstance(row, Sequence) or (isinstance(row, Tensor) and row.dim() > 0) for row in rewards)
