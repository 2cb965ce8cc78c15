import math
import random
from dataclasses import dataclass

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from posttrain.core.config import validate
from posttrain.core.errors import ConfigError
from posttrain.core.optim import lr_scheduler
from posttrain.core.optim.lr_scheduler import SCHEDULES, ScheduleArguments


def optimizer(lr=3e-3, groups=2):
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(groups)], lr=lr)


def rates(scheduler, num_steps):
    """The learning rate of each update."""
    used = []
    for _ in range(num_steps):
        used.append([group["lr"] for group in scheduler.optimizer.param_groups])
        assert scheduler.get_last_lr() == used[-1]
        scheduler.optimizer.step()
        scheduler.step()
    return used


CURVES = [
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {}),
    ("polynomial", {"power": 2.0, "lr_end": 1e-4}),
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 7}),
    ("cosine_with_min_lr", {"min_lr": 1e-4}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.25, "num_cycles": 1.0}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}),
    ("cosine_warmup_with_min_lr", {"min_lr": 1e-4, "warmup_lr_rate": 0.1}),
    ("warmup_stable_decay", {"num_decay_steps": 6}),
    ("warmup_stable_decay", {"num_decay_steps": 6, "num_stable_steps": 3, "min_lr_ratio": 0.2}),
    ("warmup_stable_decay", {"num_decay_steps": 9, "decay_type": "linear", "warmup_type": "cosine"}),
    ("warmup_stable_decay", {"num_decay_steps": 9, "decay_type": "1-sqrt", "warmup_type": "1-sqrt"}),
    ("warmup_stable_decay", {"num_decay_steps": 9, "num_cycles": 1.5, "min_lr_ratio": 0.1}),
]


@pytest.mark.parametrize("num_warmup_steps", [0, 1, 5])
@pytest.mark.parametrize(("name", "options"), CURVES, ids=[f"{name}-{options}" for name, options in CURVES])
def test_every_curve_equals_the_one_of_transformers(name, options, num_warmup_steps):
    from transformers.optimization import get_scheduler

    expected = get_scheduler(name, optimizer(), num_warmup_steps, 20, scheduler_specific_kwargs=options)
    scheduler = lr_scheduler.build(name, optimizer(), num_warmup_steps, 20, **options)
    mine, theirs = (torch.tensor(rates(s, 25), dtype=torch.float64) for s in (scheduler, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-18)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("reduce_lr_on_plateau", {"patience": 1, "factor": 0.5}),
        ("greedy", {}),
        ("greedy", {"patience": 1, "min_lr": 1e-3, "max_lr": 5e-3, "cooldown": 2, "warmup": 1}),
        ("greedy", {"patience": 0, "mode": "max", "min_lr": [1e-3, 2e-3], "smooth": True, "window_size": 3}),
        (
            "greedy",
            {
                "patience": 0,
                "min_lr": 2e-3,
                "reset_start": 3,
                "cooldown": 1,
                "threshold_mode": "rel",
                "threshold": 0.01,
            },
        ),
    ],
)
def test_schedules_that_follow_a_metric_equal_those_of_transformers(name, options):
    from transformers.optimization import get_scheduler

    draw = random.Random(0)
    expected = get_scheduler(name, optimizer(), 0, 20, scheduler_specific_kwargs=options)
    scheduler = lr_scheduler.build(name, optimizer(), 0, 20, **options)
    seen = set()
    for count in range(120):
        metric = draw.random() * (1 - count / 150)
        expected.step(metric)
        scheduler.step(metric)
        assert scheduler.get_last_lr() == pytest.approx(expected.get_last_lr(), rel=1e-12)
        seen.add(scheduler.get_last_lr()[0])
    assert options == {} or len(seen) > 2


def test_every_name_of_transformers_is_known():
    from transformers.trainer_utils import SchedulerType

    assert {member.value for member in SchedulerType} == set(SCHEDULES)
    assert lr_scheduler.build(SchedulerType.COSINE, optimizer(), 0, 10).get_last_lr() == [3e-3, 3e-3]


def test_linear_climbs_and_falls_in_straight_lines():
    curve = lr_scheduler.linear(num_warmup_steps=2, num_training_steps=6)
    assert [curve(step) for step in range(8)] == [0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0]


def curve(name, num_warmup_steps, num_training_steps, lr=1.0, **options):
    """The schedule called `name` as a share of the peak, by optimizer steps done."""
    scheduler = lr_scheduler.build(name, optimizer(lr, groups=1), num_warmup_steps, num_training_steps, **options)
    return [rate / lr for [rate] in rates(scheduler, num_training_steps + 1)]


def test_cosine_with_min_lr_starts_at_the_peak_and_ends_at_the_floor():
    shares = curve("cosine_with_min_lr", 0, 10, lr=2e-3, min_lr=5e-4)
    assert (shares[0], shares[5], shares[10]) == pytest.approx((1.0, 0.625, 0.25))


def test_cosine_warmup_with_min_lr_learns_from_the_first_update_and_makes_the_last_at_the_floor():
    shares = curve("cosine_warmup_with_min_lr", 10, 20, min_lr_rate=0.1)
    assert shares[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert shares[19] == pytest.approx(0.1)


def test_inverse_sqrt_is_half_after_three_timescales():
    assert curve("inverse_sqrt", 100, 1000)[400] == pytest.approx(0.5)


def test_warmup_stable_decay_with_1_sqrt_falls_as_the_root():
    shares = curve("warmup_stable_decay", 2, 10, num_decay_steps=4, decay_type="1-sqrt")
    assert [shares[step] for step in (2, 5, 6, 7, 10)] == pytest.approx([1, 1, 1, 1 - math.sqrt(0.25), 0])


def test_a_polynomial_ends_well_where_the_warmup_is_the_run():
    assert curve("polynomial", 4, 4) == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize(("given", "steps"), [(0, 0), (0.1, 11), (0.999, 105), (1, 1), (7.0, 7)])
def test_warmup_below_one_is_a_share_rounded_up(given, steps):
    assert lr_scheduler.warmup_steps(ScheduleArguments(warmup_steps=given), 105) == steps


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cosine", {"num_cycle": 1}, "'num_cycle' is not an option of 'cosine', which takes num_cycles, did you mean"),
        ("linear", {"power": 2}, "'power' is not an option of 'linear', which takes none"),
        ("polynomial", {"lr": 1}, "'lr' is not an option of 'polynomial', which takes lr_end, power"),
        ("warmup_stable_decay", {}, "needs num_decay_steps"),
        (
            "warmup_stable_decay",
            {"num_decay_steps": 2, "decay_type": "sqrt"},
            "Unknown decay type: sqrt, expected 'linear'",
        ),
        ("cosine_with_min_lr", {}, "One of min_lr or min_lr_rate should be set"),
        ("cosine_with_min_lr", {"min_lr": 1e-5, "min_lr_rate": 0.1}, "Only one of min_lr or min_lr_rate should be set"),
        ("reduce_lr_on_plateau", {"patient": 3}, "which takes mode, factor, patience"),
        ("polynomial", {"lr_end": 1.0}, "lr_end=1.0 must be below the learning rate"),
        ("cosine", {"num_cycles": "two"}, "lr_scheduler_kwargs of 'cosine'"),
    ],
)
def test_wrong_options_are_refused_with_the_arguments_and_again_when_built(name, options, message):
    with pytest.raises(ConfigError, match=message):
        validate(ScheduleArguments(lr_scheduler_type=name, lr_scheduler_kwargs=options))
    with pytest.raises(ConfigError, match=message):
        lr_scheduler.build(name, optimizer(), 0, 10, **options)


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'cosine'"):
        lr_scheduler.build("cosin", optimizer(), 0, 10)
    with pytest.raises(ConfigError, match="did you mean 'cosine'"):
        validate(ScheduleArguments(lr_scheduler_type="cosin"))


def test_options_may_be_json_and_numbers_may_be_strings():
    args = ScheduleArguments(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs='{"min_lr": "1e-6"}')
    validate(args)
    assert args.lr_scheduler_kwargs == {"min_lr": 1e-6}
    with pytest.raises(ConfigError, match="is not a JSON object"):
        validate(ScheduleArguments(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs="min_lr=1e-6"))


@pytest.mark.parametrize(("name", "options"), [("cosine", {}), ("greedy", {"patience": 0, "min_lr": 0.0})])
def test_a_schedule_goes_on_where_its_state_says(name, options):
    def run(scheduler, metrics):
        used = []
        for metric in metrics:
            scheduler.optimizer.step()
            scheduler.step(metric) if name == "greedy" else scheduler.step()
            used.append(scheduler.get_last_lr())
        return used

    metrics = [3.0, 2.0, 1.0, 2.0, 2.5, 3.0, 1.0, 0.5]
    straight = run(lr_scheduler.build(name, optimizer(), 2, 8, **options), metrics)
    first = lr_scheduler.build(name, optimizer(), 2, 8, **options)
    begun = run(first, metrics[:4])
    second = lr_scheduler.build(name, optimizer(), 2, 8, **options)
    second.load_state_dict(first.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert begun + run(second, metrics[4:]) == straight


def test_users_add_curves_and_scheduler_classes_by_name():
    @lr_scheduler.register("halving")
    def halving(num_warmup_steps, num_training_steps, every=1):
        return lambda step: 0.5 ** (step // every)

    @lr_scheduler.register("stepwise")
    class Stepwise(torch.optim.lr_scheduler.StepLR):
        pass

    @dataclass
    class Config(ScheduleArguments):
        pass

    try:
        validate(Config(lr_scheduler_type="halving", lr_scheduler_kwargs={"every": 2}))
        scheduler = lr_scheduler.build("halving", optimizer(lr=1.0, groups=1), 0, 10, every=2)
        assert rates(scheduler, 5) == [[1.0], [1.0], [0.5], [0.5], [0.25]]
        assert isinstance(lr_scheduler.build("stepwise", optimizer(), 0, 10, step_size=3), LRScheduler)
        with pytest.warns(UserWarning, match="which takes every"):  # a trainer may make another schedule of it
            validate(Config(lr_scheduler_type="halving", lr_scheduler_kwargs={"evry": 2}))
        with pytest.raises(ConfigError, match="which takes every"):
            lr_scheduler.build("halving", optimizer(), 0, 10, evry=2)
    finally:
        del SCHEDULES["halving"], SCHEDULES["stepwise"]
        lr_scheduler.register("linear")(SCHEDULES["linear"])


def test_schedulers_that_follow_a_metric_are_told_by_what_their_step_needs():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)

    class Own:
        def step(self, metrics, epoch=None): ...

    class Either:
        def step(self, metrics=None): ...

    constant = lr_scheduler.build("constant", optimizer, 0, 10)
    plateau = lr_scheduler.build("reduce_lr_on_plateau", optimizer, 0, 10)
    greedy = lr_scheduler.build("greedy", optimizer, 0, 10)
    following = [lr_scheduler.follows_a_metric(scheduler) for scheduler in (constant, plateau, greedy, Own(), Either())]
    assert following == [False, True, True, True, False]
