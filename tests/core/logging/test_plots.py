from __future__ import annotations

import math
import re

import pytest

from posttrain.core.logging import plots
from posttrain.core.logging.plots import loss_curve, metric_curves, thin, ticks

HISTORY = [
    {"loss": 4.0, "learning_rate": 1e-3, "grad_norm": 1.0, "epoch": 0.5, "step": 10},
    {"loss": 3.0, "learning_rate": 5e-4, "epoch": 1.0, "step": 20},
    {"eval_loss": 3.5, "eval_runtime": 1.0, "epoch": 1.0, "step": 20},
    {"loss": 2.0, "learning_rate": 0.0, "epoch": 1.5, "step": 30},
    {"eval_loss": 2.5, "epoch": 1.5, "step": 30},
    {"train_runtime": 9.0, "train_loss": 3.0, "epoch": 1.5, "step": 30},
]


def lines(page: str) -> list[list[tuple[float, float]]]:
    """The points of every line, in pixels."""
    found = re.findall(r'<polyline points="([^"]+)"', page)
    return [[tuple(map(float, point.split(","))) for point in one.split()] for one in found]


def draw(records, tmp_path, **kwargs) -> str:
    return loss_curve(records, tmp_path / "curve.html", **kwargs).read_text(encoding="utf-8")


def test_the_file_is_written_where_asked_and_its_folder_is_made(tmp_path):
    path = loss_curve(HISTORY, tmp_path / "deep" / "curve.html")
    assert path == tmp_path / "deep" / "curve.html"
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_equal_steps_and_equal_falls_are_equal_distances(tmp_path):
    train, held_out, rate = lines(draw(HISTORY, tmp_path))
    (x0, y0), (x1, y1), (x2, y2) = train
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.2)
    assert y0 < y1 < y2, "pixels grow downwards, so a falling loss has growing y"
    # 3.5 lies half-way between 4 and 3, and 2.5 half-way between 3 and 2.
    assert held_out == [(x1, pytest.approx((y0 + y1) / 2, abs=0.2)), (x2, pytest.approx((y1 + y2) / 2, abs=0.2))]
    assert len(rate) == 3


def test_axes_carry_their_ticks_and_names(tmp_path):
    page = draw(HISTORY, tmp_path)
    labels = re.findall(r"<text [^>]*>([^<]+)</text>", page)
    assert {"2", "4", "10", "30", "loss", "learning rate", "optimizer step", "0.001"} <= set(labels)


def test_a_nan_breaks_the_line_and_is_marked(tmp_path):
    losses = [4.0, 3.5, math.nan, 3.0, 2.5, float("inf"), 2.0]
    page = draw([{"loss": loss, "step": step} for step, loss in enumerate(losses, start=1)], tmp_path)
    assert [len(line) for line in lines(page)] == [2, 2, 1]
    assert page.count('class="gap"') == 2
    assert "2 not finite" in page and "training loss at step 3" in page and "training loss at step 6" in page
    assert "nan" not in page.lower()


def test_null_is_a_gap_as_in_the_state_saved_with_a_checkpoint(tmp_path):
    page = draw([{"loss": 1.0, "step": 1}, {"loss": None, "step": 2}, {"loss": 1.0, "step": 3}], tmp_path)
    assert [len(line) for line in lines(page)] == [1, 1]


def test_a_run_that_was_never_finite_is_still_drawn(tmp_path):
    page = draw([{"loss": math.nan, "step": 1}], tmp_path)
    assert "never finite" in page and "1 not finite" in page


def test_each_evaluation_set_has_its_line(tmp_path):
    page = draw(
        [{"eval_easy_loss": 1.0, "step": 1}, {"eval_hard_loss": 2.0, "step": 1}, {"loss": 3.0, "step": 1}], tmp_path
    )
    assert len(lines(page)) == 3
    assert "held-out loss: easy" in page and "held-out loss: hard" in page


def test_the_page_fetches_nothing_and_follows_the_reader_s_theme(tmp_path):
    page = draw(HISTORY, tmp_path)
    assert re.findall(r"(?:src|href)=|url\(|@import|https?:|<script", page) == []
    assert "prefers-color-scheme: dark" in page


def test_names_from_the_run_are_escaped(tmp_path):
    page = draw([{"eval_<b>_loss": 1.0, "step": 1}], tmp_path, title="<script>alert(1)</script>")
    assert "<script>" not in page and "held-out loss: <b>" not in page
    assert "&lt;script&gt;" in page


def test_a_single_point_is_visible(tmp_path):
    assert "<circle" in draw([{"loss": 1.0, "step": 5}], tmp_path)


def test_records_without_a_loss_say_what_to_pass(tmp_path):
    with pytest.raises(ValueError, match="logging_steps"):
        loss_curve([{"train_runtime": 1.0, "step": 3}], tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 10.0, [0, 2, 4, 6, 8, 10]),
        (1.9, 4.1, [1.5, 2, 2.5, 3, 3.5, 4, 4.5]),
        (0, 1e-5, [0, 2e-6, 4e-6, 6e-6, 8e-6, 1e-5]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_ticks_of_one_value_still_make_an_axis():
    assert ticks(3.0, 3.0)[0] < 3.0 < ticks(3.0, 3.0)[-1]
    assert ticks(0.0, 0.0)[0] < 0.0 < ticks(0.0, 0.0)[-1]


def test_step_ticks_are_whole():
    assert ticks(1, 4, about=8, whole=True) == [1, 2, 3, 4]


def test_thinning_keeps_a_spike_a_gap_and_the_ends():
    points = [(i, 1.0) for i in range(20_000)]
    points[7_777] = (7_777, 50.0)
    points[9_999] = (9_999, None)
    kept = thin(points)
    assert len(kept) <= plots.MOST_POINTS + 3
    assert {(7_777, 50.0), (9_999, None), points[0], points[-1]} <= set(kept)


def test_metrics_are_drawn_on_one_axis(tmp_path):
    records = [
        {"step": 0, "eval_pass@1": 0.1},
        {"step": 5, "reward": 0.3},
        {"step": 10, "reward": 0.5, "eval_pass@1": 0.5},
    ]
    names = {"reward": "new prompts", "eval_pass@1": "held out"}
    page = metric_curves(records, names, tmp_path / "deep" / "curve.html", "Steps", "share right").read_text("utf-8")
    (reward, held_out), dots = lines(page), page.count("<circle")
    assert held_out[1] == reward[1], "0.5 at step 10 is one point, whichever line it is on"
    assert reward[0][1] == pytest.approx((held_out[0][1] + held_out[1][1]) / 2, abs=0.2)
    assert dots == 2 and "share right" in page and "0.1 &#x2192; 0.5" in page


def test_a_metric_that_was_never_logged_is_named_with_those_that_were(tmp_path):
    with pytest.raises(ValueError, match="'eval_pass@2'; in the records are: eval_pass@1, step"):
        metric_curves(
            [{"step": 1, "eval_pass@1": 0.1}], {"eval_pass@2": "held out"}, tmp_path / "c.html", "Steps", "share"
        )
