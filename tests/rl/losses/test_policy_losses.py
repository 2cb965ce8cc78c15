"""Policy losses, by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from posttrain.rl.losses import policy_losses as pl

OPTIONS = SimpleNamespace(
    epsilon=0.2, epsilon_high=None, delta=None, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, vespo_k_pos=2.0,
    vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
)  # fmt: skip


def t(*values):
    return torch.tensor(values, dtype=torch.float32)


def close(found, *expected):
    torch.testing.assert_close(found.flatten(), t(*expected), atol=1e-6, rtol=1e-5)


def policy(advantage=1.0, shift=0.0, length=3):
    old = -torch.arange(1.0, length + 1).view(1, -1)
    logps = (old + shift).requires_grad_()
    mask = torch.ones_like(old)
    ratio = pl.importance_ratio(logps, old, mask)
    return pl.Policy(logps, old, ratio, torch.tensor([[advantage]]), mask)


def test_ratios_of_tokens_and_of_sequences():
    logps, old, mask = t(-1, -2, -9)[None], t(-1.5, -1, 0)[None], t(1, 1, 0)[None]
    close(pl.importance_ratio(logps, old, mask)[:, :2], math.exp(0.5), math.exp(-1))
    close(pl.importance_ratio(logps, old, mask, "sequence"), math.exp(-0.25))


def test_gspo_token_has_the_value_of_the_sequence_and_the_gradient_of_each_token():
    old, mask = torch.zeros(1, 3), torch.tensor([[1.0, 1.0, 0.0]])
    logps = torch.tensor([[0.5, -1.0, 7.0]], requires_grad=True)
    ratio = pl.importance_ratio(logps, old, mask, "sequence_token")
    close(ratio, *[math.exp(-0.25)] * 3)
    (slope,) = torch.autograd.grad((ratio * torch.tensor([1.0, 2.0, 3.0])).sum(), logps)
    close(slope, math.exp(-0.25), 2 * math.exp(-0.25), 3 * math.exp(-0.25))


def test_k3_is_zero_where_the_policies_agree_and_never_negative():
    close(pl.k3(t(-1), t(-1)), 0)
    close(pl.k3(t(-1), t(-2)), math.exp(-1) + 1 - 1)
    assert (pl.k3(t(-1), t(-0.5)) > 0).all()


def test_clipping_bounds_what_a_good_token_can_gain():
    ratio = t(0.5, 1.1, 1.5)
    close(pl.clipped(ratio, t(2, 2, 2), 0.2, 0.2), -1, -2.2, -2.4)
    close(pl.clipped(ratio, t(-2, -2, -2), 0.2, 0.2), 1.6, 2.2, 3.0)
    close(pl.clipped(ratio, t(2, 2, 2), 0.2, 0.4), -1, -2.2, -2.8)


def test_two_sided_clipping_bounds_a_bad_token_too():
    close(pl.clipped(t(9.0), t(-2), 0.2, 0.2, delta=4.0), 8)


def test_cispo_weighs_the_log_probability_and_keeps_its_gradient():
    logps = t(-2, -2).requires_grad_()
    loss = pl.cispo(logps, t(9, 0.5), t(1, 1), high=5.0)
    close(loss, 10, 1)
    loss.sum().backward()
    close(logps.grad, -5, -0.5)


def test_sapo_is_the_plain_gradient_on_policy():
    # 4/tau * sigmoid(tau * (rho - 1)) has the slope 1 at rho = 1
    ratio = t(1, 1).requires_grad_()
    loss = pl.sapo(ratio, t(3, -3), 1.0, 1.05)
    close(loss, -6, 3 * 2 / 1.05)
    loss.sum().backward()
    close(ratio.grad, -3, 3)


def test_vespo_weighs_by_the_whole_sequence():
    log_ratio, mask = t(0.1, 0.2, 5)[None], t(1, 1, 0)[None]
    w = math.exp(0.3)
    pair = (2.0, 3.0), (3.0, 2.0)
    close(pl.vespo_weight(log_ratio, t(1)[None], mask, None, *pair), w**2 * math.exp(3 * (1 - w)))
    close(pl.vespo_weight(log_ratio, t(-1)[None], mask, None, *pair), w**3 * math.exp(2 * (1 - w)))
    corrected = pl.vespo_weight(log_ratio, t(1)[None], mask, t(math.exp(-0.3))[None], *pair)
    close(corrected, 1)


def test_bad_completions_far_from_the_sampler_are_masked():
    logps, sampling, mask = t(-2, -2).view(1, 2), t(-1, -1.5).view(1, 2), t(1, 1).view(1, 2)  # mean gap 0.75
    assert pl.off_policy_mask(logps, sampling, t(-1)[None], mask, 0.7).item() == 0
    assert pl.off_policy_mask(logps, sampling, t(-1)[None], mask, 0.8).item() == 1
    assert pl.off_policy_mask(logps, sampling, t(1)[None], mask, 0.7).item() == 1


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.83, 1.0])
def test_the_entropy_threshold_is_a_quantile(keep):
    values = torch.rand(37, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(pl.entropy_threshold(values, keep), torch.quantile(values, 1 - keep))


def test_engine_correction_of_tokens_and_sequences():
    old, engine, mask = t(-1, -1, -1)[None], t(-1.5, -3, math.nan)[None], t(1, 1, 1)[None]
    ratios = math.exp(0.5), math.exp(2), 1.0
    close(pl.engine_correction(old, engine, mask, "token_truncate", clip_max=3.0), ratios[0], 3, 1)
    close(pl.engine_correction(old, engine, mask, "token_mask", clip_max=3.0), ratios[0], 0, 1)
    close(pl.engine_correction(old, engine, mask, "token_mask", clip_min=1.2), ratios[0], ratios[1], 0)
    close(pl.engine_correction(old, engine, mask, "sequence_truncate", clip_max=100.0), math.exp(2.5))
    close(pl.engine_correction(old, engine, mask, "sequence_mask", clip_max=3.0), 0)


@pytest.mark.parametrize("name", pl.LOSSES)
def test_every_loss_makes_good_tokens_likelier_and_bad_ones_less_likely(name):
    for advantage in (1.0, -1.0):
        p = policy(advantage)
        pl.LOSSES[name].of_tokens(p, SimpleNamespace(**vars(OPTIONS) | {"epsilon_high": 5.0})).expand(
            1, 3
        ).sum().backward()
        # On policy each gives the policy gradient, - A * grad log pi
        close(p.logps.grad, *[-advantage] * 3)


def test_averages_of_two_ragged_completions():
    loss, mask = t(1, 2, 3, 4, 0, 0).view(2, 3), t(1, 1, 1, 1, 0, 0).view(2, 3)

    def mean(average):
        return (pl.summed(loss, mask, average) / pl.count(mask, average, max_length=10, tokens_per_row=2.0)).item()

    found = {name: mean(name) for name in pl.AVERAGES}
    assert found == pytest.approx(
        {"sequences": (2 + 4) / 2, "tokens": 10 / 4, "rollout_tokens": 10 / 4, "constant": 10 / 20, "sums": 5}
    )


def test_a_trajectory_of_several_sequences_counts_once():
    loss, mask = t(1, 2, 3, 4, 0, 0, 5, 6, 0).view(3, 3), t(1, 1, 1, 1, 0, 0, 1, 1, 0).view(3, 3)
    trajectories = torch.tensor([0, 1, 1])  # 3 tokens, and 1 + 2

    def mean(average):
        count = pl.count(mask, average, max_length=10, tokens_per_row=3.0, num_trajectories=2)
        return (pl.summed(loss, mask, average, trajectories) / count).item()

    found = {name: mean(name) for name in pl.AVERAGES}
    assert found == pytest.approx(
        {"sequences": (2 + 15 / 3) / 2, "tokens": 21 / 6, "rollout_tokens": 21 / 6, "constant": 21 / 20, "sums": 21 / 2}
    )
    log_ratio = t(0.3, 0, 0, 0.5, 9, 9, 0.2, 0.2, 9).view(3, 3)
    ratio = pl.importance_ratio(log_ratio, torch.zeros(3, 3), mask, "sequence", trajectories)
    close(ratio, math.exp(0.1), *[math.exp(0.9 / 3)] * 2)


def test_a_value_per_sequence_counts_for_each_of_its_tokens():
    mask = t(1, 1, 1, 1, 0, 0).view(2, 3)
    assert pl.summed(t(2, 5).view(2, 1), mask, "tokens").item() == 3 * 2 + 5
