"""What the trainer is for, one promise after another. The mark `mission` has the number of the promise in our plan.

Details are tested beside each room of the core; here a reader sees that every promise is met at all.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import types
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import posttrain
from posttrain.core import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from posttrain.core.errors import CheckpointError, ConfigError
from posttrain.core.logging import trackers
from tests import tiny
from tests.contract.trainers import classification_rows, pad
from tests.core.hub.test_hub import TOKEN, hub, on_hub  # noqa: F401  (hub is a fixture)
from tests.programs import together

PARTS = """
    data_collator eval_dataset processing_class model_init compute_loss_func compute_metrics callbacks optimizers
    preprocess_logits_for_metrics tokenizer callback
""".split()
ROWS, UNSEEN = classification_rows(24), classification_rows(10, seed=1)


class Line(nn.Module):
    """y = a x + b, a module without a config. Its answer is a dict, or a tuple."""

    def __init__(self, answer=dict):
        super().__init__()
        self.answer = answer
        self.a, self.b = (nn.Parameter(torch.zeros((), dtype=torch.double)) for _ in range(2))

    def forward(self, x, labels=None):
        y = self.a * x + self.b
        loss = None if labels is None else F.mse_loss(y, labels)
        return {"loss": loss, "logits": y} if self.answer is dict else (loss, y)


def line(count=16):
    return [{"x": x, "labels": 2 * x + 3} for x in torch.linspace(-1, 1, count, dtype=torch.double)]


def trainer_of(out, model, rows, trainer_class=Trainer, **options):
    parts = {name: options.pop(name) for name in PARTS if name in options}
    usual = dict(output_dir=str(out), report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=1)
    usual |= dict(save_strategy="no", learning_rate=0.05)
    return trainer_class(model, TrainingArguments(**(usual | options)), train_dataset=rows, **parts)


def fit(out, trainer_class=Trainer, *, model=None, rows=None, **options):
    """A trainer of a line: 16 rows, 2 updates an epoch."""
    options.setdefault("eval_dataset", line(10))
    return trainer_of(out, model or Line(), line() if rows is None else rows, trainer_class, **options)


def classify(out, trainer_class=Trainer, **options):
    """A trainer of a BERT of three classes."""
    parts = {"eval_dataset": UNSEEN, "data_collator": pad_with_label, "max_steps": 2, "learning_rate": 1e-3}
    return trainer_of(out, tiny.classifier(), ROWS, trainer_class, **(parts | options))


def speak(out, trainer_class=Trainer, **options):
    """A trainer of a causal language model."""
    parts = {"eval_dataset": tiny.token_rows(6, seed=1), "data_collator": pad, "max_steps": 2, "learning_rate": 1e-3}
    rows = tiny.token_rows(12)
    return trainer_of(out, options.pop("model", None) or tiny.causal_lm(), rows, trainer_class, **(parts | options))


def pad_with_label(rows):
    padded = pad([{**row, "labels": []} for row in rows])
    return padded | {"labels": torch.tensor([row["label"] for row in rows])}


def pad_without_labels(rows):
    padded = pad([{**row, "labels": []} for row in rows])
    return {name: padded[name] for name in ("input_ids", "attention_mask")}


def logged(trainer, name):
    return [record[name] for record in trainer.state.log_history if name in record]


def weights(trainer):
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def assert_equal(left, right):
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def saved(out):
    return sorted((path.name for path in Path(out).glob("checkpoint-*")), key=lambda name: int(name[11:]))


class Listener(TrainerCallback):
    """Counts the steps, and keeps what the last was called with."""

    steps, seen = 0, None

    def on_step_end(self, args, state, control, **kwargs):
        self.steps, self.seen = self.steps + 1, kwargs


class ClassWeights(Trainer):
    """`compute_loss` of three arguments, as tutorials print it."""

    def compute_loss(self, model, inputs, return_outputs=False):
        labels = inputs.pop("labels")
        # forward pass
        outputs = model(**inputs)
        logits = outputs.get("logits")
        # compute custom loss (suppose one has 3 labels with different weights)
        loss_fct = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], device=model.device))
        loss = loss_fct(logits.view(-1, self.model.config.num_labels), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


# -------------------------------------------------------------------------------------------- the trainer and its parts


@pytest.mark.mission("S001")
def test_a_trainer_of_a_model_and_rows_trains_and_saves(tmp_path):
    trainer = classify(
        tmp_path, compute_metrics=accuracy, max_steps=12, learning_rate=0.01, save_strategy="steps", save_steps=6
    )
    trainer.train()
    losses = logged(trainer, "loss")
    assert sum(losses[-3:]) < sum(losses[:3]) and saved(tmp_path) == ["checkpoint-6", "checkpoint-12"]


@pytest.mark.mission("S002")
@pytest.mark.parametrize("answer", [dict, tuple])
def test_any_module_trains_saves_and_resumes(answer, tmp_path):
    straight = fit(tmp_path, model=Line(answer), max_steps=4, save_strategy="steps", save_steps=2)
    straight.train()
    assert straight.model.a != 0 and straight.model.b > 0.1
    resumed = fit(tmp_path, model=Line(answer), max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_equal(weights(resumed), weights(straight))


@pytest.mark.mission("S003")
def test_without_arguments_defaults_are_used_and_the_folder_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(Line(), train_dataset=line())
    assert "trainer_output" in caplog.text
    assert trainer.train().global_step == 6  # 3 epochs of 16 rows in batches of 8


@pytest.mark.mission("S004")
def test_what_a_collator_adds_reaches_compute_loss(tmp_path):
    class Weighted(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            weight = inputs.pop("row_weight").tolist()
            seen.extend([weight] * torch.is_grad_enabled())  # a trial of the loss, without gradients, is not training
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def collate(rows):
        return torch.utils.data.default_collate(rows) | {"row_weight": torch.ones(len(rows))}

    seen = []
    fit(tmp_path, Weighted, data_collator=collate, max_steps=1).train()
    assert seen == [[1.0] * 8]


@pytest.mark.mission("S005")
def test_rows_of_three_and_nine_tokens_make_a_batch_with_a_tokenizer(tmp_path):
    rows = [{"input_ids": [5] * length, "attention_mask": [1] * length, "label": 1} for length in (3, 9)]
    trainer = trainer_of(tmp_path, tiny.classifier(), rows, processing_class=tiny.tokenizer(), max_steps=1)
    batch = next(iter(trainer.get_train_dataloader()))
    assert sorted(batch["attention_mask"].sum(1).tolist()) == [3, 9] and batch["input_ids"].shape == (2, 9)
    trainer.train()


class Mapped(torch.utils.data.Dataset):
    __len__, __getitem__ = lambda self: 16, lambda self, row: line()[row]


class Stream(torch.utils.data.IterableDataset):
    __iter__ = lambda self: iter(line())  # noqa: E731


@pytest.mark.mission("S006")
def test_every_kind_of_dataset_gives_the_same_run(tmp_path):
    table = datasets.Dataset.from_list([{k: v.item() for k, v in row.items()} for row in line()]).with_format(
        "torch", dtype=torch.double
    )
    ends = []
    for rows in (Mapped(), Stream(), table):  # one batch holds all rows, so that their order is no difference
        trainer = fit(tmp_path, rows=rows, max_steps=4, per_device_train_batch_size=16)
        trainer.train()
        ends.append([value.item() for value in weights(trainer)])
    assert ends[1] == pytest.approx(ends[0]) and ends[2] == pytest.approx(ends[0], rel=1e-6) and ends[0][0] > 0


@pytest.mark.mission("S007")
def test_evaluation_sets_may_have_names(tmp_path):
    metrics = fit(tmp_path, eval_dataset={"a": line(4), "b": line(6)}).evaluate()
    assert (
        metrics["eval_a_loss"] > 0 and metrics["eval_b_loss"] > 0 and metrics["eval_a_loss"] != metrics["eval_b_loss"]
    )


@pytest.mark.mission("S009")
def test_tokenizer_is_taken_with_one_warning(tmp_path):
    tokenizer = tiny.tokenizer()
    with pytest.warns(FutureWarning, match="processing_class") as warned:
        trainer = fit(tmp_path, tokenizer=tokenizer)
    assert [warning.category for warning in warned].count(FutureWarning) == 1
    assert trainer.processing_class is tokenizer


@pytest.mark.mission("S010")
def test_an_encoder_is_trained_and_its_accuracy_reported(tmp_path):
    trainer = classify(tmp_path, max_steps=-1, num_train_epochs=3, eval_strategy="epoch", compute_metrics=accuracy)
    trainer.train()
    assert len(logged(trainer, "eval_accuracy")) == 3 and 0 <= trainer.evaluate()["eval_accuracy"] <= 1


@pytest.mark.mission("S011")
def test_core_exports_the_trainer_and_the_namespace_nothing():
    assert Trainer.__module__ == "posttrain.core.trainer" and TrainingArguments.__name__ == "TrainingArguments"
    assert getattr(posttrain, "__file__", None) is None and not hasattr(posttrain, "Trainer")


@pytest.mark.mission("S012")
def test_evaluate_and_predict_need_no_training(tmp_path):
    trainer = fit(tmp_path)
    expected = np.mean([row["labels"].item() ** 2 for row in line(10)])  # the model answers 0
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected)
    assert trainer.predict(line(5)).predictions.tolist() == [0.0] * 5


@pytest.mark.mission("S014")
def test_bf16_trains_anywhere_and_fp16_says_what_it_needs(tmp_path):
    trainer = classify(tmp_path, bf16=True)
    before = weights(trainer)
    trainer.train()
    assert not torch.equal(before[0], weights(trainer)[0]) and weights(trainer)[0].dtype == torch.float32
    with pytest.raises(ValueError, match="fp16.*bf16"):
        classify(tmp_path, fp16=True)


@pytest.mark.mission("S015")
def test_a_trainer_of_ones_own_needs_public_methods_only(tmp_path):
    class Elsewhere(Trainer):
        """Makes its batches on the way, has a loss of its own, and remembers something in checkpoints."""

        drawn = 0

        def windows(self, plan, loader):
            for window, items in super().windows(plan, loader):
                self.drawn += 1
                yield window, items

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            self.log_metric("slope", model.a)
            return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

        def state_dict(self):
            return super().state_dict() | {"drawn": self.drawn}

        def load_state_dict(self, state):
            self.drawn = state["drawn"]
            super().load_state_dict(state)

    trainer = fit(tmp_path, Elsewhere, max_steps=4, save_strategy="steps", save_steps=2)
    trainer.train()
    assert trainer.drawn == 4 and len(logged(trainer, "slope")) == 4
    again = fit(tmp_path, Elsewhere, max_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.drawn == 4


# -------------------------------------------------------------------------------------------------------- the arguments


@pytest.mark.mission("S016", "S102")
def test_checkpoints_lie_in_the_output_folder_by_step(tmp_path):
    fit(tmp_path, max_steps=3, save_strategy="steps", save_steps=1).train()
    assert saved(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


@pytest.mark.mission("S017")
def test_the_learning_rate_is_reached_after_the_warm_up(tmp_path):
    trainer = fit(tmp_path, learning_rate=2e-5, warmup_steps=2, max_steps=6)
    trainer.train()
    assert logged(trainer, "learning_rate")[:3] == pytest.approx([0, 1e-5, 2e-5])


@pytest.mark.mission("S018")
@pytest.mark.parametrize("size", [2, 4])
def test_the_train_batch_size_is_what_compute_loss_sees(size, tmp_path):
    class Look(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            seen.extend([len(inputs["x"])] * torch.is_grad_enabled())
            return super().compute_loss(model, inputs, *args, **kwargs)

    seen = []
    fit(tmp_path, Look, per_device_train_batch_size=size, num_train_epochs=1).train()
    assert seen == [size] * (16 // size)


@pytest.mark.mission("S019")
def test_eval_loss_does_not_change_with_the_batch_size(tmp_path):
    losses, sizes = [], []
    for size in (1, 3, 4, 10):
        trainer = speak(tmp_path, per_device_eval_batch_size=size)
        sizes.append(len(next(iter(trainer.get_eval_dataloader()))["input_ids"]))
        losses.append(trainer.evaluate()["eval_loss"])
    assert sizes == [1, 3, 4, 6] and losses == pytest.approx([losses[0]] * 4, rel=1e-6)


@pytest.mark.mission("S020")
@pytest.mark.parametrize(("epochs", "rows", "steps"), [(2, 16, 4), (3.0, 17, 9), (1, 3, 1)])
def test_a_run_has_the_batches_of_its_epochs(epochs, rows, steps, tmp_path):
    assert fit(tmp_path, rows=line(rows), num_train_epochs=epochs).train().global_step == steps


@pytest.mark.mission("S021")
def test_weight_decay_leaves_biases_and_norms_alone(tmp_path):
    trainer = classify(tmp_path, weight_decay=0.01)
    decaying, others = trainer.create_optimizer().param_groups
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.01, 0)
    assert not any("bias" in names[id(p)] or "LayerNorm" in names[id(p)] for p in decaying["params"])
    assert all("bias" in names[id(p)] or "LayerNorm" in names[id(p)] for p in others["params"])


@pytest.mark.mission("S022")
@pytest.mark.parametrize(("strategy", "count"), [("epoch", 3), ("steps", 2), ("no", 0)])
def test_evaluation_follows_its_strategy(strategy, count, tmp_path):
    trainer = fit(tmp_path, num_train_epochs=3, eval_strategy=strategy, eval_steps=3)
    trainer.train()
    assert len(logged(trainer, "eval_loss")) == count


@pytest.mark.mission("S023")
@pytest.mark.parametrize(("strategy", "steps"), [("epoch", [2, 4, 6]), ("steps", [4, 6]), ("no", []), ("best", [6])])
def test_saving_follows_its_strategy(strategy, steps, tmp_path):
    best = {
        "metric_for_best_model": "loss",
        "eval_strategy": "epoch",
    }  # the line is learned: each is better than the last
    fit(tmp_path, num_train_epochs=3, save_strategy=strategy, save_steps=4, **best).train()
    assert saved(tmp_path) == [f"checkpoint-{step}" for step in steps]


@pytest.mark.mission("S024")
def test_the_best_model_is_the_one_that_remains(tmp_path):
    scores = iter([0.2, 0.9, 0.1])
    trainer = fit(
        tmp_path, num_train_epochs=3, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
        metric_for_best_model="score", compute_metrics=lambda prediction: {"score": next(scores)},
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-4")
    best = fit(tmp_path)
    best._load_from_checkpoint(tmp_path / "checkpoint-4")
    assert_equal(weights(trainer), weights(best))


@pytest.mark.mission("S025")
def test_without_a_network_training_completes_and_says_what_was_not_uploaded(tmp_path, caplog):
    # Otherwise the last upload takes the place of one that has not begun.
    always = {"push_to_hub": True, "hub_always_push": True}
    trainer = fit(tmp_path, max_steps=2, save_strategy="steps", save_steps=2, **always)
    assert trainer.train().global_step == 2
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    failed = [text for text in said if "was not uploaded to" in text]  # once for each, not for each attempt
    for folder, text in zip((tmp_path / "checkpoint-2", tmp_path), failed, strict=True):
        assert text.startswith(f"{folder} was not") and "The run is not affected" in text
        assert str(folder) in text.split("To upload them later: ")[1] and (folder / "model.safetensors").is_file()


@pytest.mark.mission("S026", "S027", "S028")
@pytest.mark.parametrize(
    ("strategy", "folders"),
    [("every_save", []), ("checkpoint", ["last-checkpoint"]), ("all_checkpoints", ["checkpoint-1", "checkpoint-2"])],
    ids=["S028", "S026", "S027"],
)
def test_the_hub_receives_what_its_strategy_says(strategy, folders, hub, tmp_path):  # noqa: F811
    options = dict(push_to_hub=True, hub_token=TOKEN, hub_model_id="me/model", hub_strategy=strategy)
    fit(tmp_path, max_steps=2, save_strategy="steps", save_steps=1, hub_always_push=True, **options).train()
    files = on_hub(hub)
    assert "model.safetensors" in files and "optimizer.json" not in files  # of the model alone, at the top
    assert {name.split("/")[0] for name in files if "/" in name} == set(folders)
    assert all(f"{folder}/optimizer.json" in files for folder in folders)


@pytest.mark.mission("S029")
def test_max_steps_beats_epochs(tmp_path):
    assert fit(tmp_path, max_steps=5, num_train_epochs=1).train().global_step == 5


@pytest.mark.mission("S030")
@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_gradient_checkpointing_keeps_less_and_changes_no_loss(name, tmp_path, recwarn):
    losses, kept = [], []
    for on in (False, True):
        sizes = []

        def pack(tensor, sizes=sizes):
            sizes.append(tensor.numel())
            return tensor

        trainer = speak(tmp_path, max_steps=1, **{name: on})
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            trainer.train()
        losses.append(logged(trainer, "loss")[0])
        kept.append(sum(sizes))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6) and kept[1] < 0.7 * kept[0]
    assert not [warning for warning in recwarn if "checkpointing" in str(warning.message)]


@pytest.mark.mission("S031")
@pytest.mark.parametrize(("strategy", "count"), [("steps", 3), ("epoch", 3), ("no", 0)])
def test_logging_follows_its_strategy(strategy, count, tmp_path):
    trainer = fit(tmp_path, num_train_epochs=3, logging_strategy=strategy, logging_steps=2)
    trainer.train()
    assert len(logged(trainer, "loss")) == count


@pytest.mark.mission("S032")
def test_logging_steps_count_updates_and_no_micro_batches(tmp_path):
    trainer = fit(tmp_path, num_train_epochs=3, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    trainer.train()
    assert [r["step"] for r in trainer.state.log_history if "loss" in r] == [1, 2, 3, 4, 5, 6]


@pytest.mark.mission("S033")
def test_records_reach_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    fit(tmp_path, max_steps=1, report_to="tensorboard").train()
    assert list(tmp_path.rglob("events.out.tfevents*"))


@pytest.mark.mission("S033")
@pytest.mark.parametrize("tracker", ["trackio", "wandb", "tensorboard"])
def test_a_tracker_that_is_missing_is_named_with_its_pip_command(tracker, tmp_path, monkeypatch):
    integrations = transformers.integrations.integration_utils

    def missing():
        raise RuntimeError("it is not installed")

    monkeypatch.setattr(trackers, "_is_installed", lambda name: False)
    monkeypatch.setitem(integrations.INTEGRATION_TO_CALLBACK, tracker, missing)
    with pytest.raises(ImportError, match=f"pip install .*{tracker}"):
        fit(tmp_path, report_to=[tracker])


@pytest.mark.mission("S034")
def test_the_name_of_the_run_reaches_the_tracker(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    wandb = pytest.importorskip("wandb")
    fit(tmp_path / "out", max_steps=1, report_to="wandb", run_name="model-experiment-v1").train()
    try:
        assert wandb.run.name == "model-experiment-v1"
    finally:
        wandb.finish()


@pytest.fixture
def as_rank(monkeypatch):
    def become(rank):
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))

    return become


@pytest.mark.mission("S035", "S036", "S038")
def test_log_levels_come_from_the_command_line_for_each_rank(as_rank):
    parser = transformers.HfArgumentParser(TrainingArguments)
    [args] = parser.parse_args_into_dataclasses(["--log_level", "warning", "--log_level_replica", "error"])
    levels = []
    for rank in (0, 1):
        as_rank(rank)
        levels.append(args.get_process_log_level())
    assert levels == [logging.WARNING, logging.ERROR]


@pytest.mark.mission("S037")
def test_replicas_say_warnings_alone_by_default(as_rank, monkeypatch):
    monkeypatch.setattr(logging.getLogger("posttrain"), "level", logging.NOTSET)
    levels = []
    for rank in (0, 1):
        as_rank(rank)
        levels.append(TrainingArguments().get_process_log_level())
    assert levels == [logging.INFO, logging.WARNING]


# ----------------------------------------------------------------------------------------------------------- optimizers

TARGETS = [r".*.attn.*", r".*.mlp.*"]


@pytest.mark.mission("S039")
def test_galore_keeps_its_state_at_the_rank_asked_for(tmp_path):
    options = {"optim_args": "rank=4, update_proj_gap=100, scale=0.10", "optim_target_modules": TARGETS}
    trainer = speak(tmp_path, optim="galore_adamw", **options)
    trainer.train()
    state = trainer.optimizer.state[trainer.model.model.layers[0].mlp.up_proj.weight]  # (64, 32)
    assert 4 in state["exp_avg"].shape and state["exp_avg"].numel() < 64 * 32


@pytest.mark.mission("S040", "S042", "S050", "S051", "S052")
@pytest.mark.parametrize(
    ("optim", "options"),
    [
        pytest.param("galore_adafactor", {"optim_target_modules": TARGETS}, id="S040"),
        pytest.param("galore_adamw_layerwise", {"optim_target_modules": TARGETS}, id="S042"),
        pytest.param("galore_adafactor_layerwise", {"optim_target_modules": TARGETS}, id="S042-adafactor"),
        pytest.param("lomo", {}, id="S050"),
        pytest.param("adalomo", {"max_grad_norm": None}, id="S051"),
        pytest.param("grokadamw", {}, id="S052"),
    ],
)
def test_optimizers_train(optim, options, tmp_path):
    trainer = speak(tmp_path, optim=optim, max_steps=8, learning_rate=0.01, **options)
    before = trainer.evaluate(tiny.token_rows(12))["eval_loss"]
    trainer.train()
    assert trainer.evaluate(tiny.token_rows(12))["eval_loss"] < before


@pytest.mark.mission("S041")
def test_galore_in_8_bits_keeps_its_state_in_bytes_at_the_rank_asked_for(tmp_path):
    pytest.importorskip("bitsandbytes")
    model = tiny.causal_lm(
        hidden_size=128, intermediate_size=256
    )  # states of fewer than 4,096 numbers stay as they are
    options = {"optim_args": "rank=32", "optim_target_modules": TARGETS, "max_steps": 6, "learning_rate": 0.01}
    trainer = speak(tmp_path, model=model, optim="galore_adamw_8bit", **options)
    before = trainer.evaluate(tiny.token_rows(12))["eval_loss"]
    trainer.train()
    assert trainer.evaluate(tiny.token_rows(12))["eval_loss"] < before
    weight = trainer.model.model.layers[0].mlp.up_proj.weight
    state = trainer.optimizer.state[weight]["state1"]
    assert state.dtype == torch.uint8 and state.numel() < weight.numel() and 32 in state.shape


@pytest.mark.mission("S042")
def test_layerwise_in_two_processes_names_the_alternative(as_rank, tmp_path):
    as_rank(0)
    with pytest.raises(ConfigError, match="'galore_adamw'"):
        TrainingArguments(str(tmp_path), optim="galore_adamw_layerwise", optim_target_modules=TARGETS)


@pytest.mark.mission("S043")
def test_targets_select_the_linear_layers_or_name_those_there_are(tmp_path):
    for targets in (TARGETS, "all-linear", ["mlp.up_proj"], "model.layers.0.mlp.up_proj"):
        options = {"optim_target_modules": targets, "optim_args": "rank=4"}
        speak(tmp_path, optim="galore_adamw", **options).create_optimizer()
    with pytest.raises(ConfigError, match=r"selects no .*mlp\.up_proj"):
        speak(tmp_path, optim="galore_adamw", optim_target_modules=["nothing"]).create_optimizer()


@pytest.mark.mission("S044")
def test_an_unknown_optimizer_option_is_refused_with_those_known():
    with pytest.raises(ConfigError, match="rnk.*rank.*update_proj_gap"):
        TrainingArguments(optim="galore_adamw", optim_target_modules=TARGETS, optim_args="rnk=64, scale=0.10")


@pytest.mark.mission("S045")
def test_the_other_layers_are_trained_as_ever_and_the_division_is_said(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="posttrain")
    trainer = speak(tmp_path, optim="galore_adamw", optim_target_modules=TARGETS)
    groups = trainer.create_optimizer().param_groups
    low = sum(p.numel() for group in groups if "rank" in group for p in group["params"])
    linear = [m for n, m in trainer.model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    assert low == sum(module.weight.numel() for module in linear)
    assert "parameters, by group" in caplog.text and "selects 14 of 15 linear layers" in caplog.text


@pytest.mark.mission("S046")
def test_galore_needs_no_other_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "galore_torch", None)
    assert speak(tmp_path, optim="galore_adamw", optim_target_modules=TARGETS).train().global_step == 2


def install_liger(monkeypatch):
    """A package in the place of liger-kernel, which is never asked for a kernel on a machine without a GPU."""
    kernels = types.ModuleType("liger_kernel.transformers")
    kernels._apply_liger_kernel_to_instance = None
    patches = types.ModuleType("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": None, "gpt2": None, "wav2vec2": None}
    for module in (types.ModuleType("liger_kernel"), kernels, patches):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.mission("S047")
def test_liger_that_cannot_be_used_is_said_and_training_goes_on(tmp_path, caplog, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("with a GPU the kernels are used")
    install_liger(monkeypatch)
    plain, liger = speak(tmp_path), speak(tmp_path, use_liger_kernel=True)
    plain.train(), liger.train()
    assert "need a GPU" in caplog.text and logged(liger, "loss") == logged(plain, "loss")


@pytest.mark.mission("S050")
def test_lomo_refuses_accumulation():
    with pytest.raises(ConfigError, match="gradient_accumulation_steps=1"):
        TrainingArguments(optim="lomo", gradient_accumulation_steps=2)


@pytest.mark.mission("S051")
def test_adalomo_says_that_it_cannot_clip(tmp_path, caplog):
    speak(tmp_path, optim="adalomo", max_grad_norm=1.0).create_optimizer()
    assert "max_grad_norm" in caplog.text


@pytest.mark.mission("S053", "S054")
@pytest.mark.parametrize("optim", ["schedule_free_adamw", "schedule_free_sgd"], ids=["S053", "S054"])
def test_schedule_free_evaluates_averages_at_a_constant_rate(optim, tmp_path):
    pytest.importorskip("schedulefree")
    trainer = speak(tmp_path, optim=optim, lr_scheduler_type="constant")
    trainer.train()
    assert logged(trainer, "learning_rate") == [1e-3, 1e-3]
    averaged = weights(trainer)
    trainer.optimizer.train()
    assert not all(torch.equal(a, b) for a, b in zip(averaged, weights(trainer), strict=True))


# ---------------------------------------------------------------------------------------------- noise, data, evaluation


@pytest.mark.mission("S055")
def test_neftune_is_noise_in_training_alone(tmp_path):
    trainer, plain = speak(tmp_path, neftune_noise_alpha=5), speak(tmp_path)
    assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    trainer.train(), plain.train()
    assert logged(trainer, "loss") != logged(plain, "loss")
    embeddings = trainer.model.get_input_embeddings()
    ids = torch.tensor([[5, 6]])
    assert torch.equal(embeddings.train()(ids), embeddings.weight[ids])


class FromWorkers(Mapped):
    def __getitem__(self, row):
        return super().__getitem__(row) | {"worker": torch.utils.data.get_worker_info().id}


@pytest.fixture(scope="module")
def worker_run(tmp_path_factory):
    """The workers that made the rows of two epochs, with every option of workers set."""

    def collate(rows):
        seen.update(int(row.pop("worker")) for row in rows)
        return torch.utils.data.default_collate(rows) | {"seen": torch.tensor(sorted(seen))}

    class Look(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            workers.update(inputs.pop("seen").tolist())
            return super().compute_loss(model, inputs, *args, **kwargs)

    seen, workers = set(), Counter()
    options = dict(dataloader_persistent_workers=True, dataloader_prefetch_factor=2, remove_unused_columns=False)
    out = tmp_path_factory.mktemp("workers")
    args = dict(rows=FromWorkers(), data_collator=collate, per_device_train_batch_size=4, num_train_epochs=2)
    trainer = fit(out, Look, dataloader_num_workers=4, **args, **options)
    trainer.train()
    return trainer, workers


@pytest.mark.mission("S056")
def test_workers_make_the_rows(worker_run):
    assert set(worker_run[1]) == {0, 1, 2, 3} and worker_run[0].state.global_step == 8


@pytest.mark.mission("S057", "S058")
@pytest.mark.parametrize(
    "option", [{"dataloader_persistent_workers": True}, {"dataloader_prefetch_factor": 2}], ids=["S057", "S058"]
)
def test_options_of_workers_need_workers(option, worker_run):
    [name] = option
    assert getattr(worker_run[0].args, name) == option[name]
    with pytest.raises(ConfigError, match=f"(?s){name}.*dataloader_num_workers"):
        TrainingArguments(**option)


class SlowFirst(Mapped):
    def __getitem__(self, row):
        if row == 0:
            time.sleep(2.5)
        return super().__getitem__(row)


@pytest.mark.parametrize("in_order", [True, False])
def test_a_batch_that_is_late_is_waited_for_unless_order_does_not_matter(in_order, tmp_path):
    options = dict(rows=SlowFirst(), train_sampling_strategy="sequential", per_device_train_batch_size=4)
    trainer = fit(tmp_path, dataloader_num_workers=2, dataloader_in_order=in_order, **options)
    firsts = [batch["x"][0].item() for batch in trainer.get_train_dataloader()]
    expected = [row["x"].item() for row in line()[::4]]
    assert sorted(firsts) == expected and (firsts == expected) == in_order


@pytest.mark.parametrize("whole", [True, False])
def test_metrics_may_see_the_batches_of_an_evaluation_apart(whole, tmp_path):
    def compute(prediction):
        predictions, labels = prediction  # as scripts write it
        assert whole or len(labels) == len(predictions)
        shapes.append(predictions.shape if whole else [part.shape for part in predictions])
        return {}

    shapes = []
    classify(tmp_path, compute_metrics=compute, per_device_eval_batch_size=4, eval_do_concat_batches=whole).evaluate()
    assert shapes == ([(10, 3)] if whole else [[(4, 3), (4, 3), (2, 3)]])


@pytest.mark.mission("S059")
def test_evaluating_at_the_start_needs_what_evaluation_needs(tmp_path):
    trainer = fit(tmp_path, max_steps=1, eval_on_start=True, eval_strategy="epoch")
    trainer.train()
    assert next(r["step"] for r in trainer.state.log_history if "eval_loss" in r) == 0
    with pytest.raises(ConfigError, match="eval_on_start.*eval_strategy"):
        fit(tmp_path, eval_on_start=True)
    with pytest.raises(ValueError, match="eval_dataset"):
        fit(tmp_path, eval_on_start=True, eval_strategy="epoch", eval_dataset=None)


@pytest.mark.mission("S060")
def test_predictions_leave_the_device_as_often_as_asked_for_and_are_the_same(tmp_path, monkeypatch):
    from posttrain.core.evaluation import eval_loop

    kept, waiting = [], []
    move = eval_loop.to_numpy
    for every in (None, 1, 3, 16):
        together, batches = [], []

        class Counting(Trainer):
            predicted = batches

            def prediction_step(self, *args, **kwargs):
                self.predicted.append(0)
                return super().prediction_step(*args, **kwargs)

        def moved(entry, together=together, batches=batches):
            together.append(len(batches))  # how many batches were predicted when this one was moved
            return move(entry)

        monkeypatch.setattr(eval_loop, "to_numpy", moved)
        trainer = classify(tmp_path, Counting, eval_accumulation_steps=every, per_device_eval_batch_size=2)
        kept.append(trainer.predict(UNSEEN).predictions)
        waiting.append(together)
    assert all(isinstance(one, np.ndarray) and np.array_equal(one, kept[0]) for one in kept)
    assert waiting == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [3, 3, 3, 5, 5], [5] * 5]


@pytest.mark.mission("S061")
def test_a_metric_that_nobody_computes_is_refused_at_the_first_evaluation(tmp_path):
    options = dict(num_train_epochs=2, eval_strategy="epoch", save_strategy="best", greater_is_better=False)
    compute = {"compute_metrics": lambda prediction: {"perplexity": 2.0}}
    trainer = fit(tmp_path, metric_for_best_model="perplexity", **options, **compute)
    trainer.train()
    assert trainer.state.best_metric == 2.0
    wrong = fit(tmp_path / "wrong", metric_for_best_model="perplexty", **options, **compute)
    with pytest.raises((ValueError, KeyError), match="perplexity"):
        wrong.train()
    assert wrong.state.global_step == 2  # the first of two evaluations
    early = fit(tmp_path / "early", metric_for_best_model="perplexty", eval_on_start=True, **options, **compute)
    with pytest.raises(KeyError, match="eval_perplexity"):
        early.train()
    assert early.state.global_step == 0


@pytest.mark.mission("S062")
@pytest.mark.parametrize(("greater", "best"), [(False, 2), (True, 4)])
def test_the_direction_decides_what_is_best(greater, best, tmp_path):
    scores = iter([0.2, 0.9, 0.5])
    trainer = fit(
        tmp_path, num_train_epochs=3, eval_strategy="epoch", metric_for_best_model="score", greater_is_better=greater,
        compute_metrics=lambda prediction: {"score": next(scores)},
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_global_step == best


@pytest.mark.mission("S063")
def test_the_newest_and_the_best_checkpoints_remain(tmp_path):
    scores = iter([0.9, 0.1, 0.2, 0.3])
    options = dict(max_steps=4, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1)
    options |= dict(metric_for_best_model="score", compute_metrics=lambda prediction: {"score": next(scores)})
    fit(tmp_path / "best", save_total_limit=1, load_best_model_at_end=True, **options).train()
    assert saved(tmp_path / "best") == ["checkpoint-1", "checkpoint-4"]
    fit(tmp_path / "newest", save_total_limit=2, max_steps=4, save_strategy="steps", save_steps=1).train()
    assert saved(tmp_path / "newest") == ["checkpoint-3", "checkpoint-4"]


@pytest.mark.mission("S064")
def test_saving_the_best_keeps_one_and_needs_a_metric(tmp_path):
    scores = iter([0.2, 0.9, 0.5])
    options = dict(num_train_epochs=3, eval_strategy="epoch", save_strategy="best")
    compute = {"compute_metrics": lambda prediction: {"score": next(scores)}}
    fit(tmp_path, metric_for_best_model="score", **options, **compute).train()
    assert saved(tmp_path) == ["checkpoint-4"]
    with pytest.raises(ConfigError, match="metric_for_best_model"):
        fit(tmp_path, **options)


def test_what_a_callback_asks_to_save_is_saved_beside_the_best(tmp_path):
    class Asks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = state.global_step == state.max_steps

    scores = iter([0.2, 0.9, 0.5])
    options = dict(
        max_steps=6, eval_strategy="steps", eval_steps=2, save_strategy="best", metric_for_best_model="score"
    )
    fit(tmp_path, callbacks=[Asks()], compute_metrics=lambda prediction: {"score": next(scores)}, **options).train()
    assert saved(tmp_path) == ["checkpoint-4", "checkpoint-6"]


@pytest.mark.mission("S065")
def test_a_checkpoint_of_the_model_alone_says_so_when_resumed(tmp_path, caplog):
    fit(tmp_path, max_steps=2, save_strategy="steps", save_steps=1, save_only_model=True).train()
    assert not list((tmp_path / "checkpoint-1").glob("optimizer*"))
    fit(tmp_path, max_steps=2).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "holds no optimizer" in caplog.text and "both start anew" in caplog.text


@dataclass
class ScriptArguments:
    task_name: str | None = field(default=None)
    max_seq_length: int = field(default=128)


@pytest.mark.mission("S066", "S067", "S068")
def test_the_command_line_of_a_script_reaches_its_arguments(tmp_path):
    line = """--task_name mrpc --do_train --do_eval --max_seq_length 64 --per_device_train_batch_size 16
        --learning_rate 5e-5 --num_train_epochs 3 --overwrite_output_dir --output_dir"""
    parser = transformers.HfArgumentParser((ScriptArguments, TrainingArguments))
    script, args = parser.parse_args_into_dataclasses([*line.split(), str(tmp_path)])
    assert args.do_train and args.do_eval and not args.do_predict
    assert args.overwrite_output_dir and args.output_dir == str(tmp_path)
    assert (script.task_name, script.max_seq_length) == ("mrpc", 64)


@pytest.mark.mission("S067")
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_new_run_in_an_old_folder_says_so_unless_it_was_meant(overwrite, tmp_path, caplog):
    fit(tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    caplog.clear()
    fit(tmp_path, max_steps=1, overwrite_output_dir=overwrite).train()
    said = [r.getMessage() for r in caplog.records if "To resume, pass resume_from_checkpoint=True" in r.getMessage()]
    assert len(said) == (0 if overwrite else 1)


@pytest.fixture
def deterministic_again():
    before = os.environ.copy()
    yield
    torch.use_deterministic_algorithms(False)
    os.environ.clear(), os.environ.update(before)


@pytest.mark.mission("S069", "S108")
def test_with_full_determinism_two_runs_are_equal_to_the_bit(tmp_path, deterministic_again):
    pair = []
    for name in ("one", "two"):
        model = tiny.causal_lm("gpt2", resid_pdrop=0.1)
        trainer = speak(tmp_path / name, model=model, full_determinism=True)
        trainer.train()
        pair.append(weights(trainer))
    assert_equal(*pair)


@pytest.mark.mission("S069", "S108")
@pytest.mark.parametrize("full", [False, True])
def test_full_determinism_refuses_what_has_no_fixed_order(full, tmp_path, deterministic_again):
    class Puts(Trainer):
        def compute_loss(self, *args, **kwargs):
            torch.zeros(2).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))  # which of the two stays is left open
            return super().compute_loss(*args, **kwargs)

    trainer = fit(tmp_path, Puts, max_steps=1, full_determinism=full)
    if full:
        with pytest.raises(RuntimeError, match="deterministic"):
            trainer.train()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    else:
        assert trainer.train().global_step == 1


@dataclass
class WithEMA(TrainingArguments):
    using_ema: bool = field(default=False)


@pytest.mark.mission("S070")
def test_a_subclass_of_the_arguments_is_parsed_and_saved(tmp_path):
    [args] = transformers.HfArgumentParser(WithEMA).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--using_ema", "--max_steps", "1", "--use_cpu", "--report_to", "none"]
    )
    assert args.using_ema
    Trainer(Line(), args, train_dataset=line()).save_model()
    read = json.loads((tmp_path / "training_args.json").read_text())
    assert read["using_ema"] is True and read["max_steps"] == 1


# ------------------------------------------------------------------------------------------------------- loss and hooks


def token_mean(outputs, labels, num_items_in_batch):
    logits = outputs["logits"][:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


@pytest.mark.mission("S071")
@pytest.mark.parametrize(("size", "accumulation"), [(4, 1), (2, 2), (1, 4)])
def test_a_loss_of_ones_own_gives_the_curve_of_the_default(size, accumulation, tmp_path):
    options = dict(max_steps=3, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation)
    own = speak(tmp_path, compute_loss_func=token_mean, **options)
    usual = speak(tmp_path, max_steps=3, per_device_train_batch_size=4)
    own.train(), usual.train()
    assert logged(own, "loss") == pytest.approx(logged(usual, "loss"), abs=1e-5)


class Unlabelled(nn.Module):
    """Notes what its forward receives."""

    def __init__(self, inner, names):
        super().__init__()
        self.inner, self.names, self.config = inner, names, inner.config

    def forward(self, input_ids, attention_mask=None, labels=None):
        self.names.extend([labels is not None] * torch.is_grad_enabled())
        return self.inner(input_ids, attention_mask=attention_mask, labels=labels)


@pytest.mark.mission("S072", "S073")
def test_a_loss_function_gets_raw_outputs_and_the_labels_that_forward_does_not(tmp_path):
    def loss(outputs, labels, num_items_in_batch):
        assert outputs["logits"] is outputs.logits and labels.shape == (8,)
        return F.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch

    given = []
    options = dict(data_collator=pad_with_label, compute_loss_func=loss, max_steps=2)
    trainer_of(tmp_path, Unlabelled(tiny.classifier(), given), ROWS, **options).train()
    assert given == [False, False]


@pytest.mark.mission("S074")
def test_the_items_of_a_window_are_its_shifted_labels(tmp_path):
    def loss(outputs, labels, num_items_in_batch):
        counts.extend([(int(num_items_in_batch), int((labels[..., 1:] != -100).sum()))] * torch.is_grad_enabled())
        return token_mean(outputs, labels, num_items_in_batch)

    counts = []
    options = dict(per_device_train_batch_size=2, gradient_accumulation_steps=3, max_steps=2)
    speak(tmp_path, compute_loss_func=loss, **options).train()
    for window in (counts[:3], counts[3:]):
        assert {given for given, _ in window} == {sum(mine for _, mine in window)}


@pytest.mark.mission("S075")
def test_a_loss_function_is_not_normalised_again(tmp_path):
    def constant(outputs, labels, num_items_in_batch):
        return outputs["logits"].sum() * 0 + 7.0

    trainer = fit(tmp_path, compute_loss_func=constant, max_steps=2)
    trainer.train()
    assert logged(trainer, "loss") == [7.0, 7.0]


@pytest.mark.mission("S076", "S077", "S078", "S079")
@pytest.mark.parametrize("preprocessed", [False, True], ids=["S076-S077-S079", "S078"])
def test_metrics_see_all_rows_or_what_was_made_of_their_logits(preprocessed, tmp_path):
    class Accuracy:  # as evaluate.load("accuracy") gives one
        def compute(self, predictions, references):
            shapes.append(predictions.shape)
            return {"accuracy": np.mean(predictions == references)}

    def argmax(logits, labels):
        logits = logits[0] if isinstance(logits, tuple) else logits
        return logits.argmax(dim=-1)

    def compute_metrics(eval_preds):
        preds, labels = eval_preds
        assert isinstance(preds, np.ndarray)
        preds = preds if preprocessed else preds.argmax(-1)
        assert preds.shape == labels.shape == (6, 5)
        return metric.compute(predictions=preds[:, :-1].reshape(-1), references=labels[:, 1:].reshape(-1))

    metric, shapes = Accuracy(), []
    options = {"preprocess_logits_for_metrics": argmax} if preprocessed else {}
    rows = [{name: values[:5] for name, values in row.items()} for row in tiny.token_rows(6, seed=1)]
    metrics = speak(tmp_path, eval_dataset=rows, compute_metrics=compute_metrics, **options).evaluate()
    assert shapes == [(6 * 4,)] and 0 <= metrics["eval_accuracy"] <= 1


@pytest.mark.mission("S080")
@pytest.mark.parametrize(("size", "accumulation"), [(8, 1), (4, 2), (2, 4)])
def test_class_weights_in_three_arguments_keep_their_gradient(size, accumulation, tmp_path):
    options = dict(max_steps=1, optim="sgd", per_device_train_batch_size=size, max_grad_norm=0)
    trainer = classify(tmp_path, ClassWeights, gradient_accumulation_steps=accumulation, **options)
    rows = [trainer.train_dataset[index] for index in trainer.get_train_dataloader().sampler][:8]
    model, expected = tiny.classifier(), 0
    for part in range(accumulation):  # a mean over each micro-batch, and the mean of these
        inputs = pad_with_label(rows[part * size : (part + 1) * size])
        weight = torch.tensor([1.0, 2.0, 3.0])
        loss = nn.CrossEntropyLoss(weight=weight)(model(**{**inputs, "labels": None}).logits, inputs["labels"])
        expected = expected + loss / accumulation
    expected.backward()
    trainer.train()
    assert logged(trainer, "loss") == pytest.approx([expected.item()], rel=1e-5)
    for ours, theirs in zip(weights(trainer), model.parameters(), strict=True):
        moved = theirs - trainer.args.learning_rate * (0 if theirs.grad is None else theirs.grad)
        torch.testing.assert_close(ours, moved.detach(), rtol=0, atol=1e-6)


@pytest.mark.mission("S081")
@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_a_mean_is_taken_once_per_micro_batch_and_scaled(accumulation, tmp_path):
    class Mean(Trainer):
        calls = 0

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            self.calls += 1
            outputs = model(**inputs)
            return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    options = dict(max_steps=1, per_device_train_batch_size=8 // accumulation, rows=line(8))
    trainer = fit(tmp_path, Mean, gradient_accumulation_steps=accumulation, **options)
    trainer.train()
    x, y = (torch.stack([row[name] for row in line(8)]) for name in ("x", "labels"))
    norm = torch.stack([(-2 * x * y).mean(), (-2 * y).mean()]).norm()  # of the gradient at a = b = 0
    assert trainer.calls == accumulation and logged(trainer, "grad_norm") == pytest.approx([norm.item()])


@pytest.mark.mission("S082")
def test_compute_loss_returns_the_models_loss_and_its_outputs_if_asked(tmp_path):
    trainer = classify(tmp_path)
    inputs = pad_with_label(ROWS[:4])
    expected = trainer.model(**inputs).loss
    loss, outputs = trainer.compute_loss(trainer.model, dict(inputs), return_outputs=True)
    assert loss == expected == trainer.compute_loss(trainer.model, dict(inputs)) and outputs["logits"].shape == (4, 3)


@pytest.mark.mission("S084", "S085")
def test_evaluate_gives_metrics_and_predict_the_predictions(tmp_path):
    trainer = classify(tmp_path, compute_metrics=accuracy)
    metrics = trainer.evaluate()
    assert {"eval_loss", "eval_runtime", "eval_samples_per_second", "eval_accuracy"} <= set(metrics)
    predictions, labels, metrics = trainer.predict(UNSEEN)
    assert predictions.shape == (10, 3) and labels.tolist() == [row["label"] for row in UNSEEN]
    assert metrics["test_accuracy"] == np.mean(predictions.argmax(-1) == labels)
    bare = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in UNSEEN]
    output = classify(tmp_path, data_collator=pad_without_labels).predict(bare)
    assert output.label_ids is None and "test_accuracy" not in output.metrics
    np.testing.assert_allclose(output.predictions, predictions, rtol=1e-6)


@pytest.mark.mission("S086", "S087", "S090")
def test_each_step_and_each_record_passes_its_overridable_method(tmp_path):
    class Hooks(Trainer):
        trained, records = 0, 0

        def training_step(self, model, inputs, num_items_in_batch=None):
            self.trained += 1
            return super().training_step(model, inputs, num_items_in_batch)

        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            size = len(inputs["x"])
            return torch.tensor(3.0), torch.full((size,), 5.0), inputs["labels"]

        def log(self, logs, *args):
            self.records += 1
            super().log(logs, *args)

    trainer = fit(tmp_path, Hooks, max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    trainer.train()
    assert trainer.trained == 4 and trainer.records == len(trainer.state.log_history) == 3
    assert trainer.evaluate()["eval_loss"] == 3 and trainer.predict(line(2)).predictions.tolist() == [5, 5]


@pytest.mark.mission("S088", "S089")
@pytest.mark.parametrize("row", ["S088", "S089"])
def test_the_loaders_may_be_ones_own(row, tmp_path):
    class Loaders(Trainer):
        def get_train_dataloader(self):
            if row == "S088":
                return torch.utils.data.DataLoader(self.train_dataset, batch_size=4)
            return self._get_dataloader(
                self.train_dataset, "Training", batch_size=self._train_batch_size * 2,
                sampler_fn=self._get_train_sampler, is_training=True,
            )  # fmt: skip

        def get_eval_dataloader(self, eval_dataset=None):
            return torch.utils.data.DataLoader(line(2), batch_size=1)

        def get_test_dataloader(self, test_dataset):
            return torch.utils.data.DataLoader(test_dataset, batch_size=3)

        def compute_loss(self, model, inputs, *args, **kwargs):
            sizes.add(len(inputs["x"]))
            return super().compute_loss(model, inputs, *args, **kwargs)

    sizes = set()
    trainer = fit(tmp_path, Loaders, num_train_epochs=1)
    assert trainer.train().global_step == {"S088": 4, "S089": 1}[row] and sizes == {{"S088": 4, "S089": 16}[row]}
    assert trainer.evaluate()["eval_samples_per_second"] > 0 and len(trainer.predict(line(7)).predictions) == 7


@pytest.mark.mission("S091")
def test_optimizer_and_scheduler_may_be_replaced_apart(tmp_path):
    class MyOptimizer(Trainer):
        def create_optimizer(self, *args):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
            return self.optimizer

    class MyScheduler(Trainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=1)
            return self.lr_scheduler

    first, second = fit(tmp_path, MyOptimizer, max_steps=2), fit(tmp_path, MyScheduler, max_steps=2)
    first.train(), second.train()
    assert logged(first, "learning_rate") == [0.5, 0.25] and logged(second, "learning_rate") == [0.05, 0.05]
    assert "AdamW" in type(second.optimizer).__name__


@pytest.mark.mission("S092")
def test_private_methods_that_subclasses_use_are_there(tmp_path):
    class Private(Trainer):
        calls = ()

        def _save_checkpoint(self, *args, **kwargs):
            self.calls += ("save",)
            return super()._save_checkpoint(*args, **kwargs)

        def _evaluate(self, *args, **kwargs):
            self.calls += ("evaluate",)
            return super()._evaluate(*args, **kwargs)

    trainer = fit(tmp_path, Private, num_train_epochs=1, save_strategy="epoch", eval_strategy="epoch")
    trainer.train()
    assert trainer.calls == ("evaluate", "save")


# ------------------------------------------------------------------------------------------------------------ callbacks


class StopAfter(TrainerCallback):
    """Answers with a dict, as tutorials print it."""

    def __init__(self, num_steps=10):
        self.num_steps = num_steps

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= self.num_steps:
            return {"should_training_stop": True}
        else:
            return {}


StopAfter.__name__ = StopAfter.__qualname__ = "EarlyStoppingCallback"


@pytest.mark.mission("S093", "S094", "S096", "S097")
def test_a_callback_stops_the_run_by_a_dict_whatever_its_name(tmp_path):
    trainer = fit(tmp_path, num_train_epochs=30, callbacks=[StopAfter(10), Listener])
    assert trainer.train().global_step == 10 and type(trainer.callbacks[-3]) is StopAfter
    assert StopAfter.__name__ == EarlyStoppingCallback.__name__ and StopAfter is not EarlyStoppingCallback


@pytest.mark.mission("S094")
def test_an_unknown_key_names_the_callback_and_the_keys_there_are(tmp_path):
    class Mistaken(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            return {"should_stop": True}

    with pytest.raises((TypeError, ValueError), match="(?s)Mistaken.*should_stop.*should_training_stop"):
        fit(tmp_path, callbacks=[Mistaken()]).train()


@pytest.mark.mission("S095")
@pytest.mark.parametrize(
    "given", [[StopAfter(3)], StopAfter(3), [StopAfter(3), Listener]], ids=["list", "one", "class"]
)
def test_callback_in_the_singular_is_taken_with_one_warning(given, tmp_path):
    with pytest.warns(FutureWarning, match="callbacks") as warned:
        trainer = fit(tmp_path, num_train_epochs=5, callback=given)
    assert [warning.category for warning in warned].count(FutureWarning) == 1
    assert trainer.train().global_step == 3


@pytest.mark.mission("S098")
def test_callbacks_see_the_objects_of_the_run(tmp_path):
    trainer = fit(tmp_path, max_steps=1, callbacks=[Listener])
    trainer.train()
    seen = trainer.pop_callback(Listener).seen
    assert seen["model"] is trainer.model and seen["optimizer"] is trainer.optimizer
    assert seen["train_dataloader"] is not None and seen["lr_scheduler"] is trainer.lr_scheduler


@pytest.mark.mission("S099", "S100")
def test_callbacks_are_added_by_class_or_instance_and_keep_their_order(tmp_path):
    class Other(Listener):
        pass

    trainer, last = fit(tmp_path, max_steps=2), Other()
    trainer.add_callback(Listener)
    trainer.add_callback(last)
    assert type(trainer.callbacks[-2]) is Listener and trainer.callbacks[-1] is last
    trainer.train()
    assert trainer.callbacks[-2].steps == last.steps == 2


# ---------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.mission("S103", "S107")
def test_a_damaged_checkpoint_is_passed_over_and_never_taken_in_part(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="posttrain")
    options = dict(max_steps=4, save_strategy="steps", save_steps=1)
    straight = fit(tmp_path, **options)
    straight.train()
    (tmp_path / "checkpoint-4" / "optimizer.json").unlink()
    resumed = fit(tmp_path, **options)
    resumed.train(resume_from_checkpoint=True)
    assert "checkpoint-4" in caplog.text and "optimizer.json" in caplog.text
    assert "from step 3" in caplog.text
    assert_equal(weights(resumed), weights(straight))
    (tmp_path / "checkpoint-4" / "scheduler.json").unlink()
    with pytest.raises(CheckpointError, match="scheduler.json"):
        fit(tmp_path, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


class Augmented(Mapped):
    """Rows with noise of all three generators."""

    def __getitem__(self, row):
        import random

        noise = torch.rand(()).item() + np.random.rand() + random.random()
        return {**super().__getitem__(row), "x": super().__getitem__(row)["x"] + noise}


@pytest.mark.mission("S109")
def test_a_run_goes_on_from_the_last_checkpoint_of_the_hub(hub, tmp_path):  # noqa: F811
    options = dict(push_to_hub=True, hub_token=TOKEN, hub_model_id="me/model", hub_strategy="checkpoint")
    options |= dict(save_strategy="steps", save_steps=2, hub_always_push=True, lr_scheduler_type="constant")
    straight = fit(tmp_path / "straight", max_steps=4, lr_scheduler_type="constant")
    straight.train()
    fit(tmp_path / "first", max_steps=2, **options).train()
    received = (
        tmp_path / "received" / "last-checkpoint"
    )  # as `hf download me/model --include 'last-checkpoint/*'` leaves it
    received.mkdir(parents=True)
    for name, data in hub.files["me/model", "main"].items():
        if name.startswith("last-checkpoint/"):
            (received / name.removeprefix("last-checkpoint/")).write_bytes(data)
    resumed = fit(tmp_path / "second", max_steps=4, lr_scheduler_type="constant", callbacks=[Listener])
    assert resumed.train(resume_from_checkpoint=received).global_step == 4
    assert resumed.pop_callback(Listener).steps == 2  # the other two are those of the first run
    assert_equal(weights(resumed), weights(straight))


@pytest.mark.long
@pytest.mark.mission("S104", "S105", "S106")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("path", [str, Path])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(path, workers, tmp_path):
    options = dict(rows=Augmented(), max_steps=6, per_device_train_batch_size=4, dataloader_num_workers=workers)
    straight = fit(tmp_path, save_strategy="steps", save_steps=3, **options)
    straight.train()
    resumed = fit(tmp_path, **options)
    resumed.train(resume_from_checkpoint=path(tmp_path / "checkpoint-3"))
    assert logged(resumed, "loss") == logged(straight, "loss")
    assert_equal(weights(resumed), weights(straight))


# ----------------------------------------------------------------------------------------------------- the command line


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default="facebook/opt-125m")


@dataclass
class DataArguments:
    lazy_preprocess: bool = False


@dataclass
class ActionHeadArguments:
    policy_head_type: str = field(default="scale_dp_policy")


@pytest.fixture
def parser():
    return transformers.HfArgumentParser((ModelArguments, DataArguments, WithEMA, ActionHeadArguments))


@pytest.mark.mission("S133")
def test_four_groups_of_arguments_are_parsed_together(parser, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--output_dir", "out", "--policy_head_type", "unet_diffusion_policy"])
    model, data, training, head = parser.parse_args_into_dataclasses()
    assert (model.model_name_or_path, data.lazy_preprocess) == ("facebook/opt-125m", False)
    assert (training.output_dir, training.using_ema) == ("out", False)
    assert head.policy_head_type == "unet_diffusion_policy"


@pytest.mark.mission("S134")
def test_arguments_come_from_a_list_or_a_file_and_what_is_unknown_is_returned(parser, tmp_path, monkeypatch):
    (tmp_path / "run.args").write_text("--output_dir from_file --max_steps 7")
    (tmp_path / "train.args").write_text("--max_steps 3")
    parse = parser.parse_args_into_dataclasses
    *groups, rest = parse(["--max_steps", "5", "--unknown", "1"], return_remaining_strings=True)
    assert [type(group) for group in groups] == [ModelArguments, DataArguments, WithEMA, ActionHeadArguments]
    assert groups[2].max_steps == 5 and rest == ["--unknown", "1"]
    named = parse([], look_for_args_file=False, args_filename=str(tmp_path / "run.args"))[2]
    assert (named.output_dir, named.max_steps) == ("from_file", 7)
    flagged = parse(["--args", str(tmp_path / "run.args"), "--max_steps", "9"], args_file_flag="--args")[2]
    assert (flagged.output_dir, flagged.max_steps) == ("from_file", 9)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    assert parse([])[2].max_steps == 3 and parse([], look_for_args_file=False)[2].max_steps == -1


@pytest.mark.mission("S135")
@pytest.mark.parametrize("flags", [["--lazy_preprocess"], ["--lazy_preprocess", "true"]], ids=["flag", "value"])
def test_a_flag_may_have_a_value_and_every_field_is_optional(parser, flags):
    _, data, training, _ = parser.parse_args_into_dataclasses([*flags, "--bf16", "--eval_steps", "3"])
    assert data.lazy_preprocess is True and training.bf16 is True and training.eval_steps == 3
    assert training.fp16 is False and training.run_name is None


@pytest.mark.mission("S136")
def test_help_lists_every_argument(parser, capsys):
    parser.print_help()
    shown = capsys.readouterr().out
    assert all(f"--{name}" in shown for name in ("using_ema", "learning_rate", "save_total_limit", "policy_head_type"))


# ----------------------------------------------------------------------------------- several processes, started once


def class_weighted(out, size, **options):
    options |= dict(max_steps=3, optim="sgd", logging_steps=3)
    return classify(out, ClassWeights, per_device_train_batch_size=size, **options)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    out = tmp_path_factory.mktemp("pair")
    done = together(2, [__file__, str(out)])
    assert done.returncode == 0, done.stderr[-4000:]
    return done, torch.load(out / "weights.pt"), torch.load(out / "weighted.pt")


@pytest.mark.long
@pytest.mark.mission("S083")
def test_compute_loss_of_ones_own_reads_the_wrapped_model(pair, tmp_path):
    alone = class_weighted(tmp_path, 2, gradient_accumulation_steps=2)
    alone.train()
    torch.testing.assert_close(weights(alone), pair[2], rtol=0, atol=1e-6)


@pytest.mark.mission("S013")
def test_two_processes_give_the_weights_of_one_with_twice_the_batch(pair, tmp_path):
    alone = classify(tmp_path, per_device_train_batch_size=4, max_steps=3, optim="sgd", logging_steps=3)
    alone.train()
    torch.testing.assert_close(weights(alone), pair[1], rtol=0, atol=1e-6)


@pytest.mark.mission("S037")
def test_only_the_main_process_says_what_it_does(pair):
    assert (pair[0].stderr + pair[0].stdout).count("for 3 steps of") == 2  # one for each of two runs


# ------------------------------------------------------------------------------------- scripts, as tutorials print them


@pytest.fixture(scope="module")
def imdb():
    texts = [{"text": text[:60], "label": index % 3} for index, text in enumerate(tiny.CORPUS * 6)]
    raw = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(texts), "test": datasets.Dataset.from_list(texts[:9])}
    )
    tokenizer = tiny.tokenizer()
    return raw.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=32), batched=True)


def bert():
    return tiny.classifier(max_position_embeddings=128)


@pytest.mark.mission("S008")
def test_script_of_the_first_promise_runs_as_printed(imdb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, dataset, tokenizer, compute_metrics = bert(), imdb, tiny.tokenizer(), accuracy
    data_collator = transformers.DataCollatorWithPadding(tokenizer)
    training_args = TrainingArguments(
        output_dir="your-model",
        learning_rate=2e-5,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=16,
        num_train_epochs=2,
        weight_decay=0.01,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        push_to_hub=True,
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"],
        tokenizer=tokenizer,
        data_collator=data_collator,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    assert saved("your-model") == ["checkpoint-2", "checkpoint-4"]
    assert trainer.train(resume_from_checkpoint=True).global_step == 4
    assert trainer.train(resume_from_checkpoint="your-model/checkpoint-2").global_step == 4
    stopping = Trainer(
        model=model,
        args=TrainingArguments("stopping", num_train_epochs=30, disable_tqdm=True),
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"],
        tokenizer=tokenizer,
        data_collator=data_collator,
        compute_metrics=compute_metrics,
        callback=[StopAfter()],
    )
    assert stopping.train().global_step == 10


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    weighted = class_weighted(folder / "weighted", 2)
    weighted.train()
    plain = classify(folder / "plain", per_device_train_batch_size=2, max_steps=3, optim="sgd", logging_steps=3)
    plain.train()
    if plain.is_world_process_zero():
        torch.save(weights(plain), folder / "weights.pt")
        torch.save(weights(weighted), folder / "weighted.pt")
    torch.distributed.destroy_process_group()
