"""Arguments that differ from those of the checkpoint: listed once, applied where they can be, refused where they
cannot.
"""

import logging

import pytest
import torch

from posttrain.core.errors import CheckpointError
from posttrain.core.training.resume import differences, explain
from tests.contract.trainers import TRAINERS, weights

make = TRAINERS["causal-lm"]
SAVED = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "lr_scheduler_type": "linear", "learning_rate": 0.1}


def resume(folder, checkpoint=2, **changes):
    trainer = make(folder, **(SAVED | changes))
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{checkpoint}"))
    return trainer


def changed_lines(caplog):
    return [r.getMessage() for r in caplog.records if "Arguments have changed" in r.getMessage()]


def test_only_what_changes_a_run_is_listed():
    before = {"learning_rate": 1, "logging_steps": 5, "output_dir": "a", "weight_decay": 0, "gone": 1}
    now = {"learning_rate": 2, "logging_steps": 9, "output_dir": "b", "weight_decay": 0, "new": 2}
    assert differences(before, now) == {"learning_rate": (1, 2)}


def test_an_unchanged_run_says_nothing(tmp_path, caplog):
    make(tmp_path, **SAVED).train()
    resume(tmp_path, logging_steps=2, save_steps=3)
    assert changed_lines(caplog) == []


def test_a_new_learning_rate_holds_from_the_next_update(tmp_path, caplog):
    make(tmp_path, **SAVED).train()
    trainer = resume(tmp_path, learning_rate=0.01)
    rates = {r["step"]: r["learning_rate"] for r in trainer.state.log_history if "loss" in r}
    assert [rates[s] for s in (1, 2)] == pytest.approx([0.1, 0.1 * 5 / 6])  # of the run before
    assert [rates[s] for s in (3, 4, 5, 6)] == pytest.approx([0.01 * left / 6 for left in (4, 3, 2, 1)])
    [line] = changed_lines(caplog)
    assert "learning_rate: 0.1 -> 0.01 (the new one applies" in line and "checkpoint-2" in line


@pytest.mark.parametrize("schedule", ["constant", "cosine", "reduce_lr_on_plateau"])
def test_whatever_the_schedule_the_rate_is_the_new_one(schedule, tmp_path):
    options = {"lr_scheduler_type": schedule, "eval_strategy": "steps", "eval_steps": 2}
    make(tmp_path, **(SAVED | options)).train()
    old = {r["step"]: r["learning_rate"] for r in resume(tmp_path, **options).state.log_history if "loss" in r}
    new = resume(tmp_path, learning_rate=0.01, **options).state.log_history
    assert {r["step"]: r["learning_rate"] for r in new if r["step"] > 2 and "loss" in r} == pytest.approx(
        {step: rate / 10 for step, rate in old.items() if step > 2}
    )


@pytest.mark.parametrize("schedule", ["linear", "constant", "reduce_lr_on_plateau"])
def test_a_learning_rate_of_0_is_left_behind_too(schedule, tmp_path):
    options = {"lr_scheduler_type": schedule, "eval_strategy": "steps", "eval_steps": 2}
    make(tmp_path, **(SAVED | options | {"learning_rate": 0.0})).train()
    rates = [r["learning_rate"] for r in resume(tmp_path, **options).state.log_history if "loss" in r and r["step"] > 2]
    assert rates == pytest.approx([0.1 * left / 6 for left in (4, 3, 2, 1)] if schedule == "linear" else [0.1] * 4)


def frozen(layer, folder, **changes):
    trainer = make(folder, **(SAVED | {"optim": "adamw_torch"} | changes))
    trainer.model.model.layers[layer].requires_grad_(False)
    return trainer


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (1, r"then alone model.layers.1.self_attn.q_proj.weight, .* \(11 in all\), and now alone model.layers.0"),
        (slice(0, 2), r"then alone model.layers.1.self_attn.q_proj.weight, .*\. Train the same"),
        (slice(0, 0), "trains: now alone model.layers.0.self_attn"),
    ],
)
def test_a_state_of_other_parameters_is_not_taken_for_that_of_those_trained_now(layer, said, tmp_path):
    frozen(0, tmp_path).train()
    with pytest.raises(CheckpointError, match=said):
        frozen(layer, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_the_same_parameters_in_other_groups_are_not_taken_for_those_of_the_checkpoint(tmp_path):
    make(tmp_path, **SAVED).train()
    trainer = make(tmp_path, **SAVED)
    trainer.get_decay_parameter_names = lambda model: []
    with pytest.raises(CheckpointError, match="the same ones in another order or in other groups"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_checkpoint_without_the_names_of_its_parameters_goes_on(tmp_path, monkeypatch):
    with monkeypatch.context() as earlier:
        earlier.setattr("posttrain.core.checkpoint.manager.NAMES", "unknown")
        make(tmp_path, **SAVED).train()
    trainer = resume(tmp_path)
    straight = make(tmp_path / "straight", **SAVED)
    straight.train()
    assert weights(trainer).keys() == weights(straight).keys()
    assert all(torch.equal(value, weights(straight)[name]) for name, value in weights(trainer).items())


def test_a_new_weight_decay_holds_and_the_others_stay(tmp_path):
    options = {"optim": "adamw_torch", "learning_rate": 0.01}
    make(tmp_path, **(SAVED | options)).train()
    trainer = resume(tmp_path, **options, weight_decay=0.3, adam_beta1=0.5)
    first, second = trainer.optimizer.param_groups
    assert (first["weight_decay"], second["weight_decay"]) == (0.3, 0.0)
    assert first["betas"] == (0.5, 0.999) and first["eps"] == 1e-8


def test_the_same_arguments_written_otherwise_change_nothing(tmp_path):
    straight = make(tmp_path, **SAVED)
    straight.train()
    resumed = resume(tmp_path, optim="sgd", lr_scheduler_kwargs=None, warmup_steps=0.0)
    assert all(torch.equal(value, weights(straight)[name]) for name, value in weights(resumed).items())


def test_another_optimizer_cannot_go_on_from_the_state_of_the_first(tmp_path):
    make(tmp_path, **SAVED).train()
    with pytest.raises(CheckpointError, match="optim='sgd', and this run has optim='adamw_torch'"):
        resume(tmp_path, optim="adamw_torch")
    assert "adamw_torch" in explain({"optim": ("adamw_torch", "adamw_torch_fused")}, "checkpoint-2", False)


def test_another_seed_says_what_becomes_of_the_rows(tmp_path, caplog):
    make(tmp_path, **SAVED).train()
    with caplog.at_level(logging.WARNING):
        resume(tmp_path, seed=7)
        resume(tmp_path, checkpoint=2, seed=7)
    lines = changed_lines(caplog)
    assert "seed: 42 -> 7" in lines[0] and "some are read twice and some not at all" in lines[0]
    at_an_edge = explain({"seed": (42, 7)}, "checkpoint-3", inside_epoch=False)
    assert "read twice" not in at_an_edge
