import errno
import logging
import os
from types import SimpleNamespace

import pytest
import torch
import transformers

from posttrain.core import Trainer, TrainingArguments
from posttrain.core.callbacks import (
    EVENTS,
    CallbackHandler,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    TrainerCallback,
)
from posttrain.core.errors import UnsavedError
from posttrain.core.logging.trackers import JSONLinesCallback
from posttrain.core.state import TrainerControl, TrainerState
from tests import tiny
from tests.contract.trainers import pad


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
        ["eval_dataloader", "lr_scheduler", "model", "optimizer", "processing_class", "tokenizer", "train_dataloader"]
    ]


def test_a_callback_may_take_out_and_add_others_of_the_same_event():
    class Changes(Ears):
        def on_step_end(self, args, state, control, **kwargs):
            handler.remove_callback(taken_out)
            handler.remove_callback(self)
            handler.add_callback(added)

    handler = CallbackHandler([Changes()])
    taken_out, stays, added = Ears(), Ears(), Ears()
    handler.callbacks += [taken_out, stays]
    for _ in range(2):
        handler.call_event("on_step_end", SimpleNamespace(), TrainerState(), TrainerControl())
    assert [len(ears.heard) for ears in (taken_out, stays, added)] == [0, 2, 2]


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
    assert [event for event in EVENTS if not handler.nobody_hears(event)] == ["on_step_end"]
    assert step_end(Theirs()).should_log


def test_only_those_that_do_something_are_called():
    handler = CallbackHandler([TrainerCallback, Ears, DefaultFlowCallback])
    assert [type(c).__name__ for c in handler._listening("on_step_end")] == ["Ears", "DefaultFlowCallback"]
    assert handler.nobody_hears("on_substep_end")


def test_methods_that_a_callback_gets_later_or_answers_itself_are_called(tmp_path):
    class Answers(TrainerCallback):
        def __getattribute__(self, name):
            return (
                (lambda *args, **kwargs: heard.append(name))
                if name.startswith("on_")
                else super().__getattribute__(name)
            )

    later, heard = TrainerCallback(), []
    args = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to="none", save_strategy="no")
    trainer = Trainer(tiny.causal_lm(), args, pad, tiny.token_rows(8), callbacks=[Answers(), later])
    assert heard == ["on_init_end"]
    later.on_step_end = lambda args, state, control, **kwargs: heard.append(state.global_step)
    trainer.train()
    steps = [one for one in heard if one in (1, 2, "on_step_begin", "on_step_end")]
    assert steps == ["on_step_begin", "on_step_end", 1, "on_step_begin", "on_step_end", 2]


def test_add_pop_remove_by_class_and_instance(caplog):
    ears = Ears()
    handler = CallbackHandler([ears, DefaultFlowCallback])
    with caplog.at_level(logging.WARNING):
        handler.add_callback(Ears)
    assert "already has one" in caplog.text and len(handler.callbacks) == 3
    assert handler.pop_callback(Ears) is ears
    handler.remove_callback(Ears)
    assert handler.pop_callback(Ears) is None and handler.callback_list == "DefaultFlowCallback"


def test_built_in_callbacks_are_taken_out_by_the_names_that_transformers_gives_them(tmp_path):
    trainer = Trainer(tiny.causal_lm(), TrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True))
    trainer.remove_callback(transformers.PrinterCallback)
    assert "PrinterCallback" not in trainer.callback_handler.callback_list
    assert type(trainer.pop_callback(transformers.DefaultFlowCallback)) is DefaultFlowCallback
    assert trainer.pop_callback(transformers.TrainerCallback) is None
    trainer.add_callback(type("Ears", (TrainerCallback,), {}))  # a namesake of the class above, and no stand-in for it
    assert trainer.pop_callback(Ears) is None


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
        logging_steps=2,
        eval_steps=3,
        save_steps=5,
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


class OfOurs(EarlyStoppingCallback):
    """Has a constructor of its own, which says how patient it is."""

    def __init__(self, folder):
        super().__init__(early_stopping_patience=4)
        self.folder = folder


class OfTransformers(transformers.EarlyStoppingCallback):
    def __init__(self, folder):
        super().__init__(early_stopping_patience=4)
        self.folder = folder


@pytest.mark.parametrize("kind", [OfOurs, OfTransformers])
def test_a_stateful_callback_with_a_constructor_of_its_own_goes_on_as_it_was_saved(kind):
    saved, present = OfOurs("there"), kind("here")
    saved.early_stopping_patience_counter = 3
    handler = CallbackHandler([present])
    handler.restore({kind.__name__: [saved.state()]})
    [restored] = handler.callbacks
    assert restored is not present and present.early_stopping_patience_counter == 0
    assert (restored.folder, restored.early_stopping_patience) == ("here", 4)
    assert restored.early_stopping_patience_counter == 3


def test_how_early_stopping_judges_a_metric_can_be_overridden_and_starts_from_the_best_of_the_run():
    args = SimpleNamespace(metric_for_best_model="accuracy", greater_is_better=True, eval_strategy="steps")
    for value, best, threshold, counted in ((0.8, 0.9, 0.0, 3), (0.95, 0.8, 0.0, 0), (0.85, 0.8, 0.1, 3)):
        callback = EarlyStoppingCallback(4, early_stopping_threshold=threshold)
        callback.early_stopping_patience_counter = 2
        callback.check_metric_value(args, TrainerState(best_metric=best), TrainerControl(), value)
        assert callback.early_stopping_patience_counter == counted

    class Lenient(EarlyStoppingCallback):
        def check_metric_value(self, args, state, control, metric_value):
            super().check_metric_value(args, state, control, metric_value + 10 * state.global_step)

    lenient, control = Lenient(1), TrainerControl()
    for step, value in enumerate((0.9, 0.5, 0.1)):
        lenient.on_evaluate(args, TrainerState(global_step=step), control, {"eval_accuracy": value})
    assert lenient.best_metric == 20.1 and not control.should_training_stop


def test_early_stopping_without_a_metric_is_refused_at_once():
    args = SimpleNamespace(metric_for_best_model=None, eval_strategy="steps")
    with pytest.raises(ValueError, match="metric_for_best_model"):
        EarlyStoppingCallback().on_init_end(args, TrainerState(), TrainerControl())


def test_transformers_own_early_stopping_stops_a_run_and_remembers_over_a_resume(tmp_path):
    values = iter([3.0, 2.0, 2.5, 2.6, 2.7])

    def make(**options):
        arguments = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, max_steps=8)
        arguments |= dict(metric_for_best_model="score", greater_is_better=False, use_cpu=True, disable_tqdm=True)
        theirs = transformers.EarlyStoppingCallback(early_stopping_patience=3)
        return Trainer(
            tiny.causal_lm(), TrainingArguments(str(tmp_path), **(arguments | options)), pad, tiny.token_rows(8),
            tiny.token_rows(2), compute_metrics=lambda prediction: {"score": next(values)}, callbacks=[theirs],
        )  # fmt: skip

    make(max_steps=3).train()
    resumed = make()
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 5  # one evaluation without gain before the resume, two after
    (callback,) = [cb for cb in resumed.callbacks if isinstance(cb, transformers.EarlyStoppingCallback)]
    assert callback.early_stopping_patience_counter == 3


def test_a_callback_of_transformers_hears_every_event_in_order(tmp_path):
    heard = []
    methods = {event: lambda self, args, state, control, event=event, **kwargs: heard.append(event) for event in EVENTS}
    theirs = type("Theirs", (transformers.TrainerCallback,), methods)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, gradient_accumulation_steps=2, per_device_train_batch_size=4, logging_steps=1,
        eval_strategy="steps", use_cpu=True, disable_tqdm=True, save_steps=1,
    )  # fmt: skip
    trainer = Trainer(tiny.causal_lm(), arguments, pad, tiny.token_rows(8), tiny.token_rows(2), callbacks=[theirs])
    trainer.train()
    trainer.predict(tiny.token_rows(2))
    expected = ["init_end", "train_begin", "epoch_begin", "step_begin", "substep_end", "pre_optimizer_step"]
    expected += ["optimizer_step", "step_end", "log", "prediction_step", "log", "evaluate", "save", "epoch_end", "log"]
    assert heard == [f"on_{event}" for event in [*expected, "train_end", "prediction_step", "predict"]]


class Fails(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise KeyError("lost")


def test_an_error_of_a_callback_names_it_and_may_be_let_pass(tmp_path, caplog):
    rows = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 4

    class Model(torch.nn.Linear):
        def forward(self, x, labels):
            return {"loss": (super().forward(x) - labels).square().mean()}

    def train(callback):
        args = TrainingArguments(str(tmp_path), max_steps=2, save_strategy="no", use_cpu=True, disable_tqdm=True)
        trainer = Trainer(Model(2, 1), args, train_dataset=rows, callbacks=[callback])
        trainer.train()
        return trainer

    with pytest.raises(KeyError, match="lost") as raised:
        train(Fails())
    [note] = raised.value.__notes__
    assert note.startswith("Raised by the callback Fails in on_step_end, at step 1.")
    assert "DefaultFlowCallback, JSONLinesCallback" in note and "Fails.may_fail = True" in note
    lenient = Fails()
    lenient.may_fail = True
    assert train(lenient).state.global_step == 2
    assert sum("Fails raised in on_step_end at step" in text for text in caplog.messages) == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full is Linux's")
def test_a_disk_too_full_for_the_log_does_not_end_the_run(tmp_path, caplog):
    class Fills(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                [log] = [one for one in trainer.callback_handler.callbacks if isinstance(one, JSONLinesCallback)]
                os.dup2(os.open("/dev/full", os.O_WRONLY), log.file.fileno())

    def train(callbacks):
        args = TrainingArguments(
            str(tmp_path), max_steps=3, logging_steps=1, save_strategy="no", use_cpu=True, disable_tqdm=True
        )
        return Trainer(tiny.causal_lm(), args, pad, tiny.token_rows(8), callbacks=callbacks)

    trainer = train([Fills()])
    trainer.train()
    assert trainer.state.global_step == 3
    [said, *_] = [text for text in caplog.messages if "JSONLinesCallback raised in on_log at step 2" in text]
    assert "No space left on device" in said and "free some space" in said
    with pytest.raises(OSError, match="No space left"):  # of a user's callback, which may be what the run is for
        train([Exports()]).train()


def test_a_folder_that_cannot_be_written_any_more_does_not_end_the_run(tmp_path, caplog):
    class Breaks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                (tmp_path / "run").rename(tmp_path / "elsewhere")
                (tmp_path / "run").write_text("as a mount that is lost")

    options = dict(max_steps=3, logging_steps=1, save_steps=2, use_cpu=True, disable_tqdm=True)
    args = TrainingArguments(str(tmp_path / "run"), **options)
    trainer = Trainer(tiny.causal_lm(), args, pad, tiny.token_rows(8), callbacks=[Breaks()])
    with pytest.raises(UnsavedError, match="checkpoint-3 is not there"):
        trainer.train()
    assert trainer.state.global_step == 3 and len(trainer.state.log_history) == 4
    said = [text for text in caplog.messages if "JSONLinesCallback raised in on_log at step" in text]
    assert len(said) == 4 and all("a record is not worth the run." in text for text in said)


class Exports(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
