"""Which evaluation was the best, without a trainer."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from posttrain.core.state import TrainerControl, TrainerState
from posttrain.core.training.evaluator import Evaluator


def owner(**args):
    usual = dict(metric_for_best_model="loss", greater_is_better=False, save_strategy="steps")
    return SimpleNamespace(
        args=SimpleNamespace(**(usual | args)),
        state=TrainerState(global_step=6),
        control=TrainerControl(),
        checkpoints=SimpleNamespace(saved_step=4, saver=SimpleNamespace(pending=None)),
        store=SimpleNamespace(path=lambda step: Path(f"out/checkpoint-{step}")),
    )


@pytest.mark.parametrize(
    ("args", "saved", "checkpoint"),
    [({}, 4, None), ({}, 6, "out/checkpoint-6"), ({"save_strategy": "best"}, 4, "out/checkpoint-6")],
)
def test_the_best_evaluation_names_a_checkpoint_where_one_is_kept(args, saved, checkpoint):
    of = owner(**args)
    of.checkpoints.saved_step = saved
    assert Evaluator(of).is_best({"eval_loss": 1.0})
    assert (of.state.best_metric, of.state.best_global_step) == (1.0, 6)
    assert of.state.best_model_checkpoint == checkpoint
    assert not Evaluator(of).is_best({"eval_loss": 1.5}) and of.state.best_metric == 1.0


def test_without_a_metric_no_evaluation_is_the_best():
    of = owner(metric_for_best_model=None)
    assert not Evaluator(of).is_best({"eval_loss": 1.0}) and of.state.best_metric is None
