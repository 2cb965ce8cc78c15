"""What a run takes from its user: optimizer, schedule and callbacks, to the constructor or set later, and what it lets
go.
"""

import datetime
import gc
import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LambdaLR

from posttrain.core import Trainer, TrainerCallback, TrainerState, TrainingArguments
from posttrain.core.checkpoint.manifest import write_manifest
from posttrain.core.errors import CheckpointError
from tests import tiny
from tests.contract.trainers import TRAINERS, arguments, causal_lm, pad, weights

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


def test_a_callback_named_trainercallback_is_heard(tmp_path):
    callbacks = named_as_the_base()
    MAKE(tmp_path, callbacks=callbacks, max_steps=2).train()
    assert [callback.steps for callback in callbacks] == [2, 2]


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


def test_transformers_empty_methods_are_not_called_at_each_event(tmp_path):
    from transformers import TrainerCallback as Theirs

    trainer = MAKE(tmp_path)
    trainer.callback_handler.callbacks = [Theirs(), TrainerCallback()]
    assert trainer.callback_handler.nobody_hears("on_step_end")


BEST = dict(
    save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1, metric_for_best_model="loss",
    load_best_model_at_end=True, learning_rate=1e-9, max_steps=4,
)  # fmt: skip


class BestAt(Trainer):
    """Of all evaluations that of update 2 is the best."""

    def evaluate(self, *args, **kwargs):
        metrics = super().evaluate(*args, **kwargs)
        metrics["eval_loss"] = abs(self.state.global_step - 2)
        return metrics


def with_a_best(folder, **changes):
    return causal_lm(BestAt)(folder, **BEST | changes)


def interrupted(folder, **changes):
    """A run of 4 updates that was stopped at the third, the best of which is the second."""
    trainer = with_a_best(folder, callbacks=[Stops(3)], **changes)
    trainer.train()
    assert trainer.state.global_step == 3


class Stops(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.step


@pytest.mark.parametrize("written", ["now", "with absolute paths"])
def test_the_best_checkpoint_of_a_folder_that_was_moved_is_kept_and_loaded(written, tmp_path):
    interrupted(tmp_path / "before")
    saved = tmp_path / "before" / "checkpoint-3" / "trainer_state.json"
    assert json.loads(saved.read_text())["best_model_checkpoint"] == "checkpoint-2"
    if written != "now":
        text = saved.read_text().replace('"checkpoint-2"', json.dumps(str(tmp_path / "before" / "checkpoint-2")))
        saved.write_text(text)
        shutil.rmtree(saved.parent.parent / "checkpoint-1")
        for name in ("checkpoint-3", "checkpoint-2"):  # sealed again, as if it had been written so
            write_manifest(saved.parent.parent / name, int(name[-1]), {})
    (tmp_path / "before").rename(tmp_path / "after")
    moved = with_a_best(tmp_path / "after", save_total_limit=1)
    moved.train(resume_from_checkpoint=True)
    best = tmp_path / "after" / "checkpoint-2"
    assert moved.state.best_model_checkpoint == str(best) and best.is_dir() and moved.state.global_step == 4
    expected = load_file(best / "model.safetensors")
    assert all(torch.equal(value, expected[name]) for name, value in weights(moved).items() if name in expected)


def test_a_best_checkpoint_that_is_gone_is_said_when_the_run_goes_on(tmp_path, caplog):
    interrupted(tmp_path)
    shutil.rmtree(tmp_path / "checkpoint-2")
    resumed = with_a_best(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4 and resumed.state.best_model_checkpoint is None
    assert "checkpoint-2 (loss=0), is no longer there" in caplog.text
    assert "there is no checkpoint of the best step (2, 0" in caplog.text


def test_transformers_reads_our_state(tmp_path):
    from transformers import TrainerState as Theirs

    interrupted(tmp_path)
    ours = TrainerState.load_from_json(tmp_path / "checkpoint-3" / "trainer_state.json")
    ours.tracker_runs = {"wandb": "abc"}
    ours.save_to_json(tmp_path / "checkpoint-3" / "trainer_state.json")
    theirs = Theirs.load_from_json(tmp_path / "checkpoint-3" / "trainer_state.json")
    assert theirs.global_step == 3 and theirs.log_history == ours.log_history and theirs.best_global_step == 2
    again = TrainerState.load_from_json(tmp_path / "checkpoint-3" / "trainer_state.json")
    assert again == ours and again.tracker_runs == {"wandb": "abc"}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Fails(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        raise RuntimeError("in the first step")


def test_a_fresh_run_in_an_old_folder_leaves_the_old_log_there(tmp_path):
    MAKE(tmp_path, max_steps=3).train()
    old = lines(tmp_path / "log.jsonl")
    assert [record["step"] for record in old] == [1, 2, 3, 3]
    with pytest.raises(RuntimeError, match="in the first step"):
        MAKE(tmp_path, max_steps=2, callbacks=[Fails()]).train()
    assert lines(tmp_path / "log.jsonl") == old and not (tmp_path / "log-1.jsonl").exists()
    for _ in range(2):
        MAKE(tmp_path, max_steps=2).train()
    assert lines(tmp_path / "log-1.jsonl") == old
    assert [[record["step"] for record in lines(tmp_path / name)] for name in ("log.jsonl", "log-2.jsonl")] == [
        [1, 2, 2]
    ] * 2


def test_a_resumed_run_that_dies_in_its_first_step_has_dropped_no_record(tmp_path):
    save = dict(save_strategy="steps", save_steps=2, max_steps=4)
    MAKE(tmp_path, **save).train()
    old = lines(tmp_path / "log.jsonl")
    with pytest.raises(RuntimeError, match="in the first step"):
        MAKE(tmp_path, callbacks=[Fails()], **save).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert lines(tmp_path / "log.jsonl") == old
    MAKE(tmp_path, **save).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [record["step"] for record in lines(tmp_path / "log.jsonl")] == [1, 2, 3, 4, 4]


class Unsaveable(LambdaLR):
    def state_dict(self):
        return super().state_dict() | {"seen": {1, 2}}


class Dated(torch.optim.SGD):
    """Has a date in its groups, or puts one into its state in the first step."""

    def __init__(self, parameters, early):
        super().__init__(parameters, lr=0.1)
        self.early = early
        if early:
            self.param_groups[0]["since"] = datetime.datetime(2026, 1, 1)

    def step(self, closure=None):
        self.state[self.param_groups[0]["params"][0]]["since"] = datetime.datetime(2026, 1, 1)
        return super().step(closure)


class KeepsAFunction(Trainer):
    def state_dict(self):
        return super().state_dict() | {"mine": [pad]}


def test_state_that_cannot_be_saved_is_found_before_the_first_update(tmp_path, caplog):
    counts = Counts()

    def refused(trainer, match, steps):
        with pytest.raises(TypeError, match=match):
            trainer.add_callback(counts)
            trainer.train()
        assert counts.steps == steps and trainer.store.checkpoints() == []

    save = dict(save_strategy="steps", save_steps=4)
    trainer = MAKE(tmp_path, **save)
    trainer.optimizer = sgd(trainer)
    trainer.lr_scheduler = Unsaveable(trainer.optimizer, lambda step: 1.0)
    refused(trainer, r"lr_scheduler \(Unsaveable\)\['seen'\] is of type builtins.set", 0)
    for early in (True, False):
        trainer = MAKE(tmp_path, **save)
        trainer.optimizer = Dated(trainer.model.parameters(), early)
        refused(trainer, r"optimizer \(Dated\).*\['since'\] is of type datetime.datetime", 0)
    refused(causal_lm(KeepsAFunction)(tmp_path, **save), r"trainer \(KeepsAFunction\)\['mine'\]\[0\]", 0)
    trainer = MAKE(tmp_path, max_steps=2)  # that saves nothing
    trainer.optimizer = Dated(trainer.model.parameters(), True)
    assert trainer.train().global_step == 2


class Since(TrainerCallback):
    def state(self):
        return {"args": {}, "attributes": {"since": datetime.date(2026, 1, 1), "tensor": torch.tensor(3.0)}}

    @classmethod
    def from_state(cls, state):
        return cls()


def test_a_callbacks_state_that_json_cannot_say_is_warned_of(tmp_path, caplog):
    MAKE(tmp_path, callbacks=[Since()], save_strategy="steps", save_steps=2, max_steps=2).train()
    assert "Since['attributes']['since'] is of type date" in caplog.text and "tensor" not in caplog.text


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.long
@pytest.mark.rotated
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    "name", ["causal-lm", "sft", "sft-lora", "seq2seq", "dpo", "kto", "reward", "grpo", "grpo-sync"]
)
def test_a_trainer_that_is_let_go_of_frees_its_model_and_optimizer_at_once(name, trained, no_collector, tmp_path):
    trainer = TRAINERS[name](
        tmp_path, max_steps=2, optim="adamw_torch", save_strategy="steps", save_steps=1, save_async=True, ema_decay=0.9,
        eval_strategy="steps", eval_steps=1, neftune_noise_alpha=1.0, max_time=600.0,
    )  # fmt: skip
    if trained:
        trainer.train()
    else:
        trainer.create_optimizer()
    parameter = next(parameter for parameter in trainer.model.parameters() if parameter.requires_grad)
    held = [weakref.ref(value) for value in (trainer, trainer.model, trainer.optimizer, parameter)]
    del trainer, parameter
    assert [one() for one in held] == [None] * 4


@pytest.mark.parametrize("heeds", [False, True])
def test_parameters_that_are_unfrozen_later_are_named_where_no_optimizer_holds_them(heeds, tmp_path, caplog):
    class Unfreeze(TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs):
            model.model.layers[0].requires_grad_(False)

        def on_step_end(self, args, state, control, model, **kwargs):
            if state.global_step == 2:
                model.model.layers[0].requires_grad_(True)
                self.before = model.model.layers[0].mlp.up_proj.weight.clone()

    callback = Unfreeze()
    trainer = TRAINERS["causal-lm"](tmp_path, callbacks=[callback], max_steps=5)
    if not heeds:
        trainer.model.model.layers[0].requires_grad_(False)
    trainer.train()
    told = [r.getMessage() for r in caplog.records if "the optimizer holds none of them" in r.getMessage()]
    assert len(told) == (0 if heeds else 1)
    assert heeds or ("(11 in all)" in told[0] and "model.layers.0.self_attn.q_proj.weight" in told[0])
    assert torch.equal(trainer.model.model.layers[0].mlp.up_proj.weight, callback.before) == (not heeds)


class Switches(TrainerCallback):
    """Begins with a frozen layer, which trains from step 2 on; freezes the other one after step 1."""

    def on_train_begin(self, args, state, control, model, **kwargs):
        model.model.layers[1].requires_grad_(False)

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step == 1:
            model.model.layers[0].requires_grad_(False)
        if state.global_step == 2:
            model.model.layers[1].requires_grad_(True)


@pytest.mark.parametrize("times", [1, 2])
def test_a_resumed_run_freezes_what_a_callback_had_frozen(times, tmp_path, caplog):
    caplog.set_level("INFO")
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1, "callbacks": [Switches()]}
    whole = TRAINERS["causal-lm"](tmp_path / "whole", **options)
    whole.train()
    for number, step in enumerate((3, 4, 6)[-times - 1 :]):
        trainer = TRAINERS["causal-lm"](tmp_path / "parts", **options)
        trainer.add_callback(Stops(step))
        trainer.train(resume_from_checkpoint=number > 0)
    expected = {name: (one.requires_grad, one.norm().item()) for name, one in whole.model.named_parameters()}
    assert {name: (one.requires_grad, one.norm().item()) for name, one in trainer.model.named_parameters()} == expected
    assert not expected["model.layers.0.mlp.up_proj.weight"][0] and expected["model.layers.1.mlp.up_proj.weight"][0]
    assert caplog.text.count("Frozen or trained as when the checkpoint was saved: model.layers.0.self_attn.q_") == times


def test_a_module_that_a_callback_brings_is_named(tmp_path, caplog):
    class Replace(TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs):
            model.lm_head = torch.nn.Linear(32, 384, bias=False)

    TRAINERS["causal-lm"](tmp_path, callbacks=[Replace()], max_steps=2).train()
    assert "so they stay as they are: lm_head.weight. Replace modules before train()" in caplog.text


def test_a_best_checkpoint_that_is_damaged_at_the_end_says_where_the_last_weights_are(tmp_path):
    class Damage(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            (Path(state.best_model_checkpoint) / "model.safetensors").write_bytes(b"")

    changes = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = MAKE(tmp_path, callbacks=[Damage()], max_steps=3, load_best_model_at_end=True, **changes)
    with pytest.raises(CheckpointError, match="model.safetensors is damaged") as caught:
        trainer.train()
    [note] = [n for n in caught.value.__notes__ if "load_best_model_at_end was to load" in n]
    assert "finished, after step 3" in note and str(tmp_path / "checkpoint-3") in note


def test_a_second_run_names_arguments_that_its_optimizer_does_not_follow(tmp_path, caplog):
    def told():
        lines = [r.getMessage() for r in caplog.records if "goes on with the optimizer" in r.getMessage()]
        caplog.clear()
        return lines

    trainer = MAKE(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.train()
    assert told() == []
    trainer.args.learning_rate, trainer.args.max_steps = 0.5, 3
    trainer.train()
    [line] = told()
    assert "learning_rate from 0.05 to 0.5. Set trainer.optimizer = None" in line
    trainer.optimizer = None
    trainer.train()
    assert told() == [] and rates(trainer)[0] == 0.5
    trainer.args.learning_rate, trainer.args.max_steps = 0.1, 4
    trainer.train(resume_from_checkpoint=True)  # which applies it
    trainer.train()
    assert told() == []
