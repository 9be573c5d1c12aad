"""Advantages, policy losses and KL as pure functions of log-probability vectors.

Names are resolved on first use: the loss's options (`PolicyLoss`) and `Normalizer` stay importable without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = [
    "Mean",
    "Normalizer",
    "PolicyLoss",
    "combine_rewards",
    "group_advantages",
    "high_entropy_masks",
    "merge_metrics",
    "per_token_kl",
]

_HOME = {
    "Mean": "reduction",
    "Normalizer": "reduction",
    "PolicyLoss": "policy",
    "combine_rewards": "advantages",
    "group_advantages": "advantages",
    "high_entropy_masks": "entropy",
    "merge_metrics": "reduction",
    "per_token_kl": "kl",
}

if TYPE_CHECKING:
    from longstraw.objective.advantages import combine_rewards, group_advantages
    from longstraw.objective.entropy import high_entropy_masks
    from longstraw.objective.kl import per_token_kl
    from longstraw.objective.policy import PolicyLoss
    from longstraw.objective.reduction import Mean, Normalizer, merge_metrics


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
