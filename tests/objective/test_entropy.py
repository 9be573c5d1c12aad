"""Tokens of highest entropy: the quantile over everything that is given, and the policy loss with them."""

from __future__ import annotations

import pytest
import torch

from longstraw.objective import Normalizer, PolicyLoss, high_entropy_masks, per_token_kl
from longstraw.objective import entropy as entropy_module

ENTROPIES = [torch.tensor([0.1, 0.9, 0.5]), torch.tensor([0.5, 0.3, 0.7]), torch.tensor([])]
MASKS = [torch.tensor([True, True, True]), torch.tensor([True, False, True]), torch.tensor([], dtype=torch.bool)]


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (1.0, [[True, True, True], [True, False, True]]),
        (0.5, [[False, True, True], [True, False, True]]),  # the median of .1 .5 .5 .7 .9 is .5; ties all count
        (0.25, [[False, True, False], [False, False, True]]),
        (0.1, [[False, True, False], [False, False, False]]),
    ],
)
@pytest.mark.parametrize("most", [2**24, 1])
def test_masks(share: float, expected: list[list[bool]], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entropy_module, "_MOST_FOR_TORCH", most)
    found = high_entropy_masks(ENTROPIES, MASKS, share)
    assert [mask.tolist() for mask in found] == [*expected, []]


def test_nothing_scored_and_a_share_out_of_range() -> None:
    none = [torch.zeros_like(mask) for mask in MASKS]
    assert not any(mask.any() for mask in high_entropy_masks(ENTROPIES, none, 0.5))
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match="share must be above 0 and at most 1"):
            high_entropy_masks(ENTROPIES, MASKS, share)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
@pytest.mark.filterwarnings("ignore:loss_type|importance")
def test_a_token_left_out_keeps_its_kl_term_and_its_place(level: str, loss_type: str) -> None:
    torch.manual_seed(0)
    logps = [torch.randn(4, dtype=torch.float64).requires_grad_(), torch.randn(3, dtype=torch.float64).requires_grad_()]
    old, reference = ([logp.detach() + 0.1 * torch.randn(len(logp)) for logp in logps] for _ in range(2))
    masks = [torch.tensor([True, True, False, True]), torch.tensor([True, True, True])]
    chosen = [torch.tensor([True, False, False, True]), torch.tensor([False, False, False])]
    loss = PolicyLoss(loss_type=loss_type, importance_sampling_level=level, beta=0.3, epsilon_high=5.0)
    normalizer = Normalizer.from_masks(masks)
    found, _ = loss(
        logps, [1.0, -2.0], normalizer, old_logps=old, masks=masks, ref_logps=reference, policy_masks=chosen
    )
    expected = torch.zeros((), dtype=torch.float64)
    for logp, before, ref, mask, keep, advantage in zip(logps, old, reference, masks, chosen, [1.0, -2.0]):
        log_ratio = (logp - before)[mask]
        ratio = (log_ratio.mean() if level == "sequence" else log_ratio).exp().expand(int(mask.sum()))
        if loss_type == "cispo":
            term = -ratio.clamp(max=5.0).detach() * advantage * logp[mask]
        else:
            term = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 6.0) * advantage)
        kl = per_token_kl(logp[mask], ref[mask], ratio)
        expected = expected + (term * keep[mask] + 0.3 * kl).sum() / 6
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, logps), torch.autograd.grad(expected, logps))


def test_policy_masks_are_checked() -> None:
    logps, normalizer = [torch.zeros(2)], Normalizer(1, 2)
    with pytest.raises(ValueError, match=r"policy_masks\[0\] must be bool"):
        PolicyLoss()(logps, [1.0], normalizer, policy_masks=[torch.ones(2)])
