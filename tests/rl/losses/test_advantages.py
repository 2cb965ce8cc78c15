"""Rewards to advantages, by hand."""

import math

import pytest
import torch

from posttrain.rl.losses import advantages as adv

NAN = math.nan
HALF = 1 / (math.sqrt(2) + 1e-4)


def close(found, expected):
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=torch.float32), atol=1e-6, rtol=1e-6)


def test_rewards_are_weighted_and_those_that_do_not_apply_left_out():
    rewards = torch.tensor([[1.0, 2.0], [1.0, NAN], [NAN, NAN]])
    total = adv.total_rewards(rewards, torch.tensor([1.0, 10.0]))
    assert total[:2].tolist() == [21, 1] and total[2].isnan()


def test_group_advantages_are_centred_and_scaled_in_their_group():
    close(adv.group_advantages(torch.tensor([1.0, 3.0, 0.0, 0.0]), 2), [-HALF, HALF, 0, 0])
    close(adv.group_advantages(torch.tensor([1.0, 3.0, 0.0, 4.0]), 2, "none"), [-1, 1, -2, 2])


def test_batch_scaling_divides_all_groups_by_one_deviation():
    rewards = torch.tensor([1.0, 3.0, 0.0, 4.0])  # mean 2, squares 1 + 1 + 4 + 4
    close(adv.group_advantages(rewards, 2, "batch"), [a / (math.sqrt(10 / 3) + 1e-4) for a in (-1, 1, -2, 2)])


def test_a_completion_without_a_reward_moves_nothing():
    close(adv.group_advantages(torch.tensor([1.0, NAN, 3.0]), 3, "none"), [-1, 0, 1])
    close(adv.group_advantages(torch.tensor([NAN, NAN]), 2), [0, 0])
    close(adv.leave_one_out_advantages(torch.tensor([1.0, NAN, 3.0]), 3), [-2, 0, 2])
    close(adv.leave_one_out_advantages(torch.tensor([1.0, NAN]), 2), [0, 0])


def test_leave_one_out_compares_with_the_others():
    close(adv.leave_one_out_advantages(torch.tensor([3.0, 0.0, 0.0, 1.0, 1.0, 1.0]), 3), [3, -1.5, -1.5, 0, 0, 0])


def test_reinforce_plus_plus_normalises_over_the_batch():
    rewards = torch.tensor([1.0, 3.0, 0.0, 4.0])
    close(adv.reinforce_plus_plus_advantages(rewards, 2), [a / (math.sqrt(10 / 3) + 1e-4) for a in (-1, 1, -2, 2)])
    close(
        adv.reinforce_plus_plus_advantages(rewards, 2, baseline=False),
        [a / (math.sqrt(10 / 3) + 1e-4) for a in (-1, 1, -2, 2)],
    )
    shifted = torch.tensor([1.0, 3.0, 10.0, 14.0])  # mean 7
    close(
        adv.reinforce_plus_plus_advantages(shifted, 2, baseline=False)[0],
        -6 / (math.sqrt((36 + 16 + 9 + 49) / 3) + 1e-4),
    )


def test_decoupled_advantages_do_not_let_a_large_scale_drown_a_small_one():
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1000.0], [0.0, 0.0], [0.0, 0.0]])
    first, second, *rest = adv.decoupled_advantages(rewards, 2, torch.tensor([1.0, 0.5])).tolist()
    assert first > 0.5 and second == -first and rest == [0, 0]
    first, second, *rest = adv.group_advantages(adv.total_rewards(rewards, torch.tensor([1.0, 0.5])), 2).tolist()
    assert first < -0.5


@pytest.mark.parametrize(("rewards", "equal"), [
    ([1.0, 1.0, 0.0, 1.0], [True, False]), ([NAN, 1.0, NAN, NAN], [True, True]),
    ([0.1, 0.1, 0.3, 0.30001], [True, False]),
])  # fmt: skip
def test_equal_groups_are_found(rewards, equal):
    assert adv.equal_groups(torch.tensor(rewards), 2).tolist() == equal


def test_an_unknown_scale_is_refused():
    with pytest.raises(ValueError, match="group, batch, none"):
        adv.group_advantages(torch.zeros(2), 2, "groups")


def test_rewards_whose_squares_overflow_are_scaled_like_others():
    huge, plain = torch.tensor([0.0, 1e30, 0.0, 3e30]), torch.tensor([0.0, 1.0, 0.0, 3.0])
    for scale in ("group", "batch"):
        found = adv.group_advantages(huge, 2, scale)
        assert found.isfinite().all()
        torch.testing.assert_close(found, adv.group_advantages(plain * 1e6, 2, scale), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(adv.standard_deviation(huge), torch.tensor([1.4142135e30]), rtol=1e-6, atol=0)
