"""Advantages of turns, against numbers worked out by hand."""

import math

import pytest
import torch

from posttrain.rl import GRPOConfig
from posttrain.rl.losses import credit
from posttrain.rl.losses.credit import TurnRewards, Turns
from posttrain.rl.rewards.scoring import RewardError, Rewards
from posttrain.rl.samples.samples import Sample

NAN = math.nan


def turns(*given, states=None):
    """Of ``(rewards of turns, outcome)``."""
    states = states or [list(range(len(rewards))) for rewards, _ in given]
    return Turns.of([(TurnRewards(*one), own) for one, own in zip(given, states, strict=True)])


def close(found, expected):
    return torch.testing.assert_close(found, torch.tensor(expected), equal_nan=True, rtol=1e-3, atol=1e-4)


def test_returns_discount_what_follows_and_end_with_the_outcome():
    found = turns(([1.0, None, 2.0], 4.0), ([None], 1.0), ([None, None], NAN)).returns(0.5)
    close(found, [[1 + 0.5 * 3, 3.0, 6.0], [1.0, NAN, NAN], [NAN, NAN, NAN]])


def test_trajectories_of_all_processes_come_into_their_order_with_all_that_is_known_of_them():
    one = turns(([1.0], 2.0), ([None, 5.0], 3.0), ([7.0], NAN), states=[[4], [5, 6], [7]])
    found = one.ordered(torch.tensor([2, 0, 1]))
    close(found.rewards, [[7.0, NAN], [1.0, NAN], [NAN, 5.0]])
    close(found.outcomes, [NAN, 2.0, 3.0])
    assert found.lengths.tolist() == [1, 1, 2] and found.states.tolist() == [[7, 0], [4, 0], [5, 6]]


def test_returns_are_compared_with_all_turns_of_their_group():
    found = credit.return_advantages(torch.tensor([[1.0, 3.0], [2.0, NAN], [7.0, 7.0], [7.0, NAN]]), 2)
    close(found, [[-1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])


def test_process_rewards_count_from_their_turn_on():
    # mean 1, standard deviation 1: normalised to -1, 1 and 0
    found = credit.process_advantages(torch.tensor([[0.0, 2.0, NAN], [NAN, 1.0, NAN]]), 2)
    close(found, [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])


def test_steps_are_compared_with_those_of_their_group_in_the_same_state():
    returns = torch.tensor([[1.0, 4.0], [3.0, 9.0], [5.0, NAN], [5.0, NAN]])
    states = torch.tensor([[0, 1], [0, 2], [0, 0], [0, 0]])
    close(credit.step_advantages(returns, states, 2, "none"), [[-1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    half = 1 / 2**0.5
    close(credit.step_advantages(returns, states, 2), [[-half, 0.0], [half, 0.0], [0.0, 0.0], [0.0, 0.0]])


def sample(*parts, **others):
    """Of ``(tokens, chosen)``."""
    ids = [token for tokens, _ in parts for token in tokens]
    learn = [chosen for tokens, chosen in parts for _ in tokens]
    return Sample({}, "", [9], ids, learn=learn, **others)


def test_tokens_have_the_advantage_of_their_turn_also_in_other_sequences():
    other = sample(([4], True), turns=((1, 1),))
    two = sample(([1, 1], True), ([7], False), ([2], True), turns=((0, 2), (2, 1)), others=(other,))
    found = credit.of_tokens(torch.tensor([[1.0, 2.0, 3.0], [5.0, 0.0, 0.0]]), [two, Sample({}, "", [9], [3, 3])])
    close(found, [[1.0, 1.0, 0.0, 3.0], [2.0, 0.0, 0.0, 0.0], [5.0, 5.0, 0.0, 0.0]])
    assert two.num_turns == 3


def test_turns_that_answer_the_same_are_in_the_same_state():
    again = sample(([1], True), ([7], False), ([2], True), ([7], False), ([3], True))
    first, *later = credit.states_of(again)
    assert later[0] == later[1] != first == credit.states_of(sample(([5], True)))[0]


def test_the_first_turn_of_a_branch_answers_what_stands_behind_the_turn_before():
    branch = sample(([1], False), ([8, 8], False), ([3], True), ([7], False), ([4], True), turns=((2, 1), (3, 1)))
    forked = sample(([1], True), ([7], False), ([2], True), turns=((0, 1), (1, 1)), others=(branch,))
    other = sample(([5, 5], True), ([8, 8], False), ([6], True))
    begun, seven, eight, seven_too = credit.states_of(forked)
    assert credit.states_of(other) == [begun, eight] and seven == seven_too and len({begun, seven, eight}) == 3
    anew = sample(([2], True), turns=((0, 1),), others=(Sample({}, "", [9, 1, 7, 7], [3], turns=((1, 1),)),))
    assert credit.states_of(anew)[0] == begun != credit.states_of(anew)[1]  # the history was written anew


def test_rewards_of_functions_are_weighed_and_those_of_the_whole_kept_apart():
    given = [{1: TurnRewards([1.0, None], outcome=3.0)}, {}]
    two = [sample(([1], True), ([7], False), ([2], True)), sample(([1], True))]
    rewards = torch.tensor([[5.0, 4.0], [NAN, 4.0]])
    (first, states), (second, _) = credit.weighted(two, rewards, given, torch.tensor([1.0, 0.5]))
    assert list(first.turns) == [0.5, None] and first.outcome == 5.0 + 0.5 * 3.0 and len(states) == 2
    assert list(second.turns) == [None] and second.outcome == 2.0


def test_a_reward_function_may_reward_each_turn():
    def of_turns(completions, **_):
        return [[0.5, None], 3.0, None, [None]]

    two, one = sample(([1], True), ([7], False), ([2], True)), sample(([1], True))
    scores = Rewards([of_turns]).of([two, one, one, one], None)
    close(scores.rewards.flatten(), [0.5, 3.0, NAN, NAN])
    assert scores.turns == [{0: TurnRewards([0.5, None])}, {}, {}, {}]
    with pytest.raises(RewardError, match="2 rewards of turns for a completion of 1 turns"):
        Rewards([of_turns]).of([one] * 4, None)


@pytest.mark.parametrize("others", [{"multi_objective_aggregation": "normalize_then_sum"}, {"loss_type": "vespo"},
                                    {"scale_rewards": "batch"}])  # fmt: skip
def test_what_does_not_go_with_credit_of_turns_is_refused(others):
    with pytest.raises(ValueError, match="turn_credit='gigpo'"):
        GRPOConfig(turn_credit="gigpo", use_cpu=True, **others)


def test_groups_without_a_reward_teach_nothing():
    found = turns(([None], NAN), ([None], NAN))
    close(credit.step_advantages(found.returns(1.0), found.states, 2), [[0.0], [0.0]])
    close(credit.process_advantages(found.rewards, 2), [[0.0], [0.0]])
