"""Optimizers that average the weights: what is evaluated, saved, loaded as the best and left behind is the average."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from posttrain.core import Trainer, TrainingArguments
from tests import tiny
from tests.contract.trainers import arguments, pad, weights

pytest.importorskip("schedulefree")


def make(out, **changes):
    usual = dict(optim="schedule_free_adamw", learning_rate=0.5, max_steps=4, lr_scheduler_type="constant")
    return Trainer(
        tiny.causal_lm(),
        arguments(TrainingArguments, out, **usual | changes),
        data_collator=pad,
        train_dataset=tiny.token_rows(22),
        eval_dataset=tiny.token_rows(7, seed=1),
    )


def loss_of(state, out):
    trainer = make(out)
    trainer.model.load_state_dict(state)
    return trainer.evaluate()["eval_loss"]


def equal(state, other):
    return all(torch.equal(state[name], other[name]) for name in state)


def test_a_checkpoint_holds_what_was_evaluated_and_the_best_is_loaded_with_the_loss_it_had(tmp_path):
    every = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1)
    trainer = make(tmp_path, **every, load_best_model_at_end=True, metric_for_best_model="loss")
    trainer.train()
    recorded = {r["step"]: r["eval_loss"] for r in trainer.state.log_history if "eval_loss" in r}
    for step, loss in recorded.items():
        saved = load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors")
        assert loss_of(saved, tmp_path / "other") == pytest.approx(loss, rel=1e-6)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-6)


def test_an_evaluation_after_training_leaves_the_averages_in_the_model(tmp_path):
    trainer = make(tmp_path)
    trainer.train()
    trained = weights(trainer)
    trainer.evaluate()
    assert equal(trained, weights(trainer))
    trainer.save_model(str(tmp_path / "final"))
    assert equal(load_file(tmp_path / "final" / "model.safetensors"), trained)


def test_a_run_goes_on_from_the_averages_to_the_same_bits(tmp_path):
    every = dict(save_strategy="steps", save_steps=2, max_steps=6)
    straight = make(tmp_path / "straight", **every)
    straight.train()
    make(tmp_path / "cut", **every | dict(max_steps=4)).train()
    resumed = make(tmp_path / "cut", **every)
    resumed.train(resume_from_checkpoint=True)
    assert equal(weights(straight), weights(resumed))


def test_training_again_trains_the_weights_and_no_averages(tmp_path):
    trainer = make(tmp_path)
    trainer.train()
    assert not any(group["train_mode"] for group in trainer.optimizer.param_groups)
    before = weights(trainer)
    trainer.train()
    assert not equal(before, weights(trainer))
