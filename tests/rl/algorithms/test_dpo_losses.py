"""The losses of DPO and its relatives: numbers that a reader can compute, and what they become at their limits."""

import math

import pytest
import torch

from posttrain.rl.algorithms.dpo import (
    DIVERGENCES,
    LOSSES,
    OF_THE_MARGIN,
    SORTING,
    Pairs,
    alpha_score,
    length_desensitized,
    pair_weights,
)
from posttrain.rl.policy.logprobs import CompletionScores

OPTIONS = {"beta": 0.5, "label_smoothing": 0.1, "discopop_tau": 0.05, "pairs_per_token": 0.25}


def pairs(chosen, rejected, lengths=(4, 2), score=lambda ratio: ratio):
    """Pairs of given log-ratios; the policy's log-probabilities are twice these."""
    chosen, rejected = torch.tensor(chosen), torch.tensor(rejected)
    length = [torch.full_like(chosen, n) for n in lengths]
    return Pairs(chosen, rejected, score(chosen), score(rejected), *length, 2 * chosen, 2 * rejected, -2 * chosen)


def sigma(x):
    return 1 / (1 + math.exp(-x))


# A pair with the log-ratios 2 and -1; beta is 0.5, so the rewards are 1 and -0.5, and their margin is 1.5.
LOW, HIGH = -math.log(sigma(1.5)), -math.log(sigma(-1.5))
BY_HAND = {
    "sigmoid": 0.9 * LOW + 0.1 * HIGH,
    "hinge": 0.0,
    "ipo": (2 / 4 + 1 / 2 - 1) ** 2,
    "exo_pair": sigma(1.5) * math.log(sigma(1.5) / 0.9) + sigma(-1.5) * math.log(sigma(-1.5) / 0.1),
    "nca_pair": -math.log(sigma(1)) - 0.5 * math.log(sigma(-1)) - 0.5 * math.log(sigma(0.5)),
    "robust": (0.9 * LOW - 0.1 * HIGH) / 0.8,
    "bco_pair": -math.log(sigma(1)) - math.log(sigma(0.5)),
    "sppo_hard": (2 - 1) ** 2 + (-1 + 1) ** 2,
    "aot": 0.9 * LOW + 0.1 * HIGH,
    "aot_unpaired": 0.9 * LOW + 0.1 * HIGH,
    "apo_zero": 1 - sigma(1) + sigma(-0.5),
    "apo_down": sigma(1) + 1 - sigma(1.5),
    "discopop": LOW * (1 - sigma(30)) + math.exp(-1.5) * sigma(30),
    "sft": -4 * 0.25,
    "sigmoid_norm": -math.log(sigma(0.5 * (2 / 4 + 1 / 2))),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_pair_by_hand(name):
    loss = LOSSES[name](pairs([2.0], [-1.0]), **OPTIONS)
    assert loss.shape == (1,) and loss.item() == pytest.approx(BY_HAND[name], abs=1e-6)


def test_dpo_is_equation_7():
    loss = LOSSES["sigmoid"](pairs([2.0, 0.0], [-1.0, 0.0]), beta=0.5)
    torch.testing.assert_close(loss, torch.tensor([LOW, math.log(2)]))


@pytest.mark.parametrize(
    "name", [name for name in LOSSES if name not in ("sft", "ipo", "sppo_hard", "apo_down", *SORTING)]
)
def test_a_better_pair_costs_less(name):
    options = OPTIONS | {"label_smoothing": 1e-3}
    worse, better = (LOSSES[name](pairs([c], [-c]), **options) for c in (-0.5, 0.5))
    assert better < worse


AT_REFERENCE = {
    "sigmoid": math.log(2), "hinge": 1.0, "ipo": 1.0, "nca_pair": 2 * math.log(2), "robust": math.log(2),
    "bco_pair": 2 * math.log(2), "sppo_hard": 2.0, "aot": math.log(2), "aot_unpaired": math.log(2), "apo_zero": 1.0,
    "apo_down": 1.0, "discopop": (math.log(2) + 1) / 2, "sigmoid_norm": math.log(2), "sft": 0.0,
    "exo_pair": -math.log(2) - 0.5 * math.log(0.9 * 0.1),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_at_the_reference(name):
    loss = LOSSES[name](pairs([0.0], [0.0]), **OPTIONS)
    assert loss.item() == pytest.approx(AT_REFERENCE[name], abs=1e-6)


@pytest.mark.parametrize("name", OF_THE_MARGIN[:-1])
def test_what_is_of_the_margin_does_not_change_when_both_sides_do(name):
    lengths = (3, 3)
    one, other = (LOSSES[name](pairs([c + 1.0], [c], lengths), **OPTIONS) for c in (-2.0, 5.0))
    torch.testing.assert_close(one, other)


def test_robust_dpo_is_unbiased_under_flipped_labels():
    right, wrong = (LOSSES["robust"](pairs([c], [-c]), **OPTIONS) for c in (1.0, -1.0))
    clean = LOSSES["sigmoid"](pairs([1.0], [-1.0]), beta=0.5)
    torch.testing.assert_close(0.9 * right + 0.1 * wrong, clean)


def test_without_smoothing_robust_and_conservative_dpo_are_dpo():
    given = pairs([0.3, -2.0], [1.0, 0.2])
    for name in ("robust", "sigmoid"):
        torch.testing.assert_close(
            LOSSES[name](given, beta=0.5, label_smoothing=0.0), LOSSES["sigmoid"](given, beta=0.5)
        )


def test_exo_is_a_divergence_and_least_where_the_policy_is_the_smoothed_label():
    margin = math.log(0.9 / 0.1) / 0.5
    assert LOSSES["exo_pair"](pairs([margin], [0.0]), **OPTIONS).item() == pytest.approx(0.0, abs=1e-6)


def test_ipo_is_least_at_a_margin_of_one_over_two_beta_a_token():
    assert LOSSES["ipo"](pairs([4.0], [0.0]), beta=0.5).item() == 0.0


def test_aot_compares_sorted_margins_whichever_pair_they_are_of():
    given = pairs([3.0, 1.0], [0.0, 0.0])
    swapped = pairs([1.0, 3.0], [0.0, 0.0])
    torch.testing.assert_close(LOSSES["aot_unpaired"](given, **OPTIONS), LOSSES["aot_unpaired"](swapped, **OPTIONS))
    # Policy margins 6 and 2, the reference's 3 and 1: sorted 2 - 1 and 6 - 3.
    loss = LOSSES["aot"](given, beta=0.5)
    torch.testing.assert_close(loss, torch.tensor([-math.log(sigma(0.5)), -math.log(sigma(1.5))]))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("reverse_kl", 1.0), ("forward_kl", 1 - math.exp(-1)), ("js_divergence", math.log(2 * math.e / (1 + math.e)))],
)
def test_divergences_by_hand(name, expected):
    assert DIVERGENCES[name](torch.tensor(1.0), 0.5).item() == pytest.approx(expected)
    assert DIVERGENCES[name](torch.tensor(0.0), 0.5).item() == pytest.approx(0.0, abs=1e-7)


def test_the_alpha_divergence_lies_between_the_two_kls():
    ratio = torch.linspace(-2, 2, 9)
    torch.testing.assert_close(alpha_score(ratio, 0.0), DIVERGENCES["forward_kl"](ratio, 0.0))
    torch.testing.assert_close(alpha_score(ratio, 1.0), ratio)
    torch.testing.assert_close(alpha_score(ratio, 1.001), ratio, rtol=3e-3, atol=1e-6)
    assert alpha_score(torch.tensor(1.0), 0.5).item() == pytest.approx((math.exp(-0.5) - 1) / -0.5)
    assert alpha_score(torch.tensor(1e5), 2.0).isfinite()


def scores(logps, lengths, collision=0.0):
    mask = torch.arange(len(logps[0])) < torch.tensor(lengths).unsqueeze(1)
    stats = {"log_collision": torch.full(mask.shape, collision) * mask}
    return CompletionScores(torch.tensor(logps) * mask, mask, stats)


def test_length_desensitized_tokens_beyond_the_shorter_completion_weigh_alpha():
    given = scores([[-1.0, -2.0, -4.0, -8.0], [-1.0, -1.0, -1.0, -1.0]], [4, 2])
    assert length_desensitized(given, 0.5).tolist() == [-1 - 2 + 0.5 * (-4 - 8), -2]
    assert length_desensitized(given, 1.0).tolist() == given.logps.sum(1).tolist()
    assert length_desensitized(given, 0.0).tolist() == [-3, -2]


def test_pairs_weigh_what_the_policy_would_have_written_them_with():
    half = math.log(0.5)
    chosen, rejected = scores([[half, half]], [2], half), scores([[half, 2 * half]], [2], half)
    # The chosen tokens are what is expected; the rejected are, on average, half as probable by the root.
    torch.testing.assert_close(pair_weights(chosen, rejected), torch.tensor([math.sqrt(0.5)]))
