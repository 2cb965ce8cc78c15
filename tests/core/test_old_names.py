"""Scripts of earlier years read, set and declare arguments under names that are gone."""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import dataclass, field

import pytest
import torch
from transformers import HfArgumentParser

from posttrain.core import ModelConfig, Trainer, TrainingArguments
from posttrain.core.errors import ConfigError
from posttrain.core.registry import methods
from tests import tiny

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@dataclass
class ScriptArguments(TrainingArguments):
    """As a script that fine-tunes by QLoRA declares its own defaults."""

    warmup_ratio: float = field(default=0.25)
    group_by_length: bool = field(default=True)
    evaluation_strategy: str = field(default="no")


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"eval_strategy": "epoch"}, "evaluation_strategy", "epoch"),
        ({"warmup_steps": 0.1}, "warmup_ratio", 0.1),
        ({"warmup_steps": 7}, "warmup_ratio", 0.0),
        ({"train_sampling_strategy": "group_by_length"}, "group_by_length", True),
        ({"optim": "adafactor"}, "adafactor", True),
        ({"include_for_metrics": ["inputs"]}, "include_inputs_for_metrics", True),
        ({"use_cpu": True}, "no_cuda", True),
        ({}, "save_safetensors", True),
        ({}, "past_index", -1),
        ({"include_tokens_per_second": True}, "include_tokens_per_second", True),
        ({}, "include_tokens_per_second", False),
        ({}, "use_legacy_prediction_loop", False),
        ({"logging_nan_inf_filter": True}, "logging_nan_inf_filter", True),
        ({}, "logging_nan_inf_filter", False),
    ],
)
def test_an_old_name_is_read_as_what_it_would_say(given, name, value):
    assert getattr(TrainingArguments("out", **given), name) == value


@pytest.mark.parametrize("config", [TrainingArguments, *(method.config_class for method in methods().values())])
@pytest.mark.parametrize(
    ("given", "model_id"),
    [({}, "org/run"), ({"push_to_hub_model_id": "m"}, "org/m"), ({"hub_model_id": "m"}, "org/m")],
    ids=str,
)
def test_the_organization_is_the_owner_in_the_name_of_the_repository(config, given, model_id):
    with pytest.warns(FutureWarning, match=f"push_to_hub_organization='org' is now hub_model_id='{model_id}'"):
        assert config(output_dir="out/run", push_to_hub_organization="org", **given).hub_model_id == model_id


def test_an_old_name_that_is_set_takes_effect_and_a_wrong_one_is_refused():
    args = TrainingArguments("out")
    args.evaluation_strategy, args.warmup_ratio = "epoch", 0.5
    assert (args.eval_strategy, args.warmup_steps) == ("epoch", 0.5)
    with pytest.raises(ConfigError, match="past_index=2 has no effect"):
        args.past_index = 2
    with pytest.raises(AttributeError, match="no attribute 'evaluation_strateg'"):
        _ = args.evaluation_strateg
    assert copy.deepcopy(args) == pickle.loads(pickle.dumps(args)) == args


def test_a_misspelled_argument_that_is_set_is_warned_of_and_what_a_script_keeps_there_is_not(tmp_path):
    args = TrainingArguments(str(tmp_path))
    for name, meant in (("learning_rat", "learning_rate"), ("eval_step", "eval_steps"), ("max_step", "max_steps")):
        with pytest.warns(UserWarning, match=f"TrainingArguments has no argument '{name}', did you mean '{meant}'"):
            setattr(args, name, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("dataset_path", "my_learning_rate", "task", "alpha", "_max_step", "teacher_model", "n_samples"):
            setattr(args, name, 1)
        args.learning_rate, args.max_steps = 1e-3, 5


def test_a_dataclass_of_a_script_may_declare_old_names_and_they_take_effect():
    words = ["--output_dir", "out", "--warmup_ratio", "0.5", "--evaluation_strategy", "epoch", "--use_cpu"]
    (args,) = HfArgumentParser((ScriptArguments,)).parse_args_into_dataclasses(words)
    assert (args.warmup_steps, args.train_sampling_strategy) == (0.5, "group_by_length")
    assert (args.eval_strategy, args.do_eval) == ("epoch", True)
    assert ScriptArguments("out", warmup_steps=3).warmup_steps == 3  # what is set by today's name stays
    assert ScriptArguments("out").warmup_steps == 0.25


def test_intervals_of_zero_are_what_they_were():
    args = TrainingArguments("out", eval_steps=0, logging_steps=0, logging_strategy="epoch", save_strategy="no")
    assert (args.eval_steps, args.logging_steps) == (None, 500)
    with pytest.raises(ConfigError, match="logging_steps=0 must be > 0"):
        TrainingArguments("out", logging_steps=0)


@pytest.mark.parametrize("steps", [0, -1])
def test_save_steps_of_zero_saves_the_last_step_alone(tmp_path, steps):
    args = TrainingArguments(
        str(tmp_path), max_steps=3, save_steps=steps, report_to="none", use_cpu=True, disable_tqdm=True
    )
    Trainer(tiny.causal_lm(), args, train_dataset=tiny.token_rows(2)[:1] * 8).train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]


def test_trust_remote_code_is_read_where_scripts_read_it():
    assert ModelConfig(trust_remote_code=False).trust_remote_code is False
    with pytest.raises(ConfigError, match="trust_remote_code.*trainer's config"):
        ModelConfig(trust_remote_code=True)


class Own(Trainer):
    """A script's."""


@pytest.mark.parametrize(
    "make",
    [
        lambda out: Trainer(tiny.causal_lm(), TrainingArguments(out), tokenizer=tiny.tokenizer()),
        lambda out: Own(tiny.causal_lm(), TrainingArguments(out), tokenizer=tiny.tokenizer()),
        lambda out: ScriptArguments(out, warmup_ratio=0.1),
        lambda out: TrainingArguments(out, push_to_hub_organization="org"),
        lambda out: ScriptArguments(out, group_by_length=False, warmup_ratio=0, hub_model_id="a b"),
        lambda out: TrainingArguments(out, ema_use="eval"),
        lambda out: setattr(TrainingArguments(out), "learning_rat", 1),
    ],
    ids=["trainer", "subclass", "dataclass of a script", "Hub", "name", "without effect", "assigned"],
)
def test_a_warning_shows_the_line_of_the_script(make, tmp_path):
    with pytest.warns((FutureWarning, UserWarning)) as warned:
        make(str(tmp_path))
    assert {(warning.filename, warning.lineno) for warning in warned} == {(__file__, make.__code__.co_firstlineno)}


class OldStyle(Trainer):
    """Methods as scripts for transformers 4 have copied and changed them."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        self._metrics["train"]["own"].append(loss.detach())
        if self.do_grad_scaling:
            self.scaler.scale(loss).backward()
        elif not (self.use_apex or self.use_amp):
            self.accelerator.backward(loss)
        return loss.detach()

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        self._memory_tracker.start()
        loop = self.prediction_loop if self.args.use_legacy_prediction_loop else self.evaluation_loop
        output = loop(self.get_eval_dataloader(eval_dataset), "Evaluation", None, ignore_keys, metric_key_prefix)
        gathered = self._nested_gather((torch.ones(2, 3), {"a": torch.zeros(2)}))
        assert gathered[0].shape == (2, 3) and self._pad_across_processes(torch.ones(2, 3)).shape == (2, 3)
        self._memory_tracker.stop_and_update_metrics(output.metrics)
        self.log(output.metrics)
        return output.metrics


def test_methods_copied_from_transformers_4_run(tmp_path):
    rows = tiny.token_rows(2)[:1] * 4
    args = TrainingArguments(
        str(tmp_path), max_steps=2, logging_steps=1, eval_strategy="epoch", save_strategy="no", report_to="none",
        use_cpu=True, disable_tqdm=True, skip_memory_metrics=False,
    )  # fmt: skip
    trainer = OldStyle(tiny.causal_lm(), args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    first, second = [record for record in trainer.state.log_history if "loss" in record]
    assert first["own"] == pytest.approx(first["loss"]) and second["own"] < first["own"]
    losses = [record["eval_loss"] for record in trainer.state.log_history if "eval_loss" in record]
    assert trainer._globalstep_last_logged == 2 and first["loss"] > losses[0] > losses[1]
    trainer.store_metrics({"later": 1.0})
    trainer.evaluate()
    assert "eval_mem_cpu_alloc_delta" in trainer.state.log_history[-1]


def test_a_model_in_place_of_model_init_is_named(tmp_path):
    with pytest.raises(TypeError, match="model_init is a model; pass the function"):
        Trainer(model_init=tiny.causal_lm(), args=TrainingArguments(str(tmp_path), use_cpu=True))


def test_an_old_name_of_a_share_takes_no_larger_number(tmp_path):
    with pytest.raises(ConfigError, match="warmup_ratio=-0.1 must be from 0 to 1; warmup_steps takes larger"):
        TrainingArguments("out", warmup_ratio=-0.1)
    with pytest.raises(ConfigError, match="warmup_ratio=2.0 must be from 0 to 1; warmup_steps takes larger numbers"):
        TrainingArguments(str(tmp_path), warmup_ratio=2.0)
