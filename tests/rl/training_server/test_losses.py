"""The losses of the training API, by the formulas of its documentation."""

import math

import pytest
import torch

from posttrain.rl.training_server.policies import find_loss

LOGPS = [math.log(0.5), math.log(0.1), math.log(0.6)]
SAMPLED = [math.log(0.25), math.log(0.2), math.log(0.6)]  # ratios 2, 0.5 and 1
ADVANTAGES = [1.0, -2.0, 3.0]
#: The loss, its options, the losses of the three tokens, and their derivatives by the log-probability.
CASES = {
    "cross_entropy": ({}, [-LOGPS[0], 2 * LOGPS[1], -3 * LOGPS[2]], [-1, 2, -3]),
    "importance_sampling": ({}, [-2, 1, -3], [-2, 1, -3]),
    "ppo": ({}, [-1.2, 1.6, -3], [0, 0, -3]),
    "ppo wide": ({"clip_low_threshold": 0.4, "clip_high_threshold": 1.5}, [-1.5, 1, -3], [0, 1, -3]),
    "cispo": ({"clip_high_threshold": 1.5}, [-1.5 * LOGPS[0], LOGPS[1], -3 * LOGPS[2]], [-1.5, 1, -3]),
    "cispo low": (
        {"clip_low_threshold": 0.8},
        [-2 * LOGPS[0], 0.8 * 2 * LOGPS[1], -3 * LOGPS[2]],
        [-2, 1.6, -3],
    ),
    "dro": (
        {"beta": 0.5},
        [-LOGPS[0] + 0.25 * math.log(2) ** 2, 2 * LOGPS[1] + 0.25 * math.log(2) ** 2, -3 * LOGPS[2]],
        [-1 + 0.5 * math.log(2), 2 - 0.5 * math.log(2), -3],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loss_and_its_gradient_are_those_of_the_formula(case):
    given, expected, slopes = CASES[case]
    loss, options = find_loss(case.split()[0], given)
    logps = torch.tensor([LOGPS], dtype=torch.float64, requires_grad=True)
    x = {name: torch.tensor([values], dtype=torch.float64) for name, values in (("logprobs", SAMPLED),)}
    x |= {name: torch.tensor([ADVANTAGES], dtype=torch.float64) for name in ("advantages", "weights")}
    found = loss.of_tokens(logps, x, options)
    found.sum().backward()
    torch.testing.assert_close(found.detach(), torch.tensor([expected], dtype=torch.float64))
    torch.testing.assert_close(logps.grad, torch.tensor([slopes], dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("gspo", {}, "loss_fn='gspo' is not done here; there are cross_entropy"),
        ("ppo", {"clip_low": 0.8}, "clip_low=0.8 is no option of ppo with a number; it has clip_low_threshold"),
        ("cross_entropy", {"beta": 1.0}, "it has none"),
        ("ppo", {"clip_low_threshold": "low"}, "clip_low_threshold='low' is no option"),
        ("dro", {}, "beta=None is no option of dro with a number"),
    ],
)
def test_what_is_not_known_is_named(name, given, said):
    with pytest.raises(ValueError, match=said):
        find_loss(name, given)
