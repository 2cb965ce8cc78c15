"""``report.html``: what a run did, on one page that needs no network."""

import json
import logging
import math
import re

import pytest

from posttrain.cli import main
from posttrain.cli.report import report
from posttrain.core import Trainer, TrainerCallback, TrainingArguments
from posttrain.core.errors import CheckpointError
from tests import tiny
from tests.contract.trainers import pad


class AtStep(TrainerCallback):
    """Calls a function at the end of a step."""

    def __init__(self, step, work):
        self.step, self.work = step, work

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.work(control)


def trained(folder, callbacks=(), **options):
    settings = dict(max_steps=4, logging_steps=1, eval_strategy="steps", eval_steps=2, save_strategy="no", use_cpu=True)
    args = TrainingArguments(str(folder), report_to="none", disable_tqdm=True, **(settings | options))
    rows = {"train_dataset": tiny.token_rows(8), "eval_dataset": tiny.token_rows(4)}
    trainer = Trainer(tiny.causal_lm(), args, pad, callbacks=list(callbacks), **rows)
    trainer.train()
    return trainer


def charts_of(path):
    text = path.read_text()
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text, re.DOTALL)
    return {chart["title"]: chart for chart in json.loads(found[1].replace("<\\/", "</"))}


def text_of(path):
    return re.sub(r"<[^>]+>", "\n", re.sub(r"<(style|script).*?</\1>", "", path.read_text(), flags=re.DOTALL))


def test_the_page_draws_what_was_logged_and_needs_no_network(tmp_path):
    trainer = trained(tmp_path, learning_rate=3e-3, metric_for_best_model="loss")
    path = tmp_path / "report.html"
    loss = charts_of(path)["loss"]
    history = trainer.state.log_history
    lines = {line["name"]: dict(zip(loss["steps"], line["values"], strict=True)) for line in loss["lines"]}
    assert lines["training"] == {record["step"]: record["loss"] for record in history if "loss" in record}
    evaluated = {record["step"]: record["eval_loss"] for record in history if "eval_loss" in record}
    assert {step: value for step, value in lines["evaluation"].items() if value is not None} == evaluated
    best = min(evaluated, key=evaluated.get)
    assert {step: value for step, value in lines["best"].items() if value is not None} == {best: evaluated[best]}
    text = text_of(path)
    assert "finished after 4 of 4 steps" in text and "0.003" in text and "8 rows" in text
    assert re.search(r"forward \d.*backward \d.*optimizer \d", text, re.DOTALL)
    assert "<h2>Time</h2>" in path.read_text()
    assert not re.search(r'(src|href)="?https?:', path.read_text())


def test_a_page_is_written_of_a_run_that_ends_by_an_error_and_none_where_it_is_not_wanted(tmp_path):
    def fail(control):
        raise RuntimeError("no more")

    handlers = list(logging.getLogger("posttrain").handlers)
    with pytest.raises(RuntimeError, match="no more"):
        trained(tmp_path / "a", [AtStep(3, fail)])
    text = text_of(tmp_path / "a" / "report.html")
    assert "ended by RuntimeError after 3 steps" in text and "ERROR: RuntimeError: no more" in text
    trained(tmp_path / "b", report=False)
    assert not (tmp_path / "b" / "report.html").exists()
    assert logging.getLogger("posttrain").handlers == handlers


def test_warnings_are_shown_once_and_without_secrets(tmp_path):
    def warn(control):
        for _ in range(2):
            logging.getLogger("posttrain.core").warning("The token hf_abcdefghijklmnop <b>failed</b>.")
        control.should_training_stop = True

    trained(tmp_path, [AtStep(2, warn)])
    text = (tmp_path / "report.html").read_text()
    assert "stopped after 2 of 4 steps" in text and "hf_abcdefghij" not in text
    assert text.count("The token *** &lt;b&gt;failed&lt;/b&gt;.") == 1


def test_a_warning_that_comes_again_with_other_numbers_is_counted(tmp_path):
    def warn(control):
        for share in (0.5, 0.25, 1e-5):
            logging.getLogger("posttrain.core").warning("%.4g of the rows were cut.", share)

    trained(tmp_path, [AtStep(2, warn)])
    assert "WARNING: 0.5 of the rows were cut. (3 times)" in text_of(tmp_path / "report.html")


def test_runs_side_by_side_show_what_differs(tmp_path, capsys):
    trained(tmp_path / "slow", learning_rate=1e-4)
    trained(tmp_path / "fast", learning_rate=1e-2)
    out = tmp_path / "both.html"
    assert main(["report", str(tmp_path / "slow"), str(tmp_path / "fast"), "--output", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    names = [line["name"] for line in charts_of(out)["loss"]["lines"]]
    assert names == ["slow: training", "slow: evaluation", "fast: training", "fast: evaluation"]
    differs = text_of(out).split("Arguments that differ")[1]
    assert "0.0001" in differs and "0.01" in differs and "max_steps" not in differs


def test_folders_of_one_name_are_told_apart_and_wrong_words_named(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name / "out").mkdir(parents=True)
        (tmp_path / name / "out" / "log.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    folders = [str(tmp_path / name / "out") for name in ("a", "b")]
    assert main(["report", *folders, "--output", str(tmp_path / "both.html")]) == 0
    assert [line["name"] for line in charts_of(tmp_path / "both.html")["loss"]["lines"]] == [
        "a/out: training", "b/out: training",
    ]  # fmt: skip
    for words, said in (
        ([*folders, "--output", str(tmp_path)], "cannot be written"),
        (["--output", "x.html", *folders], "holds 3 values and takes one"),
        ([folders[0], "--ouput", "x.html"], "did you mean 'output'?"),
    ):
        assert main(["report", *words]) == 2
        assert said in capsys.readouterr().err


def test_a_log_that_is_cut_off_or_not_finite_is_drawn_as_far_as_it_goes(tmp_path):
    records = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}, {"step": 3, "loss": math.pi}]
    folder = tmp_path / "</script><b>x"
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "log.jsonl").write_text(lines + '{"step": 4, "lo')
    report.write([folder], tmp_path / "page.html")
    assert charts_of(tmp_path / "page.html")["loss"]["lines"][0]["values"] == [2.0, None, math.pi]
    assert "<b>x" not in (tmp_path / "page.html").read_text()
    with pytest.raises(CheckpointError, match=r"has no log.jsonl"):
        report.write([tmp_path / "nothing"], tmp_path / "page.html")


def test_a_long_log_is_thinned_and_keeps_its_last_point():
    log = [{"step": step, "loss": 1.0 / step} for step in range(1, 10_001)]
    points = report._points(log, "loss")
    assert len(points) <= report.MOST_POINTS + 1 and 10_000 in points


def test_a_page_of_the_user_is_not_overwritten(tmp_path):
    (tmp_path / "report.html").write_text("mine")
    trained(tmp_path)
    assert (tmp_path / "report.html").read_text() == "mine"


def test_what_never_changes_is_a_line_of_text_and_no_curve(tmp_path):
    records = [{"step": step, "loss": 1.0 / step, "clip_ratio/low": 0.0} for step in (1, 2, 3)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    path = report.write([tmp_path], tmp_path / "report.html")
    assert set(charts_of(path)) == {"loss"}
    assert "Always the same: clip_ratio/low 0" in text_of(path)


def test_the_seconds_of_reward_functions_count_once_as_a_part_of_scoring(tmp_path):
    record = {
        "perf/score_seconds": 1.0,
        "perf/reward_right_seconds": 0.9,
        "perf/forward_backward_seconds": 3.0,
        "step": 1,
    }
    (tmp_path / "log.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    text = text_of(report.write([tmp_path], tmp_path / "report.html"))
    assert "score 1.0 s (25%)" in text and "forward and backward 3.0 s (75%)" in text


@pytest.mark.parametrize(("record", "shown"), [({"loss": 2.0}, "loss"), ({"loss": 3e-8, "reward": 0.5}, "reward")])
def test_a_run_with_rewards_is_headed_by_them_and_not_by_its_loss(record, shown, tmp_path):
    (tmp_path / "log.jsonl").write_text(json.dumps({"step": 1, **record}) + "\n", encoding="utf-8")
    page = report.write([tmp_path], tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.findall(r'class="tile"><span>([^<]+)<', page)[1:] == [shown]
