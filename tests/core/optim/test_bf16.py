"""AdamW in bfloat16: what is rounded keeps its expected value, and small changes add up."""

import pytest
import torch

from posttrain.core.optim.adam import BF16AdamW, stochastically_rounded


def rounded(values, seed=0):
    return stochastically_rounded(values, torch.Generator().manual_seed(seed))


def test_each_value_becomes_a_neighbour_and_the_mean_is_the_value():
    spacing = 2.0**-7  # of bfloat16 between 1 and 2
    values = torch.full((200_000,), 1 + 0.3 * spacing)
    found = rounded(values).float()
    assert set(found.unique().tolist()) == {1.0, 1 + spacing}
    share = (found > 1).float().mean().item()
    assert share == pytest.approx(0.3, abs=4 * (0.3 * 0.7 / 200_000) ** 0.5)
    assert torch.equal(rounded(-values).float() < -1, found > 1)


def test_what_bfloat16_holds_stays():
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, torch.inf, -torch.inf, 2.0**-130])
    assert torch.equal(rounded(values).float(), values)
    assert rounded(torch.tensor([torch.nan])).isnan().all()


def test_a_step_is_that_of_adamw_where_nothing_is_rounded():
    start = torch.randn(64, generator=torch.Generator().manual_seed(1))
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    options = {"lr": 1e-2, "betas": (0.875, 0.96875), "weight_decay": 0.1}
    gradient = torch.full((64,), 0.5)  # with these, both moments of the first steps are numbers of bfloat16
    for parameter, optimizer in (
        (ours, BF16AdamW([ours], **options)),
        (theirs, torch.optim.AdamW([theirs], **options)),
    ):
        parameter.grad = gradient
        optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_the_second_moment_falls_although_each_change_is_below_the_spacing():
    """0.999 of a number of bfloat16 is nearest to that number itself."""
    ends = {}
    for stochastic in (True, False):
        parameter = torch.nn.Parameter(torch.zeros(4096))
        optimizer = BF16AdamW([parameter], stochastic_rounding=stochastic)
        for step in range(501):
            parameter.grad = torch.full_like(parameter, 1.0 if step == 0 else 0.0)
            optimizer.step()
        ends[stochastic] = optimizer.state[parameter]["exp_avg_sq"].float().mean().item() / 1e-3
    assert ends[True] == pytest.approx(0.999**500, rel=0.02) and ends[False] == pytest.approx(1, rel=0.01)


def test_weights_in_bfloat16_move_by_steps_below_their_spacing():
    moved = {}
    for stochastic in (True, False):
        parameter = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = BF16AdamW([parameter], lr=1e-4, stochastic_rounding=stochastic)
        for _ in range(100):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        moved[stochastic] = 1 - parameter.float().mean().item()
    assert moved[True] == pytest.approx(1e-2, rel=0.05) and moved[False] == 0


def test_random_bits_depend_on_the_step_alone():
    def run(steps, state=None, noise=False):
        parameter = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        optimizer = BF16AdamW([parameter], lr=1e-3, seed=3)
        if state is not None:
            parameter.data.copy_(state[0])
            optimizer.load_state_dict(state[1])
        for _ in range(steps):
            if noise:
                torch.rand(5)
            parameter.grad = torch.linspace(-1, 1, 64).bfloat16()
            optimizer.step()
        return parameter.detach().clone(), optimizer.state_dict()

    whole = run(6)[0]
    assert torch.equal(run(3, run(3, noise=True))[0], whole)
    before = torch.get_rng_state()
    run(2)
    assert torch.equal(torch.get_rng_state(), before)
