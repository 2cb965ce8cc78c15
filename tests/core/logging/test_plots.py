import math
import sys

import pytest

from posttrain.cli.report.plots import loss_curve, metric_curves

pytest.importorskip("matplotlib")

HISTORY = [
    {"loss": 4.0, "learning_rate": 1e-3, "grad_norm": 1.0, "epoch": 0.5, "step": 10},
    {"loss": 3.0, "learning_rate": 5e-4, "epoch": 1.0, "step": 20},
    {"eval_loss": 3.5, "eval_runtime": 1.0, "epoch": 1.0, "step": 20},
    {"loss": 2.0, "learning_rate": 0.0, "epoch": 1.5, "step": 30},
    {"eval_loss": 2.5, "epoch": 1.5, "step": 30},
    {"train_runtime": 9.0, "train_loss": 3.0, "epoch": 1.5, "step": 30},
]


def lines(axes):
    """{label: its points} of the lines of one pair of axes."""
    return {line.get_label(): list(map(tuple, line.get_xydata().tolist())) for line in axes.get_lines()}


def test_losses_and_the_learning_rate_are_drawn_over_the_same_steps():
    figure = loss_curve(HISTORY)
    assert figure._repr_png_().startswith(b"\x89PNG")  # what a notebook shows
    losses, rate = figure.axes
    assert lines(losses) == {
        "training loss  4 → 2": [(10, 4.0), (20, 3.0), (30, 2.0)],
        "held-out loss  3.5 → 2.5": [(20, 3.5), (30, 2.5)],
    }
    assert lines(rate) == {"learning rate  0.001 → 0": [(10, 1e-3), (20, 5e-4), (30, 0.0)]}
    assert losses.get_xlim() == rate.get_xlim()
    assert [losses.get_ylabel(), rate.get_ylabel(), rate.get_xlabel()] == ["loss", "learning rate", "optimizer step"]


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_file_is_written_where_asked_and_its_folder_is_made(suffix, tmp_path):
    loss_curve(HISTORY, tmp_path / "deep" / f"curve.{suffix}", title="a $ b < c")
    content = (tmp_path / "deep" / f"curve.{suffix}").read_bytes()
    assert b"<svg" in content if suffix == "svg" else content.startswith(b"\x89PNG")


def test_a_value_that_is_not_finite_breaks_its_line_and_is_marked():
    losses = [4.0, 3.5, math.nan, 3.0, 2.5, float("inf"), 2.0, None]  # null, as in the state that a checkpoint holds
    (axes,) = loss_curve([{"loss": loss, "step": step} for step, loss in enumerate(losses, start=1)]).axes
    drawn = lines(axes)
    assert [x for x, y in drawn["training loss  4 → 2"] if math.isnan(y)] == [3, 6, 8]
    assert [x for x, _ in drawn["training loss: 3 not finite"]] == [3, 6, 8]


def test_a_run_that_was_never_finite_is_still_drawn(tmp_path):
    (axes,) = loss_curve([{"loss": math.nan, "step": 1}], tmp_path / "curve.svg").axes
    assert list(lines(axes)) == ["training loss  never finite", "training loss: 1 not finite"]


def test_each_evaluation_set_has_its_line():
    records = [{"eval_easy_loss": 1.0, "step": 1}, {"eval_hard_loss": 2.0, "step": 1}, {"loss": 3.0, "step": 1}]
    names = ["training loss  3 → 3", "held-out loss: easy  1 → 1", "held-out loss: hard  2 → 2"]
    assert list(lines(loss_curve(records).axes[0])) == names


def test_a_single_point_is_visible():
    (axes,) = loss_curve([{"loss": 1.0, "step": 5}]).axes
    assert [line.get_marker() for line in axes.get_lines()] == ["."]


def test_records_without_a_loss_say_what_to_pass(tmp_path):
    with pytest.raises(ValueError, match="logging_steps"):
        loss_curve([{"train_runtime": 1.0, "step": 3}], tmp_path / "x.svg")
    assert not (tmp_path / "x.svg").exists()


def test_metrics_are_drawn_on_one_axis(tmp_path):
    records = [
        {"step": 0, "eval_pass@1": 0.1},
        {"step": 5, "reward": 0.3},
        {"step": 10, "reward": 0.5, "eval_pass@1": 0.5},
    ]
    names = {"reward": "new prompts", "eval_pass@1": "held out"}
    (axes,) = metric_curves(records, names, tmp_path / "curve.svg", "Steps", "share right").axes
    assert lines(axes) == {
        "new prompts  0.3 → 0.5": [(5, 0.3), (10, 0.5)],
        "held out  0.1 → 0.5": [(0, 0.1), (10, 0.5)],
    }
    assert [line.get_marker() for line in axes.get_lines()] == ["", "."]
    assert axes.get_ylabel() == "share right" and (tmp_path / "curve.svg").is_file()


def test_a_metric_that_was_never_logged_is_named_with_those_that_were():
    with pytest.raises(ValueError, match="'eval_pass@2'; in the records are: eval_pass@1, step"):
        metric_curves([{"step": 1, "eval_pass@1": 0.1}], {"eval_pass@2": "held out"}, None, "Steps", "share")


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'posttrain-core\[plots\]'"):
        loss_curve(HISTORY)
