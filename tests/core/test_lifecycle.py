"""What a run takes from its user: optimizer, schedule and callbacks, to the constructor or set later, and what it lets go."""

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from posttrain.core import Trainer, TrainerCallback, TrainingArguments
from tests import tiny
from tests.contract.trainers import TRAINERS, arguments, pad, weights

MAKE = TRAINERS["causal-lm"]


def sgd(trainer, lr=0.5):
    return torch.optim.SGD(trainer.model.parameters(), lr=lr)


class MakesItsOwn(Trainer):
    """Sets optimizer and schedule in its `__init__`, as subclasses of earlier years do."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.optimizer = sgd(self)
        self.lr_scheduler = LambdaLR(self.optimizer, lambda step: 0.25)


def rates(trainer):
    return [record["learning_rate"] for record in trainer.state.log_history if "learning_rate" in record]


# finding_A11
@pytest.mark.parametrize("how", ["subclass", "set", "set after a run"])
def test_an_optimizer_and_a_schedule_set_after_construction_are_used(how, tmp_path):
    if how == "subclass":
        args = arguments(TrainingArguments, tmp_path, max_steps=3)
        trainer = MakesItsOwn(tiny.causal_lm(), args, pad, tiny.token_rows(24))
    else:
        trainer = MAKE(tmp_path, max_steps=3)
        if how == "set after a run":
            trainer.train()
        trainer.optimizer = sgd(trainer)
        trainer.lr_scheduler = LambdaLR(trainer.optimizer, lambda step: 0.25)
    optimizer, schedule = trainer.optimizer, trainer.lr_scheduler
    trainer.train()
    assert trainer.optimizer is optimizer and trainer.lr_scheduler is schedule
    assert rates(trainer)[-3:] == [0.125, 0.125, 0.125]


# finding_A11
def test_a_schedule_that_the_trainer_made_is_made_anew_for_the_next_run(tmp_path):
    trainer = MAKE(tmp_path, max_steps=4)
    trainer.create_optimizer_and_scheduler(100)  # as scripts do to look at the groups
    optimizer = trainer.optimizer
    optimizer.param_groups[0]["weight_decay"] = 0.125
    trainer.train()
    assert trainer.optimizer is optimizer and rates(trainer) == pytest.approx([0.05, 0.0375, 0.025, 0.0125])
    assert trainer.optimizer.param_groups[0]["weight_decay"] == 0.125
    first = trainer.lr_scheduler
    trainer.train()
    assert trainer.lr_scheduler is not first and len(rates(trainer)) == 4


# finding_A11
def test_parts_that_would_train_nothing_are_refused(tmp_path):
    trainer = MAKE(tmp_path)
    before = weights(trainer)
    trainer.optimizer = sgd(MAKE(tmp_path / "other"))
    with pytest.raises(ValueError, match="holds none of the parameters that are trained"):
        trainer.train()
    trainer.optimizer = sgd(trainer)
    trainer.lr_scheduler = LambdaLR(sgd(trainer), lambda step: 0.25)
    with pytest.raises(ValueError, match="made for another optimizer"):
        trainer.train()
    args = arguments(TrainingArguments, tmp_path)
    anew = Trainer(None, args, pad, tiny.token_rows(24), model_init=tiny.causal_lm)
    anew.optimizer = sgd(anew)
    with pytest.raises(ValueError, match="model_init makes new"):
        anew.train()
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


def named_as_the_base():
    class TrainerCallback:  # of the user's own, with no base class
        steps = 0

        def on_step_end(self, args, state, control, **kwargs):
            self.steps += 1

    class Derived(__import__("posttrain.core").core.TrainerCallback):
        steps = 0

        def on_step_end(self, args, state, control, **kwargs):
            self.steps += 1

    Derived.__name__ = "TrainerCallback"
    Derived.on_step_end.__qualname__ = "TrainerCallback.on_step_end"
    return [TrainerCallback(), Derived()]


class Counts(TrainerCallback):
    def __init__(self):
        self.steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1


# finding_A12
def test_a_callback_named_trainercallback_is_heard(tmp_path):
    callbacks = named_as_the_base()
    MAKE(tmp_path, callbacks=callbacks, max_steps=2).train()
    assert [callback.steps for callback in callbacks] == [2, 2]


# finding_A12
def test_the_list_of_callbacks_is_read_as_it_is_now(tmp_path):
    first, added, replaced, late = Counts(), Counts(), Counts(), Counts()

    class Adds(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                handler.callbacks.remove(added)
                handler.callbacks.append(late)

    trainer = MAKE(tmp_path, callbacks=[Adds(), first], max_steps=3)
    handler = trainer.callback_handler
    handler.callbacks.append(added)
    handler.callbacks[handler.callbacks.index(first)] = replaced
    trainer.train()
    assert [callback.steps for callback in (first, replaced, added, late)] == [0, 3, 2, 1]
    handler.callbacks = [first]
    trainer.train()
    assert first.steps == 3 and late.steps == 1 and not trainer.callback_handler.nobody_hears("on_step_end")


# finding_A12
def test_transformers_empty_methods_are_not_called_at_each_event(tmp_path):
    from transformers import TrainerCallback as Theirs

    trainer = MAKE(tmp_path)
    trainer.callback_handler.callbacks = [Theirs(), TrainerCallback()]
    assert trainer.callback_handler.nobody_hears("on_step_end")
