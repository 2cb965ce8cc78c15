import pytest
import torch

from posttrain.core.errors import NonFiniteError
from posttrain.core.health import FiniteGuard, check_finite

ONE = torch.tensor(1.0)


def step(optimizer, guard, loss, gradient):
    [parameter] = optimizer.param_groups[0]["params"]
    parameter.grad = torch.full_like(parameter, gradient)
    guard.flag(optimizer, torch.tensor(loss), parameter.grad.norm())
    optimizer.step()
    return parameter.detach().clone(), {k: v.clone() for k, v in optimizer.state[parameter].items()}


@pytest.mark.parametrize(("loss", "gradient"), [(float("nan"), 1.0), (1.0, float("inf")), (1.0, float("nan"))])
def test_a_fused_optimizer_skips_a_step_that_is_not_finite_and_goes_on(loss, gradient):
    optimizer, guard = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=0.1, fused=True), FiniteGuard()
    weights, moments = step(optimizer, guard, 1.0, 1.0)
    after, unchanged = step(optimizer, guard, loss, gradient)
    assert torch.equal(weights, after) and all(torch.equal(moments[name], unchanged[name]) for name in moments)
    with pytest.raises(NonFiniteError, match="1 of the updates up to 2"):
        guard.check(2)
    guard.check(2)  # told once
    moved, _ = step(optimizer, guard, 1.0, 1.0)
    assert not torch.equal(moved, after) and torch.isfinite(moved).all()
    guard.check(3)


def test_on_the_cpu_it_is_said_before_the_step():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(NonFiniteError, match="Update 5: .*weights are those of update 4"):
        FiniteGuard().before_step(optimizer, torch.tensor(float("nan")), ONE, step=4)
    FiniteGuard().before_step(optimizer, ONE, ONE, step=4)


def test_a_window_without_a_label_is_named_as_such():
    with pytest.raises(NonFiniteError, match="not one label"):
        check_finite(torch.tensor(float("nan")), ONE, 0, num_items=torch.tensor(0))
