import math

import numpy as np
import pytest
import torch

from posttrain.core.logging.metrics import Clock, Metrics, is_timing, means, peak_flops, speed_metrics


def test_a_mean_weighs_what_it_was_given():
    metrics = Metrics()
    metrics.add("loss", 2.0, weight=1)
    metrics.add("loss", torch.tensor(4.0), weight=3)
    assert means(metrics.drain()) == {"loss": 3.5}
    assert metrics.drain() == {}


def test_two_processes_give_the_mean_of_one():
    whole, halves = Metrics(), [Metrics(), Metrics()]
    for number, (value, weight) in enumerate([(1.0, 5), (3.0, 2), (10.0, 1)]):
        whole.add("x", value, weight)
        halves[number % 2].add("x", value, weight)
    parts = [half.state_dict() for half in halves]
    assert means(halves[0].drain(lambda mine: parts)) == pytest.approx(means(whole.drain()))


def test_a_metric_that_only_one_process_has_is_kept():
    assert means(Metrics().drain(lambda mine: [mine, {"rare": (6.0, 2)}])) == {"rare": 3.0}


def test_a_restored_sum_goes_on_from_the_same_bits():
    values = torch.rand(20, generator=torch.Generator().manual_seed(0))
    straight, first, second = Metrics(), Metrics(), Metrics()
    for value in values:
        straight.add("loss", value)
        straight.add_sum("tokens", torch.tensor(2**24 + 1), 7)
    for number, value in enumerate(values):
        target = first if number < 11 else second
        if number == 11:
            second.load_state_dict(first.state_dict())
        target.add("loss", value)
        target.add_sum("tokens", torch.tensor(2**24 + 1), 7)
    assert second.drain() == straight.drain()


def test_extremes_are_those_of_all_processes_and_pass_nan_over():
    first, second = Metrics(), Metrics()
    for metrics, values in ((first, [3.0, math.nan, 2.0]), (second, [math.nan, 7.0])):
        for value in values:
            metrics.add_extreme("low", torch.tensor(value), "min")
            metrics.add_extreme("high", value, "max")
        metrics.add_extreme("never", math.nan, "min")
    resumed = Metrics()
    resumed.load_state_dict(first.state_dict())
    resumed.add_extreme("low", 1.0, "min")
    parts = [resumed.state_dict(), second.state_dict()]
    assert means(resumed.drain(lambda mine: parts)) == {"low": 1.0, "high": 7.0}
    assert resumed.drain() == {}
    with pytest.raises(ValueError, match="is a max"):
        second.add_extreme("high", 1.0, "min")


def test_what_nothing_was_counted_for_is_left_out():
    metrics = Metrics()
    metrics.add("loss", 1.0, weight=0)
    metrics.add("other", 1.0, weight=2)
    assert means(metrics.drain()) == {"other": 1.0}


def test_a_tensor_of_values_is_averaged():
    metrics = Metrics()
    metrics.add("reward", torch.tensor([1.0, 3.0]), weight=2)
    assert means(metrics.drain()) == {"reward": 2.0}


def test_performance_counts_training_time_alone():
    clock = Clock()
    clock._last -= 10  # ten seconds ago
    clock.add("eval", 6.0)
    clock.count(tokens=400, slots=800)
    values = clock.performance(steps=4, steps_left=8)
    assert values["perf/tokens_per_second"] == pytest.approx(100, rel=0.01)
    assert values["perf/real_token_share"] == 0.5
    assert values["perf/step_seconds"] == pytest.approx(1, rel=0.01)
    assert values["perf/time_left_seconds"] == pytest.approx(20, rel=0.01)
    assert clock.performance(1, 0).keys() == {"perf/step_seconds", "perf/time_left_seconds", "perf/peak_host_mib"}


def test_a_clock_divides_a_step_into_its_laps():
    clock = Clock()
    clock.begin()
    clock._mark -= 3
    clock.lap("forward_backward")
    clock._mark -= 1
    clock.lap("optimizer")
    values = clock.performance(1, 0)
    assert values["perf/forward_backward_seconds"] == pytest.approx(3, abs=0.1)
    assert values["perf/optimizer_seconds"] == pytest.approx(1, abs=0.1)


def test_the_share_of_the_peak_is_operations_by_time_and_peak():
    clock = Clock(peak_flops=1000.0)
    clock._last -= 10
    clock.count(tokens=1, slots=1, flops=2500)
    assert clock.performance(1, 0)["perf/mfu"] == pytest.approx(0.25, rel=0.01)
    clock.count(tokens=1, slots=1, flops=2500)
    clock._peak_flops = None
    assert "perf/mfu" not in clock.performance(1, 0)


def test_the_peak_of_a_device_is_known_by_its_name_and_for_16_bits_alone(monkeypatch):
    device = torch.device("cuda")
    for name, peak in [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A40", 150e12),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA A10", 125e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("AMD Instinct MI250X", 191.5e12),
        ("X1", None),
    ]:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(device, torch.bfloat16) == peak
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    assert peak_flops(device, torch.float32) is None and peak_flops(torch.device("cpu"), torch.bfloat16) is None


def test_a_copy_of_the_metrics_is_left_alone_by_the_original():
    metrics = Metrics()
    metrics.add("loss", 1.0)
    before = metrics.copy()
    metrics.add("loss", torch.tensor(3.0))
    assert (before.total("loss"), metrics.total("loss"), metrics.total("other")) == (1.0, 4.0, 0)


def test_speed_metrics_are_per_second_and_known_as_timings():
    metrics = speed_metrics("eval", 2.0, num_samples=10, num_steps=4)
    assert metrics == {"eval_runtime": 2.0, "eval_samples_per_second": 5.0, "eval_steps_per_second": 2.0}
    assert all(is_timing(name) for name in metrics)
    assert not any(is_timing(name) for name in ("loss", "eval_loss", "grad_norm", "learning_rate", "epoch"))


@pytest.mark.parametrize(("reduce", "expected"), [("mean", 2.5), ("sum", 10.0), ("min", 1.0), ("max", 4.0)])
def test_a_value_is_reduced_as_asked_over_calls_processes_and_resumes(reduce, expected):
    first, second, resumed = Metrics(), Metrics(), Metrics()
    for metrics, values in ((first, [1.0, 2.0]), (second, [3.0, 4.0])):
        for value in values:
            metrics.log("x", torch.tensor(value), 1, reduce, per_epoch=False)
            metrics.log("x", torch.tensor(value).expand(1), 1, reduce, per_epoch=True)
    assert first.copy().state_dict() == first.state_dict()
    resumed.load_state_dict(first.state_dict())
    parts = [resumed.state_dict(), second.state_dict()]
    assert means(resumed.drain(lambda mine: [parts[0], parts[1]] if mine else [])) == {"x": expected}
    assert resumed.drain() == {} and list(resumed.state_dict())  # the epoch has not ended
    assert means(resumed.drain(lambda mine: parts, epoch=True))["x"] == expected


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(1.0, torch.bfloat16), (300.0, torch.float16), (1, torch.bool), (200, torch.uint8), (100, torch.int8)],
)
def test_sums_of_short_types_go_on_growing(value, dtype):
    metrics, one = Metrics(), torch.tensor(value, dtype=dtype)
    for _ in range(600):
        metrics.log("mean", one, 1, "mean", per_epoch=False)
        metrics.log("weighed", one, one, "mean", per_epoch=False)
        metrics.log("sum", one.expand(2), 1, "sum", per_epoch=False)
    assert means(metrics.drain()) == {"mean": value, "weighed": value, "sum": 1200 * value}


@pytest.mark.parametrize("per_epoch", [False, True])
def test_what_is_no_metric_of_ones_own_is_said_at_once(per_epoch):
    metrics = Metrics()
    for name in ("loss", "grad_norm", "learning_rate", "epoch", "step"):
        with pytest.raises(ValueError, match=f"log_metric got '{name}', a name that every record"):
            metrics.log(name, 1.0, 1, "mean", per_epoch)
    for value in ("0.5", None, [1.0]):
        with pytest.raises(TypeError, match="log_metric\\('x'\\): the value is .* must be a number or a tensor"):
            metrics.log("x", value, 1, "mean", per_epoch)
    for value in (np.float32(1), np.int64(1), np.bool_(True), np.ones(2), True):
        metrics.log("y", value, 1, "mean", per_epoch)
    assert means(metrics.drain(epoch=per_epoch)) == {"y": 1.0}


def test_what_cannot_be_reduced_is_said():
    metrics = Metrics()
    metrics.log("x", 1.0, 1, "sum", per_epoch=False)
    for name, weight, reduce, what in (
        ("x", 1, "max", "is a sum and cannot be a max too"),
        ("y", 2, "sum", "a sum has no weight"),
        ("y", 1, "median", "reduce='median' is not one of mean, sum, min, max"),
    ):
        with pytest.raises(ValueError, match=what):
            metrics.log(name, 1.0, weight, reduce, per_epoch=False)
    metrics.log("x", math.nan, 1, "sum", per_epoch=False)
    assert math.isnan(metrics.drain()["x"][0])  # a sum passes nothing over
