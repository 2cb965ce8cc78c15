import logging
from types import SimpleNamespace

import pytest

from posttrain.core.callbacks import (
    CallbackHandler,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    TrainerCallback,
)
from posttrain.core.state import TrainerControl, TrainerState


class Ears(TrainerCallback):
    def __init__(self, answer=None):
        self.answer, self.heard = answer, []

    def on_step_end(self, args, state, control, **kwargs):
        self.heard.append(sorted(kwargs))
        return self.answer


def step_end(callback, control=None):
    handler = CallbackHandler([callback])
    return handler.call_event("on_step_end", SimpleNamespace(), TrainerState(), control or TrainerControl())


def test_a_callback_sees_the_objects_of_the_run():
    ears = Ears()
    step_end(ears)
    assert ears.heard == [
        ["eval_dataloader", "lr_scheduler", "model", "optimizer", "processing_class", "train_dataloader"]
    ]


def test_a_dict_of_flags_is_applied():
    assert step_end(Ears({"should_training_stop": True})).should_training_stop
    assert not step_end(Ears({})).should_training_stop


def test_a_wrong_flag_names_the_callback_the_key_and_the_flags():
    with pytest.raises(ValueError, match=r"Ears.on_step_end .*'should_stop'.*should_training_stop"):
        step_end(Ears({"should_stop": True}))
    with pytest.raises(TypeError, match="Ears.on_step_end returned 3"):
        step_end(Ears(3))


def test_a_control_may_be_returned():
    other = TrainerControl(should_save=True)
    assert step_end(Ears(other)) is other


def test_classes_written_for_transformers_work_unchanged():
    import transformers

    class Theirs(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_log = True
            return control

    handler = CallbackHandler([Theirs])
    assert [len(listeners) for event, listeners in handler._listeners.items() if listeners] == [1]
    assert step_end(Theirs()).should_log


def test_only_those_that_do_something_are_called():
    handler = CallbackHandler([TrainerCallback, Ears, DefaultFlowCallback])
    assert [type(c).__name__ for c in handler._listeners["on_step_end"]] == ["Ears", "DefaultFlowCallback"]
    assert handler._listeners["on_substep_end"] == []


def test_add_pop_remove_by_class_and_instance(caplog):
    ears = Ears()
    handler = CallbackHandler([ears, DefaultFlowCallback])
    with caplog.at_level(logging.WARNING):
        handler.add_callback(Ears)
    assert "already has one" in caplog.text and len(handler.callbacks) == 3
    assert handler.pop_callback(Ears) is ears
    handler.remove_callback(Ears)
    assert handler.pop_callback(Ears) is None and handler.callback_list == "DefaultFlowCallback"


@pytest.mark.parametrize(
    ("strategy", "step", "expected"),
    [("steps", 2, (True, False, False)), ("steps", 3, (False, True, False)), ("steps", 7, (False, True, True)),
     ("no", 6, (False, False, False)), ("epoch", 6, (False, False, False))],
)  # fmt: skip
def test_default_flow_raises_the_flags_that_are_due(strategy, step, expected):
    args = SimpleNamespace(
        logging_strategy=strategy,
        eval_strategy=strategy,
        save_strategy=strategy,
        logging_first_step=False,
        eval_delay=0,
    )
    state = TrainerState(global_step=step, max_steps=7, logging_steps=2, eval_steps=3, save_steps=5)
    control = TrainerControl()
    DefaultFlowCallback().on_step_end(args, state, control)
    assert (control.should_log, control.should_evaluate, control.should_save) == expected
    assert control.should_training_stop == (step == 7)


def test_early_stopping_waits_for_its_patience_and_remembers_it():
    args = SimpleNamespace(metric_for_best_model="loss", greater_is_better=False, eval_strategy="steps")
    callback, control = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.1), TrainerControl()
    for value in (1.0, 0.95, 0.5):
        callback.on_evaluate(args, TrainerState(), control, {"eval_loss": value})
    assert callback.early_stopping_patience_counter == 0 and callback.best_metric == 0.5
    callback.on_evaluate(args, TrainerState(), control, {"eval_loss": 0.45})
    twin = EarlyStoppingCallback.from_state(callback.state())
    assert not control.should_training_stop
    twin.on_evaluate(args, TrainerState(), control, {"eval_loss": float("nan")})
    assert control.should_training_stop


def test_early_stopping_without_a_metric_is_refused_at_once():
    args = SimpleNamespace(metric_for_best_model=None, eval_strategy="steps")
    with pytest.raises(ValueError, match="metric_for_best_model"):
        EarlyStoppingCallback().on_init_end(args, TrainerState(), TrainerControl())
