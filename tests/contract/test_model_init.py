"""`model_init` makes a fresh model at each `train`, which is trained as one that was passed."""

from __future__ import annotations

import copy

import pytest
import torch

from posttrain.core import TrainerCallback
from posttrain.rl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny
from tests.contract.trainers import TRAINERS, weights

NAMES = (
    "sft sft-packed sft-lora sft-mixture dpo dpo-lora dpo-sync kto orpo cpo tpo reward grpo grpo-sync grpo-lora rloo "
    "online-dpo distillation gkd reinforce++ sft-images dpo-images grpo-images"
).split()
ARGS = {"max_steps": 2, "save_strategy": "no", "per_device_train_batch_size": 4}


@pytest.mark.parametrize("name", NAMES)
def test_each_train_begins_with_a_model_of_its_own(name, tmp_path, monkeypatch):
    passed = TRAINERS[name](tmp_path / "passed", **ARGS)
    trained = passed.train() and weights(passed)
    kind, make = type(passed), type(passed).__init__

    def with_model_init(self, *args, model, **kwargs):
        make(self, *args, model_init=lambda: copy.deepcopy(model), **kwargs)

    monkeypatch.setattr(kind, "__init__", with_model_init)
    trainer = TRAINERS[name](tmp_path / "made", **ARGS)
    for _ in range(2):
        trainer.train()
        found = weights(trainer)
        assert found.keys() == trained.keys()
        assert [name for name, one in found.items() if not torch.equal(one, trained[name])] == []


def test_a_trial_may_change_the_model_itself(tmp_path):
    pytest.importorskip("optuna")
    rows = [{"text": text} for text in tiny.CORPUS]
    args = SFTConfig(str(tmp_path), eval_strategy="epoch", report_to="none", use_cpu=True, **ARGS)
    trainer = SFTTrainer(
        model_init=lambda trial: tiny.causal_lm(hidden_act="gelu" if trial is None else trial.params["act"]),
        args=args,
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tiny.tokenizer(),
    )
    acts = []
    trainer.add_callback(Looks(acts))
    space = lambda trial: {"seed": trial.suggest_int("seed", 1, 9)} | _act(trial)  # noqa: E731
    best = trainer.hyperparameter_search(hp_space=space, n_trials=4)
    assert set(acts) <= {"silu", "gelu"} and best.hyperparameters["act"] in acts


def _act(trial):
    trial.suggest_categorical("act", ["silu", "gelu"])
    return {}


class Looks(TrainerCallback):
    def __init__(self, acts):
        self.acts = acts

    def on_train_begin(self, args, state, control, model, **kwargs):
        assert model.config.hidden_act == state.trial_params["act"]
        self.acts.append(model.config.hidden_act)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "model is of type NoneType"),
        ({"model": tiny.causal_lm(), "model_init": tiny.causal_lm}, "model and model_init were both given"),
        ({"model_init": tiny.causal_lm()}, "model_init is a model; pass the function"),
    ],
)
def test_one_of_model_and_model_init_is_needed(given, message, tmp_path):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    for kind, config in ((SFTTrainer, SFTConfig), (DPOTrainer, DPOConfig), (GRPOTrainer, GRPOConfig)):
        more = {"reward_funcs": len} if kind is GRPOTrainer else {}
        with pytest.raises((TypeError, ValueError), match=message):
            kind(args=config(str(tmp_path), use_cpu=True), train_dataset=rows, **given, **more)


def test_a_reference_that_is_computed_once_needs_one_model(tmp_path):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    args = DPOConfig(str(tmp_path), use_cpu=True, precompute_ref_log_probs=True)
    with pytest.raises(ValueError, match="precompute_ref_log_probs=True computes the reference once"):
        DPOTrainer(model_init=tiny.causal_lm, args=args, train_dataset=rows, processing_class=tiny.tokenizer())
