import math

import pytest
import torch

from longstraw.objective import combine_rewards, group_advantages


def test_group_scale_by_hand():
    # Deviations of [0, 1, 2, 1] from its mean 1 are [-1, 0, 1, 0]; the sample variance is 2/3.
    advantages = group_advantages([[0.0, 1.0, 2.0, 1.0]])
    top = 1 / (math.sqrt(2 / 3) + 1e-4)
    torch.testing.assert_close(advantages, torch.tensor([[-top, 0.0, top, 0.0]], dtype=torch.float64))


def test_none_scale_leaves_the_difference():
    expected = torch.tensor([[-1.0, 1.0], [0.5, -0.5]], dtype=torch.float64)
    assert group_advantages([[0.0, 2.0], [1.0, 0.0]], scale_rewards="none").equal(expected)


def test_batch_scale_uses_every_reward():
    rewards = torch.tensor([[0.0, 1.0], [4.0, 4.5]])
    centred = torch.tensor([[-0.5, 0.5], [-0.25, 0.25]], dtype=torch.float64)
    advantages = group_advantages(rewards, scale_rewards="batch")
    torch.testing.assert_close(advantages, centred / (rewards.double().std() + 1e-4))


def test_flat_and_nested_agree_and_booleans_are_accepted():
    nested = [[0.0, 1.0, 3.0], [2.0, 2.0, 5.0]]
    flat = [reward for row in nested for reward in row]
    for scale, boolean in (("group", True), ("none", False)):
        expected = group_advantages(nested, scale_rewards=scale)
        assert group_advantages(flat, 3, scale_rewards=boolean).equal(expected)
        assert group_advantages(torch.tensor(flat), 3, scale_rewards=scale).equal(expected)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(scale, dtype):
    for num_generations in (2, 3, 7, 10):
        for value in (0.1, 0.7, 1 / 3, 1e8 + 0.1, -2.3):
            rewards = torch.tensor([[value] * num_generations, list(range(num_generations))], dtype=dtype)
            advantages = group_advantages(rewards, scale_rewards=scale)
            assert (advantages[0] == 0).all()
            assert (advantages[1] != 0).any()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_unscored_samples_are_left_out_and_get_zero(scale):
    rewards = [[0.0, None, 1.0, 3.0], [float("nan"), 2.0, None, 5.0]]
    advantages = group_advantages(rewards, scale_rewards=scale)
    assert advantages[0, 1] == 0 and advantages[1, 0] == 0 and advantages[1, 2] == 0
    first, second = torch.tensor([0.0, 1.0, 3.0]).double(), torch.tensor([2.0, 5.0]).double()
    sigma = {"group": (first.std(), second.std()), "batch": (torch.cat([first, second]).std(),) * 2, "none": None}[
        scale
    ]
    for scored, row, index in ((first, [0, 2, 3], 0), (second, [1, 3], 1)):
        expected = scored - scored.mean()
        if sigma is not None:
            expected = expected / (sigma[index] + 1e-4)
        torch.testing.assert_close(advantages[index, row], expected)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_one_or_no_scored_sample_gives_zero(scale):
    assert (group_advantages([[None, 4.0, None], [None, None, None]], scale_rewards=scale) == 0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1.0], [2.0]],), "num_generations to 2 or more"),
        (([1.0, 2.0], 1), "num_generations to 2 or more"),
        (([1.0, 2.0, 3.0], 2), "do not divide"),
        (([1.0, 2.0],), "num_generations is missing"),
        (([[1.0, 2.0], [3.0]],), "rows of lengths"),
        (([[1.0, 2.0]], 3), "groups of 2"),
        (([[1.0, math.inf]],), "infinite"),
        (([[1.0, 2.0]], None, "std"), "scale_rewards must be"),
        (([], 2), "not empty"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(*arguments)


def test_combined_rewards_are_weighted_and_leave_none_out():
    values = [[1.0, 2.0], [None, 2.0], [3.0, None], [None, None]]
    combined = combine_rewards(values, [1.0, 0.5])
    assert combined[:3].tolist() == [2.0, 1.0, 3.0]
    assert combined[3].isnan()
    assert combine_rewards(values)[0] == 3.0


def test_reward_weights_must_match_the_functions():
    with pytest.raises(ValueError, match="reward_weights has 1 entries for 2"):
        combine_rewards([[1.0, 2.0]], [1.0])


def test_an_unscored_sample_stays_unscored_through_both_steps():
    rewards = combine_rewards([[1.0, 0.0], [None, None], [0.0, 0.0], [1.0, 1.0]], [1.0, 2.0])
    advantages = group_advantages(rewards, num_generations=4, scale_rewards="none")
    torch.testing.assert_close(advantages[0], torch.tensor([-1 / 3, 0.0, -4 / 3, 5 / 3], dtype=torch.float64))
