import json
import math

import numpy as np
import pytest
import torch

from posttrain.core.state import EvalPrediction, ExportableState, TrainerControl, TrainerState, strict


class Counter(ExportableState):
    def __init__(self, start=0):
        self.start, self.count = start, 0

    def state(self):
        return {"args": {"start": self.start}, "attributes": {"count": self.count}}


def test_state_survives_json(tmp_path):
    state = TrainerState(epoch=1.5, global_step=7, log_history=[{"loss": 2.0, "step": 1}], best_metric=0.5)
    state.save_to_json(tmp_path / "state.json")
    assert TrainerState.load_from_json(tmp_path / "state.json") == state


def test_nan_is_null_so_that_every_reader_can_parse_it(tmp_path):
    TrainerState(log_history=[{"loss": math.nan}]).save_to_json(tmp_path / "state.json")
    text = (tmp_path / "state.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["log_history"] == [{"loss": None}]


def test_fields_of_other_versions_are_left_out(tmp_path):
    (tmp_path / "state.json").write_text('{"global_step": 3, "from_the_future": 1}')
    assert TrainerState.load_from_json(tmp_path / "state.json").global_step == 3


def test_callbacks_of_one_class_keep_their_order():
    first, second = Counter(1), Counter(2)
    second.count = 9
    state = TrainerState(stateful_callbacks=[first, TrainerControl(), second])
    restored = [Counter.from_state(entry) for entry in state.stateful_callbacks["Counter"]]
    assert [(c.start, c.count) for c in restored] == [(1, 0), (2, 9)]
    assert TrainerControl.from_state(state.stateful_callbacks["TrainerControl"]) == TrainerControl()


def test_strict_takes_numpy_and_torch_scalars():
    assert strict({"a": np.float32(0.5), "b": torch.tensor(3), 1: (math.inf, None, True)}) == {
        "a": 0.5, "b": 3, "1": [None, None, True],
    }  # fmt: skip


def test_eval_prediction_unpacks():
    predictions, labels = EvalPrediction(1, 2)
    assert (predictions, labels) == (1, 2)
    assert len(EvalPrediction(1, 2, inputs=3)) == 3 and EvalPrediction(1, 2)[1] == 2


def test_steps_are_computed_from_any_object_with_the_arguments():
    class Intervals:  # as a stand-in of a test has them, or a class of constants
        logging_steps, eval_steps, save_steps = 3, 0.25, None

    state = TrainerState()
    state.compute_steps(Intervals, max_steps=10)
    assert (state.logging_steps, state.eval_steps, state.save_steps) == (3, 3, TrainerState().save_steps)
