"""Metrics of two processes are those of one, whether they are computed batch by batch or not."""

import json

import pytest

from tests.core.evaluation.test_eval_loop import Accuracy, classifier
from tests.programs import ROOT, together


def test_a_streaming_metric_of_two_processes_is_that_of_one(tmp_path):
    alone = classifier(tmp_path, Accuracy()).evaluate()
    done = together(2, [str(ROOT / "tests/core/evaluation/test_eval_loop.py"), str(tmp_path)])
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in (0, 1):
        pair = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert pair["eval_rows"] == pair["predicted"] == 10
        assert pair["eval_accuracy"] == pytest.approx(alone["eval_accuracy"])
        assert pair["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-6)
