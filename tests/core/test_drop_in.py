"""What scripts written for transformers' Trainer count on. Most tests run one script under both imports and compare."""

import dataclasses
import json
import os
from functools import partial
from types import SimpleNamespace

import accelerate.logging
import numpy as np
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from torch import nn

import posttrain.core
from posttrain.core.callbacks import EVENTS
from posttrain.core.errors import ConfigError
from posttrain.core.logging.metrics import is_timing
from posttrain.core.losses.normalization import flops_parameters
from tests import tiny, versions
from tests.contract.trainers import arguments, pad

if not versions.IS_CURRENT:
    pytest.skip("compares with the Trainer of transformers 5.23", allow_module_level=True)

OURS = SimpleNamespace(here="ours", **{name: getattr(posttrain.core, name) for name in posttrain.core.__all__})
THEIRS = SimpleNamespace(here="theirs", Trainer=transformers.Trainer, TrainingArguments=transformers.TrainingArguments,
                         TrainerCallback=transformers.TrainerCallback,
                         EarlyStoppingCallback=transformers.EarlyStoppingCallback,
                         ExportableState=transformers.trainer_callback.ExportableState)  # fmt: skip
OPTIONS = """
    callbacks compute_loss_func compute_metrics data_collator eval_dataset model_init optimizer_cls_and_kwargs
    optimizers preprocess_logits_for_metrics processing_class
""".split()


class Line:
    """Rows of ``y = 2 x + 3`` with noise, read by index alone."""

    def __init__(self, length=64, labels=("labels",)):
        random = np.random.RandomState(0)
        self.x = random.normal(size=length).astype(np.float32)
        self.ys = {name: (2 * self.x + 3 + random.normal(scale=0.1, size=length)).astype(np.float32) for name in labels}

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return {"input_x": self.x[row]} | {name: y[row] for name, y in self.ys.items()}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        rows = Line(20)
        return (rows[i] for i in range(20))


class Regression(nn.Module):
    """A module without a config, that answers with a tuple."""

    def __init__(self, a=0.0, b=0.0, outputs=1):
        super().__init__()
        self.a, self.b, self.outputs = nn.Parameter(torch.tensor(a)), nn.Parameter(torch.tensor(b)), outputs
        self.config = None

    def forward(self, input_x, labels=None, **kwargs):
        y = input_x * self.a + self.b
        return (() if labels is None else (nn.functional.mse_loss(y, labels),)) + (y,) * self.outputs


@pytest.fixture
def script(tmp_path):
    """``script(library, ...)``: a trainer of that library, with a folder of its own."""

    def make(library, model=None, rows=None, trainer=None, **options):
        parts = {name: options.pop(name) for name in OPTIONS if name in options}
        usual = dict(output_dir=str(tmp_path / library.here), report_to="none", use_cpu=True, disable_tqdm=True,
                     save_strategy="no", logging_steps=1)  # fmt: skip
        args = library.TrainingArguments(**(usual | options))
        if "model_init" not in parts:
            model = Regression() if model is None else model
        parts.setdefault("eval_dataset", Line(20))
        return (trainer or library.Trainer)(model, args, train_dataset=Line() if rows is None else rows, **parts)

    return make


def language(script, library, **options):
    usual = dict(data_collator=pad, per_device_train_batch_size=4, eval_dataset=tiny.token_rows(7, seed=1))
    return script(library, tiny.causal_lm(), tiny.token_rows(22), **(usual | options))


def plain(value):
    """`value` without what two runs cannot share: times, and digits beyond the fifth."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if not is_timing(k) and not k.endswith("preparation_time")}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return plain(value.tolist())
    return float(f"{value:.5g}") if isinstance(value, float) else value


def agree(run):
    """What `run` gives under both libraries, which must be the same."""
    theirs, ours = plain(run(THEIRS)), plain(run(OURS))
    assert ours == theirs
    return ours


def log_of(trainer):
    # transformers' PrinterCallback takes `total_flos` out of the record that it is shown, and of the metrics of `train`
    return [{k: v for k, v in record.items() if k != "total_flos"} for record in trainer.state.log_history]


# ---------------------------------------------------------------------------------------------------- training


@pytest.mark.rotated
@pytest.mark.parametrize("options", [
    {"num_train_epochs": 1.5}, {"num_train_epochs": 1.3}, {"num_train_epochs": 0.1}, {"max_steps": 10},
    {"num_train_epochs": 2, "gradient_accumulation_steps": 3},
    {"num_train_epochs": 2, "gradient_accumulation_steps": 99}, {"max_steps": 10, "per_device_train_batch_size": 99},
], ids=str)  # fmt: skip
def test_a_run_is_as_long_as_ever(script, options):
    def run(library):
        trainer = script(library, rows=Line(57), **options)
        trainer.train()
        state = trainer.state
        return state.global_step, state.max_steps, state.num_train_epochs, [r["epoch"] for r in state.log_history]

    assert agree(run)[0] > 0


@pytest.mark.rotated
@pytest.mark.parametrize("options", [
    {"logging_strategy": "epoch", "logging_first_step": True}, {"logging_strategy": "no"}, {"logging_steps": 5},
    {"eval_strategy": "steps", "eval_steps": 2, "eval_delay": 5}, {"eval_strategy": "epoch", "eval_delay": 1.5},
    {"eval_strategy": "steps", "eval_steps": 0.3, "eval_on_start": True}, {"logging_steps": 0.4},
    {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch", "lr_scheduler_kwargs": {"patience": 0},
     "metric_for_best_model": "s", "compute_metrics": lambda p: {"s": 1.0}},
], ids=lambda changes: "-".join(changes))  # fmt: skip
def test_the_log_history_is_the_same(script, options):
    def run(library):
        trainer = script(library, num_train_epochs=3, **options)
        trainer.train()
        return log_of(trainer)

    assert "train_loss" in agree(run)[-1]


def test_callbacks_see_the_trainer_as_it_is(script):
    def run(library):
        seen, trainers = [], []

        class Look(library.TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                trainer = trainers[0]
                seen.append([trainer.is_in_train, trainer.state is state, trainer.control is control, state.max_steps])
                seen.append([kwargs["model"] is trainer.model, kwargs["optimizer"] is not None, state.logging_steps])
                seen.append([trainer.current_gradient_accumulation_steps, len(kwargs["train_dataloader"])])

        trainer = script(library, callbacks=[Look], max_steps=2, gradient_accumulation_steps=3, logging_steps=0.5)
        trainers.append(trainer)
        trainer.train()
        return seen, trainer.is_in_train

    assert agree(run)[0][:3] == [[True, True, True, 2], [True, True, 1], [3, 8]]


def test_events_of_epochs_evaluation_and_prediction_come_in_the_same_order(script):
    def run(library):
        events = []
        recorder = type("Recorder", (library.TrainerCallback,), {
            event: lambda self, args, state, control, name=event, **kwargs: events.append(name) for event in EVENTS
        })  # fmt: skip
        trainer = script(library, rows=Line(24), callbacks=[recorder()], num_train_epochs=2, save_strategy="epoch",
                         eval_strategy="epoch", logging_strategy="epoch", gradient_accumulation_steps=2)  # fmt: skip
        trainer.train()
        trainer.evaluate()
        trainer.predict(Line(5))
        return events

    assert agree(run)[-2:] == ["on_prediction_step", "on_predict"]


def test_stopping_an_epoch_stops_that_epoch_alone(script):
    def run(library):
        class Stop(library.TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                control.should_epoch_stop = state.global_step == 3

        trainer = script(library, rows=Line(32), per_device_train_batch_size=4, callbacks=[Stop])
        trainer.train()
        return trainer.state.global_step

    assert agree(run) == 3 + 8 + 8


def test_flags_that_a_callback_raises_are_heeded(script):
    def run(library):
        class Ask(library.TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == 2:
                    control.should_log = control.should_evaluate = control.should_save = True
                return control

        trainer = script(library, callbacks=[Ask], max_steps=4, logging_strategy="no")
        trainer.train()
        return [r["step"] for r in log_of(trainer)], [d for d in os.listdir(trainer.args.output_dir) if "check" in d]

    assert agree(run) == [[2, 2, 4], ["checkpoint-2"]]


@pytest.mark.long
def test_training_twice_goes_on_with_the_same_model_and_optimizer(script):
    def run(library):
        trainer = script(library, max_steps=5, learning_rate=0.1)
        trainer.train()
        first = trainer.model.a.item()
        trainer.train()
        return first, trainer.model.a.item(), trainer.state.global_step, trainer.model is trainer.model_wrapped

    first, second, _, _ = agree(run)
    assert first != second


@pytest.mark.parametrize(("size", "accumulation"), [(4, 1), (2, 2), (1, 4)])
def test_a_loss_function_that_divides_by_the_items_trains_and_evaluates(script, size, accumulation):
    def loss_function(outputs, labels, num_items_in_batch=None):
        logits = outputs.logits[:, :-1]
        assert num_items_in_batch.shape == ()
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return total / num_items_in_batch

    def run(library):
        options = dict(per_device_train_batch_size=size, gradient_accumulation_steps=accumulation, max_steps=3)
        trainer = language(script, library, compute_loss_func=loss_function, per_device_eval_batch_size=7, **options)
        trainer.train()
        return log_of(trainer), trainer.evaluate()["eval_loss"]

    assert len(agree(run)[0]) == 4


def test_a_training_step_and_a_prediction_step_of_one_batch_have_one_loss(script):
    def run(library):
        def squares(outputs, labels, num_items_in_batch=None):
            return (outputs[0] - labels).square().sum() / num_items_in_batch

        trainer = script(library, Regression(1.0, 2.0), compute_loss_func=squares)
        batch = {"input_x": torch.ones(4), "labels": torch.zeros(4)}
        trained = trainer.training_step(trainer.model, dict(batch), 4)
        return trained, trainer.prediction_step(trainer.model, dict(batch), prediction_loss_only=True)[0]

    assert agree(run) == [9.0, 9.0]


def test_a_compute_loss_that_divides_by_the_items_can_be_evaluated(script):
    def run(library):
        class Summed(library.Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                labels = inputs.pop("labels")
                outputs = model(**inputs)
                loss = (outputs[0] - labels).square().sum() / num_items_in_batch
                return (loss, (loss, *outputs)) if return_outputs else loss

        return script(library, Regression(1.0, 2.0), trainer=Summed, per_device_eval_batch_size=3).evaluate()[
            "eval_loss"
        ]

    rows = Line(20)
    assert agree(run) == pytest.approx(np.mean((rows.x + 2 - rows.ys["labels"]) ** 2), rel=1e-4)


def test_label_smoothing_is_left_out_of_multi_label_classification(script):
    def run(library):
        model = Classes()
        model.config = SimpleNamespace(problem_type="multi_label_classification")
        rows = [{"x": np.ones(4, np.float32), "labels": np.array([1, 0, 1], np.float32)}] * 8
        with pytest.warns(UserWarning, match="Label smoothing is not compatible with multi-label"):
            trainer = script(library, model, rows, eval_dataset=rows, label_smoothing_factor=0.1)
        return trainer.label_smoother, trainer.evaluate()["eval_loss"]

    assert agree(run) == [None, 0.69315]  # log 2: every logit is 0


class Classes(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3))

    def forward(self, x, labels=None):
        logits = x @ self.weight
        return {"loss": nn.functional.binary_cross_entropy_with_logits(logits, labels), "logits": logits}


def test_the_label_smoother_may_be_called_by_scripts(script):
    def run(library):
        class Smoothed(library.Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                labels = inputs.pop("labels")
                outputs = model(**inputs)
                loss = self.label_smoother(outputs, labels, shift_labels=True)
                return (loss, outputs) if return_outputs else loss

        trainer = language(script, library, trainer=Smoothed, label_smoothing_factor=0.1, max_steps=2)
        return trainer.train().training_loss

    assert agree(run) > 0


# ---------------------------------------------------------------------------------------------------- counts


@pytest.mark.long
@pytest.mark.parametrize("counted", ["all", "non_padding"])
def test_tokens_and_operations_are_counted_up_to_each_record(script, counted):
    def run(library):
        seen = []

        class Look(library.TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                seen.append(state.num_input_tokens_seen)

        trainer = language(script, library, callbacks=[Look], include_num_input_tokens_seen=counted, logging_steps=2,
                           max_steps=5, eval_strategy="steps", eval_steps=3)  # fmt: skip
        tokens = trainer.train().metrics["num_input_tokens_seen"]
        return log_of(trainer), [*seen, tokens], trainer.state.total_flos

    _, (*seen, tokens), flops = agree(run)
    assert tokens == seen[-1]
    if counted == "all":
        assert flops == pytest.approx(6 * seen[-1] * flops_parameters(tiny.causal_lm()), rel=1e-4)
    assert isinstance(flops, float) and len(seen) == 5


def test_padding_is_told_by_its_id_where_there_is_no_mask(script):
    rows = [{"input_ids": [5, 6, 0, 0], "labels": [5, 6, -100, -100]}] * 8

    def run(library):
        trainer = script(library, tiny.causal_lm(), rows, include_num_input_tokens_seen="non_padding", max_steps=1,
                         processing_class=Tokenizer(), data_collator=transformers.default_data_collator)  # fmt: skip
        trainer.train()
        return trainer.state.num_input_tokens_seen

    assert agree(run) == 16


def test_padding_that_cannot_be_told_is_counted_and_said_once(script, caplog):
    rows = [{"input_ids": [5, 6, 0, 0], "labels": [5, 6, -100, -100]}] * 8
    trainer = script(OURS, tiny.causal_lm(), rows, include_num_input_tokens_seen="non_padding", max_steps=2,
                     per_device_train_batch_size=2)  # fmt: skip
    trainer.train()
    assert trainer.state.num_input_tokens_seen == 16
    assert sum("padding looks like any token" in record.getMessage() for record in caplog.records) == 1


def test_tokens_that_cannot_be_counted_are_said_once(script, caplog):
    trainer = script(OURS, include_num_input_tokens_seen=True, max_steps=2)
    trainer.train()
    assert trainer.state.num_input_tokens_seen == 0
    said = [record for record in caplog.records if "'input_ids', which the batches do not hold" in record.getMessage()]
    assert len(said) == 1


class Tokenizer:
    pad_token_id, eos_token_id, bos_token_id = 0, 1, 2


def test_numbers_of_a_run_can_be_asked_for(script):
    def run(library):
        trainer = script(library, gradient_accumulation_steps=2)
        loader, evaluation = trainer.get_train_dataloader(), trainer.get_eval_dataloader()
        for ask in (trainer.get_learning_rates, trainer.get_optimizer_group):
            with pytest.raises(ValueError, match="ptimizer"):
                ask()
        trainer.create_optimizer_and_scheduler(10)
        group = trainer.get_optimizer_group(trainer.model.b)
        return [
            trainer.num_examples(loader), trainer.num_examples(evaluation), len(loader), loader.total_batch_size,
            loader.dataset is trainer.train_dataset, evaluation.dataset is trainer.eval_dataset,
            trainer.get_num_trainable_parameters(), trainer.get_total_train_batch_size(trainer.args),
            trainer.set_initial_training_values(trainer.args, loader), trainer.get_learning_rates(), group["lr"],
            [len(parameters) for parameters in trainer.get_optimizer_group()], trainer.get_tp_size(),
            trainer.is_deepspeed_enabled, trainer.is_fsdp_enabled, trainer.accelerator.num_processes,
            trainer.floating_point_ops({"input_ids": torch.zeros(2, 3)}), trainer.end(),
        ]  # fmt: skip

    assert agree(run)[:4] == [64, 20, 8, 8]


# ---------------------------------------------------------------------------------------------------- evaluation


def test_metrics_are_numbers_of_python_under_the_prefix(script):
    def run(library):
        metrics = {
            "a": np.float32(0.5),
            "n": np.int64(3),
            "t": torch.tensor(2.0),
            "nest": {"b": np.float64(1)},
            "eval_c": 1,
        }
        trainer = script(library, compute_metrics=lambda prediction: dict(metrics))
        found = plain(trainer.evaluate())
        return dict(sorted(found.items())), [type(value).__name__ for _, value in sorted(found.items())]

    values, kinds = agree(run)
    assert list(values) == ["epoch", "eval_a", "eval_c", "eval_loss", "eval_n", "eval_nest", "eval_t"]
    assert kinds == ["int", "float", "int", "float", "int", "dict", "float"]


@pytest.mark.parametrize(
    ("outputs", "labels"), [(1, ("labels",)), (2, ("labels",)), (2, ("labels", "labels_2")), (1, ())]
)
def test_predictions_of_several_outputs_and_labels(script, outputs, labels):
    def run(library):
        options = dict(label_names=list(labels), per_device_eval_batch_size=2)
        found = script(library, Regression(1.0, 2.0, outputs), **options).predict(Line(5, labels or ("labels",)))
        kinds = type(found.predictions).__name__, type(found.label_ids).__name__
        return kinds, found.predictions, found.label_ids, found.metrics

    kinds, predictions, _, _ = agree(run)
    x = plain(Line(5).x + 2)
    if labels:
        assert (predictions if outputs == 1 else predictions[-1]) == x
    assert kinds[1] == ("ndarray" if len(labels) == 1 else "tuple" if labels else "NoneType")


def test_without_labels_there_are_predictions_and_compute_metrics_is_not_asked(script):
    def run(library):
        trainer = script(library, Regression(1.0, 2.0), compute_metrics=lambda prediction: 1 / 0)
        found = trainer.predict([{"input_x": row["input_x"]} for row in Line(5)])
        return found.predictions, found.label_ids, found.metrics

    assert agree(run) == [plain(Line(5).x + 2), None, {}]


def test_a_batch_may_ask_for_a_loss_without_labels(script):
    class Contrast(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(1.0))

        def forward(self, x, return_loss=None):
            logits = x * self.weight
            return {"loss": logits.square().mean(), "logits": logits} if return_loss else {"logits": logits}

    def collate(rows):
        return {"x": torch.tensor([row["x"] for row in rows]), "return_loss": True}

    def run(library):
        rows = [{"x": 2.0}] * 8
        trainer = script(
            library, Contrast(), rows, eval_dataset=rows, data_collator=collate, remove_unused_columns=False
        )
        return trainer.evaluate()

    assert agree(run)["eval_loss"] == 4.0


class Summing:
    """A `compute_metrics` for `batch_eval_metrics`."""

    def __init__(self):
        self.sums = []

    def __call__(self, prediction, compute_result):
        assert isinstance(prediction.predictions, torch.Tensor)
        self.sums.append(prediction.predictions.sum().item())
        if compute_result:
            sums, self.sums = self.sums, []
            return {"sum": sum(sums), "batches": len(sums)}


def test_metrics_batch_by_batch_leave_the_predictions_to_predict(script):
    def run(library):
        trainer = script(library, Regression(1.0, 2.0), compute_metrics=Summing(), batch_eval_metrics=True)
        found = trainer.predict(Line(9))
        return trainer.evaluate(), found.predictions, found.label_ids, found.metrics

    metrics, predictions, _, _ = agree(run)
    assert metrics["eval_batches"] == 3 and predictions == plain(Line(9).x + 2)


def test_an_evaluation_batch_without_a_label_counts_for_nothing(script):
    row = {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [5, 6, 7]}
    silent = row | {"labels": [-100, -100, -100]}

    def run(library):
        trainer = script(library, tiny.causal_lm(), [row], eval_dataset=[row, silent], data_collator=pad,
                         per_device_eval_batch_size=1)  # fmt: skip
        return trainer.evaluate()["eval_loss"], trainer.evaluate([row])["eval_loss"]

    both, alone = agree(run)
    assert both == alone


def test_several_evaluation_sets_by_name_and_by_value(script):
    def run(library):
        trainer = script(library, eval_dataset={"a": Line(9), "b": Line(5)}, metric_for_best_model="a_loss",
        max_steps=4,
                         eval_strategy="steps", eval_steps=2)  # fmt: skip
        trainer.train()
        trainer.evaluate({"c": Line(5)})
        return log_of(trainer), trainer.state.best_metric, trainer.evaluate("a"), trainer.evaluate(Stream())

    assert {"eval_a_loss", "eval_b_loss"} <= {key for record in agree(run)[0] for key in record}


def test_a_loader_of_persistent_workers_is_kept_and_another_is_not(script):
    lasting = script(OURS, dataloader_num_workers=1, dataloader_persistent_workers=True, eval_dataset={"a": Line(9)})
    loader = lasting.get_eval_dataloader("a")
    assert lasting.get_eval_dataloader("a") is loader
    assert len(lasting.get_eval_dataloader(Line(3)).dataset) == 3
    assert lasting.evaluate("a")["eval_loss"] == lasting.evaluate("a")["eval_loss"]
    fleeting = script(OURS)
    assert fleeting.get_eval_dataloader() is not fleeting.get_eval_dataloader()


# ---------------------------------------------------------------------------------------------------- the best model


def scores(values):
    values = iter(values)
    return lambda prediction: {"score": next(values)}


BEST = dict(eval_strategy="steps", eval_steps=1, metric_for_best_model="score", greater_is_better=True)


@pytest.mark.parametrize(("values", "step"), [
    ([0.5, 0.56, 0.62, 0.7, 0.71], 3), ([0.5, 0.4, 0.55, 0.6, 0.3], 3), ([0.1, 0.3, 0.5, 0.52, 0.53], 5),
])  # fmt: skip
def test_early_stopping_counts_improvements_beyond_its_threshold(script, values, step):
    def run(library):
        stop = library.EarlyStoppingCallback(2, early_stopping_threshold=0.1)
        trainer = script(library, callbacks=[stop], max_steps=7, compute_metrics=scores([*values, 0, 0]), **BEST)
        trainer.train()
        return trainer.state.global_step

    assert agree(run) == step


def test_early_stopping_added_later_is_checked_when_training_begins(script):
    trainer = script(OURS, max_steps=1)
    trainer.add_callback(OURS.EarlyStoppingCallback)
    with pytest.raises(ValueError, match="metric_for_best_model"):
        trainer.train()


def test_a_metric_that_is_nan_is_never_the_best(script):
    def run(library):
        found = scores([float("nan"), 0.2, 0.1])
        trainer = script(library, max_steps=3, save_strategy="steps", save_steps=1, compute_metrics=found, **BEST)
        trainer.train()
        return trainer.state.best_metric, trainer.state.best_global_step

    assert agree(run) == [0.2, 2]


def test_a_metric_that_is_never_a_number_leaves_the_model_of_the_last_step_and_is_said(script, caplog):
    found = scores([float("nan")] * 3)
    trainer = script(OURS, max_steps=2, save_strategy="steps", save_steps=1, compute_metrics=found, **BEST)
    trainer.args.load_best_model_at_end = True
    trainer.train()
    assert trainer.state.best_metric is None
    assert "no evaluation gave a number for metric_for_best_model='score'" in caplog.text


def test_the_best_weights_are_left_in_the_model_and_evaluate_the_same(script):
    def run(library):
        trainer = script(library, learning_rate=3.0, max_steps=9, save_strategy="steps", save_steps=3,
        eval_strategy="steps",
                         eval_steps=3, load_best_model_at_end=True, save_total_limit=2)  # fmt: skip
        trainer.train()
        kept = sorted(d for d in os.listdir(trainer.args.output_dir) if d.startswith("checkpoint"))
        assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric
        return trainer.state.best_metric, trainer.state.best_global_step, kept, trainer.model.a.item()

    assert len(agree(run)[2]) <= 2


@pytest.mark.long
def test_a_best_step_that_was_saved_before_it_was_evaluated_is_named_and_kept(script):
    """Steps are saved, epochs evaluated: step 8 is there when the evaluation after the epoch finds it the best."""

    def run(library):
        trainer = script(library, num_train_epochs=3, save_strategy="steps", save_steps=1, save_total_limit=2,
                         compute_metrics=scores([0.9, 0.5, 0.1]), **(BEST | dict(eval_strategy="epoch")))  # fmt: skip
        trainer.train()
        kept = sorted(d for d in os.listdir(trainer.args.output_dir) if d.startswith("checkpoint"))
        return os.path.basename(trainer.state.best_model_checkpoint), trainer.state.best_global_step, kept

    assert agree(run) == ["checkpoint-8", 8, ["checkpoint-24", "checkpoint-8"]]


def test_a_scheduler_of_transformers_that_follows_a_metric_is_stepped_with_it(script):
    def run(library):
        model = Regression()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = transformers.optimization.GreedyLR(optimizer, factor=0.5, patience=0, min_lr=1e-3)
        trainer = script(library, model, num_train_epochs=5, optimizers=(optimizer, scheduler), eval_strategy="epoch",
                         metric_for_best_model="score", greater_is_better=False,
                         compute_metrics=scores([1.0, 2.0, 3.0, 0.5, 4.0]))  # fmt: skip
        trainer.train()
        return [record["learning_rate"] for record in trainer.state.log_history if "learning_rate" in record]

    assert len(set(agree(run))) > 2


# ---------------------------------------------------------------------------------------------------- resuming


def test_the_state_of_a_resumed_run_is_that_of_a_straight_one(script, tmp_path):
    options = dict(max_steps=15, save_strategy="steps", save_steps=5, logging_steps=4, learning_rate=0.1)
    straight = script(OURS, **options)
    straight.train()
    resumed = script(OURS, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-5"))
    states = [dataclasses.asdict(trainer.state) for trainer in (straight, resumed)]
    for state in states:
        times = state["log_history"].pop()  # the last record, of the run as a whole, holds its times
        assert {name for name in times if is_timing(name)} == {
            "train_runtime", "train_samples_per_second", "train_steps_per_second",
        }  # fmt: skip
    assert states[0] == states[1]
    lines = [json.loads(line) for line in (tmp_path / "ours" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 8, 12, 15] and "perf/step_seconds" in lines[0]


@pytest.mark.long
def test_a_callback_with_a_state_of_arguments_alone_is_restored(script):
    def run(library):
        class Named(library.TrainerCallback, library.ExportableState):
            def __init__(self, name="new"):
                self.name = name

            def state(self):
                return {"args": {"name": self.name}}

        options = dict(max_steps=2, save_strategy="steps", save_steps=2, restore_callback_states_from_checkpoint=True)
        script(library, callbacks=[Named("first"), Named("second")], **options).train()
        trainer = script(library, callbacks=[Named(), Named()], **options)
        trainer.train(resume_from_checkpoint=True)
        return [callback.name for callback in trainer.callback_handler.callbacks if isinstance(callback, Named)]

    assert agree(run) == ["first", "second"]


def test_a_state_without_its_callback_is_warned_of(script, caplog):
    options = (
        dict(max_steps=2, save_strategy="steps", save_steps=2) | BEST | dict(compute_metrics=lambda p: {"score": 1.0})
    )
    script(OURS, callbacks=[OURS.EarlyStoppingCallback(9)], **options).train()
    script(OURS, **options).train(resume_from_checkpoint=True)
    assert "state of 1 EarlyStoppingCallback and the trainer has 0" in caplog.text


# ------------------------------------------------------------------------------------------------ scripts that override


def test_a_log_written_anew_still_reaches_the_callbacks(script):
    def run(library):
        heard = []

        class Hear(library.TrainerCallback):
            def on_log(self, args, state, control, logs=None, **kwargs):
                heard.append(sorted(logs))

        class Own(library.Trainer):
            def log(self, logs, start_time=None):
                self.state.log_history.append({"mine": 1.0, "step": self.state.global_step})
                self.control = self.callback_handler.on_log(self.args, self.state, self.control, {"mine": 1.0})

        trainer = script(library, trainer=Own, callbacks=[Hear], max_steps=2)
        trainer.train()
        handler = trainer.callback_handler
        assert handler.on_evaluate(trainer.args, trainer.state, trainer.control, {}) is trainer.control
        assert handler.on_step_end(trainer.args, trainer.state, trainer.control) is trainer.control
        return heard, trainer.state.log_history

    assert agree(run)[0] == [["mine"]] * 3


@pytest.mark.long
def test_a_training_step_written_anew_trains_the_same(script):
    def run(library):
        class Own(library.Trainer):
            def training_step(self, model, inputs, num_items_in_batch=None):
                model.train()
                inputs = self._prepare_inputs(inputs)
                with self.compute_loss_context_manager():
                    loss = self.compute_loss(model, inputs) / self.current_gradient_accumulation_steps
                self.accelerator.backward(loss)
                return loss.detach()

        options = dict(gradient_accumulation_steps=2, per_device_train_batch_size=4, max_steps=4, learning_rate=0.1)
        trainer = script(library, trainer=Own, **options)
        trainer.train()
        return trainer.model.a.item(), log_of(trainer)

    def usual(library):
        trainer = script(library, per_device_train_batch_size=8, max_steps=4, learning_rate=0.1)
        trainer.train()
        return trainer.model.a.item()

    assert agree(run)[0] == agree(usual)


def test_a_loss_of_a_scripts_own_is_said_to_be_scaled_by_a_text_in_place_of_a_loss_function(script):
    """As trl's GRPO of 0.22 to 0.28 does, and what was derived from it."""

    def run(library):
        class Scaled(library.Trainer):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, compute_loss_func="not None", **kwargs)

            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                return model(**inputs)[0] / self.current_gradient_accumulation_steps

        options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 5}
        trainer = script(library, trainer=Scaled, learning_rate=0.1, **options)
        trainer.train()
        return [(record["loss"], record["grad_norm"]) for record in trainer.state.log_history[:-1]]

    agree(run)


def test_a_preparation_that_takes_a_part_of_the_rows_leaves_the_mean_of_micro_batches(script):
    """The way of trl's GRPO until 2025: a batch is of all micro-batches, and each step takes its part of it."""

    def run(library):
        class Parts(library.Trainer):
            taken = 0

            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.model_accepts_loss_kwargs = False

            def _prepare_inputs(self, inputs):
                inputs, part = super()._prepare_inputs(inputs), self.taken % 2
                self.taken += 1
                return {name: value[4 * part : 4 * part + 4] for name, value in inputs.items()}

            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                return model(**inputs)[0]

        options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 5}
        trainer = script(library, trainer=Parts, learning_rate=0.1, **options)
        trainer.train()
        return [(record["loss"], record["grad_norm"]) for record in trainer.state.log_history[:-1]], trainer.taken

    agree(run)


@pytest.mark.long
@pytest.mark.parametrize("order", ["of the trainer", "of the loader"])
def test_a_training_loader_written_anew_reads_the_same_rows_and_can_be_resumed(script, tmp_path, order):
    def run(library):
        class Own(library.Trainer):
            def get_train_dataloader(self):
                collator = self._get_collator_with_removed_columns(self.data_collator, description="training")
                options = {"shuffle": True} if order == "of the loader" else {"sampler": self._get_train_sampler()}
                options |= {"batch_size": self._train_batch_size, "collate_fn": collator}
                return self.accelerator.prepare(torch.utils.data.DataLoader(self.train_dataset, **options))

        options = dict(trainer=Own, max_steps=9, learning_rate=0.1, save_strategy="steps", save_steps=5)
        straight = script(library, **options)
        straight.train()
        resumed = script(library, **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / library.here / "checkpoint-5"))
        assert resumed.model.a.item() == straight.model.a.item()
        return log_of(straight)

    assert len(agree(run)) == 10


def test_columns_that_the_model_does_not_take_can_be_removed_by_hand(script):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"input_x": [1.0], "labels": [2.0], "text": ["a"]})

    def run(library):
        return script(library)._remove_unused_columns(rows, description="training").column_names

    assert agree(run) == ["input_x", "labels"]


def test_saving_can_be_overridden_at_either_door(script, tmp_path):
    def run(library):
        calls = []

        class Own(library.Trainer):
            def _save(self, output_dir=None, state_dict=None):
                calls.append(os.path.basename(output_dir).partition(".")[0] != "")
                super()._save(output_dir, state_dict)

            def save_model(self, output_dir=None, _internal_call=False):
                calls.append("save_model")
                super().save_model(output_dir, _internal_call)

        trainer = script(library, trainer=Own, max_steps=1, save_strategy="steps", save_steps=1)
        trainer.train()
        trainer._save(str(tmp_path / "picked"), state_dict={"a": torch.tensor(7.0), "b": torch.tensor(8.0)})
        return [call for call in calls if call == "save_model"], trainer._get_output_dir(
            None
        ) == trainer.args.output_dir

    assert agree(run) == [["save_model"], True]
    from safetensors.torch import load_file

    assert load_file(tmp_path / "picked" / "model.safetensors")["a"] == 7.0


def test_evaluation_inside_training_can_be_overridden(script):
    def run(library):
        class Own(library.Trainer):
            def _evaluate(self, trial, ignore_keys_for_eval, skip_scheduler=False):
                metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
                self.log({"seen": metrics["eval_loss"]})
                return metrics

        trainer = script(library, trainer=Own, max_steps=2, eval_strategy="steps", eval_steps=1, eval_on_start=True)
        trainer.train()
        return log_of(trainer)

    assert sum("seen" in record for record in agree(run)) == 3


# ---------------------------------------------------------------------------------------------------- results on paper


def test_results_are_printed_and_saved_as_scripts_expect(script, capsys):
    metrics = {
        "train_runtime": 3661.5,
        "train_loss": 1.234567,
        "total_flos": 3e10,
        "epoch": 2.0,
        "train_mem_x": 1 << 21,
    }

    def run(library):
        trainer = script(library)
        capsys.readouterr()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", {"train_loss": 1.5, "epoch": 2.0})
        trainer.save_metrics("eval", {"eval_loss": 2.5})
        trainer.save_metrics("test", {"test_loss": 3.5}, combined=False)
        trainer.save_state()
        files = {}
        for name in ("train_results.json", "all_results.json", "test_results.json"):
            with open(os.path.join(trainer.args.output_dir, name), encoding="utf-8") as file:
                files[name] = json.load(file)
        return capsys.readouterr().out, files, sorted(os.listdir(trainer.args.output_dir))

    printed, files, _ = agree(run)
    assert "  train_runtime = 1:01:01.50\n" in printed and printed.startswith("***** train metrics *****\n")
    assert files["all_results.json"] == {"train_loss": 1.5, "epoch": 2.0, "eval_loss": 2.5}


def test_formatting_leaves_the_metrics_alone(script):
    metrics = {"total_flos": 3e10, "train_loss": 0.123456}
    assert script(OURS).metrics_format(metrics) == {"total_flos": "27GF", "train_loss": 0.1235}
    assert metrics == {"total_flos": 3e10, "train_loss": 0.123456}


# ---------------------------------------------------------------------------------------------------- refused at once


def with_optimizer():
    model = Regression()
    return {"model": model, "optimizers": (torch.optim.SGD(model.parameters(), lr=0.1), None)}


def quantized():
    model = Regression()
    model.is_quantized = True
    return model


@pytest.mark.parametrize(("wrong", "error", "message"), [
    (lambda: dict(eval_strategy="steps", eval_dataset=None), ValueError, "eval_strategy='steps' needs an eval_dataset"),
    (lambda: dict(rows=Stream()), ValueError, "Set max_steps"),
    (lambda: with_optimizer() | dict(optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1})), ValueError,
    "pass one of"), (lambda: dict(optimizers=with_optimizer()["optimizers"], model_init=Regression), ValueError,
    "model_init makes new"), (lambda: dict(batch_eval_metrics=True, compute_metrics=lambda p: {}), ValueError,
    "no argument compute_result"), (lambda: dict(data_collator="pad"), TypeError, "data_collator must be callable"),
    (lambda: dict(model=quantized()), ValueError, "quantized weights cannot be trained themselves"),
], ids=["no-eval-set", "endless", "two-optimizers", "optimizer-of-no-model", "metrics", "collator",
"quantized"])  # fmt: skip
def test_what_cannot_work_is_refused_when_the_trainer_is_built(script, wrong, error, message):
    with pytest.raises(error, match=message):
        script(OURS, **wrong())
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        options = {k: v for k, v in wrong().items() if k != "data_collator"}
        script(THEIRS, **options, **({"data_collator": Collator()} if "data_collator" in wrong() else {}))


class Collator:
    """Of years ago: no callable."""

    def collate_batch(self, rows):
        return rows


def test_scripts_find_the_attributes_they_read(script):
    names = """
        args model model_wrapped data_collator train_dataset eval_dataset processing_class model_init compute_metrics
        compute_loss_func preprocess_logits_for_metrics optimizer lr_scheduler optimizer_cls_and_kwargs callback_handler
        state control accelerator label_names can_return_loss label_smoother is_in_train is_model_parallel
        place_model_on_device is_deepspeed_enabled is_fsdp_enabled is_fsdp_xla_enabled deepspeed neftune_noise_alpha
        hp_name hp_search_backend hub_model_id current_flos model_accepts_loss_kwargs _train_batch_size
        _signature_columns
    """.split()

    def run(library):
        trainer = script(library, neftune_noise_alpha=None)
        assert [name for name in names if not hasattr(trainer, name)] == []
        plain = (
            "is_model_parallel",
            "place_model_on_device",
            "deepspeed",
            "hp_name",
            "hub_model_id",
            "neftune_noise_alpha",
        )
        return {name: getattr(trainer, name) for name in plain}

    assert agree(run)["place_model_on_device"] is True


def test_records_and_events_of_an_evaluation_see_the_model_in_evaluation_mode(script):
    """Subclasses tell by it which metrics of theirs to log, and callbacks sample without dropout."""

    def run(library):
        seen = []

        class See(library.TrainerCallback):
            def on_evaluate(self, args, state, control, model=None, **kwargs):
                seen.append(("on_evaluate", model.training))

            def on_predict(self, args, state, control, metrics, model=None, **kwargs):
                seen.append(("on_predict", model.training))

        class Own(library.Trainer):
            def log(self, logs, start_time=None):
                if "train_loss" not in logs:  # the last record comes after whatever was last
                    seen.append((sorted(logs)[0].split("_")[0], self.model.training))
                super().log(logs, start_time)

        trainer = script(library, trainer=Own, callbacks=[See], max_steps=2, eval_strategy="steps", eval_steps=1)
        trainer.train()
        trainer.evaluate()
        trainer.predict(Line(4))
        return seen

    assert ["eval", False] in agree(run)


def test_a_subclass_keeps_attributes_of_its_own_under_old_names(script):
    def run(library):
        class Own(library.Trainer):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self._metrics, self.gather_function, self.evaluator = {"train": [1.0]}, max, "mine"
                self.is_deepspeed_enabled = self.is_model_parallel = False

            def log(self, logs, start_time=None):
                super().log(logs | {"own": self._metrics["train"][0]}, start_time)

        trainer = script(library, trainer=Own, max_steps=1)
        trainer.train()
        trainer.evaluate()
        return trainer.evaluator, [record["own"] for record in trainer.state.log_history]

    assert agree(run) == ["mine", [1.0, 1.0, 1.0]]
    trainer = script(OURS, max_steps=1)
    trainer.tokenizer, trainer.neftune_noise_alpha = tiny.tokenizer(), 5.0
    assert trainer.processing_class is trainer.tokenizer and trainer.args.neftune_noise_alpha == 5.0
    trainer.metrics = {"mine": 1.0}
    with pytest.raises(AttributeError, match=r"has set self\.metrics to dict of its own.*Name yours otherwise"):
        trainer.train()


def test_arguments_of_a_subclass_find_what_those_of_transformers_have(script):
    def run(library):
        @dataclasses.dataclass
        class Own(library.TrainingArguments):
            _VALID_DICT_FIELDS = [*library.TrainingArguments._VALID_DICT_FIELDS, "mine"]
            mine: dict | str | None = dataclasses.field(default=None)

        args = Own("out", use_cpu=True, mine='{"a": 1}', accelerator_config={"use_configured_state": True})
        return args.mine, args.distributed_state.is_local_main_process, args.distributed_state.num_processes

    assert agree(run) == [{"a": 1}, True, 1]


@pytest.mark.parametrize("library", [THEIRS, OURS], ids=["theirs", "ours"])
def test_accelerates_loggers_write_as_soon_as_there_are_arguments(library, tmp_path, caplog):
    AcceleratorState._reset_state(reset_partial_state=True)
    library.TrainingArguments(tmp_path, use_cpu=True)
    accelerate.logging.get_logger("a script").warning("There is no trainer yet.")
    assert "There is no trainer yet." in caplog.text


def test_the_state_of_accelerate_is_used_as_it_was_configured_unless_the_arguments_contradict_it(script):
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        asked = {"accelerator_config": {"use_configured_state": True}}
        with pytest.raises(ValueError, match="state has mixed_precision='bf16'; set bf16=True"):
            script(OURS, **asked)
        assert script(OURS, bf16=True, **asked).dist.precision == "bf16"
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_weights_that_a_subclass_has_loaded_are_compared(script, caplog):
    class Own(OURS.Trainer):
        def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
            assert type(resume_from_checkpoint) is str
            found = self.model.load_state_dict({"a": torch.tensor(2.0), "c": torch.tensor(3.0)}, strict=False)
            self._issue_warnings_after_load(found)

    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "learning_rate": 0.0}
    script(OURS, **options).train()
    trainer = script(OURS, trainer=Own, **options | {"max_steps": 3})
    trainer.train(resume_from_checkpoint=True)
    assert trainer.model.a.item() == 2.0
    assert "The checkpoint lacks weights: b" in caplog.text and "has weights that the model does not: c" in caplog.text


def test_operations_are_counted_until_they_are_stored(script):
    trainer = language(script, OURS, max_steps=2, logging_strategy="no")
    trainer.current_flos += 6.0
    assert trainer.current_flos == 6.0
    seen = []
    trainer.add_callback(type("See", (OURS.TrainerCallback,), {
        "on_step_end": lambda self, args, state, control, **kwargs: seen.append(trainer.current_flos)
    }))  # fmt: skip
    trainer.train()
    assert 0 < seen[0] < seen[1] == trainer.state.total_flos and trainer.current_flos == 0


def test_the_arguments_decide_whether_the_model_is_moved(script, monkeypatch):
    moved = []
    monkeypatch.setattr(Regression, "to", lambda self, *args, **kwargs: moved.append(args) or self)
    script(OURS)
    assert len(moved) == 1

    @dataclasses.dataclass
    class Elsewhere(OURS.TrainingArguments):
        @property
        def place_model_on_device(self):
            return False

    library = SimpleNamespace(**(vars(OURS) | {"TrainingArguments": Elsewhere}))
    trainer = script(library)
    trainer.train()
    assert len(moved) == 1 and trainer.place_model_on_device is False


def test_a_sampler_that_takes_no_dataset_and_a_callback_that_asks_for_the_tokenizer_are_those_of_earlier_years(
    tmp_path,
):
    seen = []

    class InOrder(posttrain.core.Trainer):
        def _get_train_sampler(self):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, model, inputs, return_outputs=False):
            seen.append(inputs["input_ids"][0, 0].item())
            return model(**inputs).loss

    class Asks(posttrain.core.TrainerCallback):
        def on_train_begin(self, args, state, control, model, tokenizer, **kwargs):
            seen.append(tokenizer.eos_token)

    rows = [{"input_ids": [i, i], "attention_mask": [1, 1], "labels": [i, i]} for i in (7, 5, 9)]
    args = posttrain.core.TrainingArguments(
        str(tmp_path), num_train_epochs=1, per_device_train_batch_size=1, use_cpu=True, report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    tokenizer = tiny.tokenizer()
    InOrder(tiny.causal_lm(), args, train_dataset=rows, processing_class=tokenizer, callbacks=[Asks]).train()
    assert seen == [tokenizer.eos_token, 7, 5, 9]


def test_a_get_batch_samples_that_generates_draws_no_batches(tmp_path):
    """So trl's trainers of preferences called it up to 0.11, and those that were written after them still do."""

    class Generates(posttrain.core.Trainer):
        def get_batch_samples(self, model, batch):
            raise AssertionError("It was called for micro-batches.")

    weights = []
    for cls in (posttrain.core.Trainer, Generates):
        changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
        args = arguments(posttrain.core.TrainingArguments, tmp_path, **changes)
        trainer = cls(tiny.causal_lm(), args, train_dataset=tiny.token_rows(20), data_collator=pad)
        trainer.train()
        assert trainer.state.global_step == 8 and trainer.state.epoch == 2
        weights.append([weight.clone() for weight in trainer.model.parameters()])
    assert all(map(torch.equal, *weights))


def test_a_trainer_that_makes_its_schedule_itself_reads_options_of_its_own(tmp_path):
    """As Axolotl's does with ``lr_scheduler="one_cycle"``."""

    @dataclasses.dataclass
    class Config(posttrain.core.TrainingArguments):
        alternate_lr_scheduler_type: str = "one_cycle"

    class Cyclic(posttrain.core.Trainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            options = self.args.lr_scheduler_kwargs
            rate = self.args.learning_rate
            self.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
                optimizer or self.optimizer, rate, num_training_steps, **options
            )
            return self.lr_scheduler

    given = {"lr_scheduler_kwargs": {"pct_start": 0.3}, "max_steps": 4, "use_cpu": True, "report_to": "none"}
    with pytest.warns(UserWarning, match="'pct_start' is not an option of 'linear'"):
        args = Config(tmp_path, save_strategy="no", **given)
    trainer = Cyclic(tiny.causal_lm(), args, pad, tiny.token_rows(8))
    trainer.train()
    assert trainer.lr_scheduler.last_epoch == 4
    with pytest.raises(ConfigError, match="'pct_start' is not an option of 'linear'"):
        posttrain.core.Trainer(tiny.causal_lm(), args, pad, tiny.token_rows(8)).train()
    with pytest.raises(ConfigError, match="'pct_start' is not an option of 'linear'"):
        posttrain.core.TrainingArguments(tmp_path, **given)


def test_texts_that_stand_first_in_a_batch_do_not_change_the_weight_of_its_rows(tmp_path):
    """As in trl's batches of preferences up to 0.11, whose rows are under other names than the model's."""

    def collate(rows, texts_first):
        read = pad(rows)
        chosen, prompts = {f"chosen_{name}": value for name, value in read.items()}, {"prompt": ["a"] * len(rows)}
        return prompts | chosen if texts_first else chosen | prompts

    class OfRows(posttrain.core.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            loss = model(input_ids=inputs["chosen_input_ids"], labels=inputs["chosen_labels"]).loss
            return (loss, {}) if return_outputs else loss

        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            return self.compute_loss(model, self.prepare_inputs(inputs)).detach(), None, None

    found = []
    for texts_first in (False, True):
        changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "remove_unused_columns": False}
        args = arguments(posttrain.core.TrainingArguments, tmp_path, per_device_eval_batch_size=2, **changes)
        rows, collator = tiny.token_rows(5), partial(collate, texts_first=texts_first)
        trainer = OfRows(tiny.causal_lm(), args, collator, rows, eval_dataset=rows)
        trainer.train()
        output = trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation")
        assert output.num_samples == 5
        found.append((output.metrics["eval_loss"], trainer.state.log_history[-1]["train_loss"]))
    assert found[0] == found[1]


@pytest.mark.parametrize(("rows", "accumulation"), [(20, 3), (12, 3), (8, 4)])
def test_a_get_batch_samples_that_calls_next_as_often_as_it_is_asked_trains_whole_epochs(rows, accumulation, tmp_path):
    asked = []

    class ByNext(posttrain.core.Trainer):
        def get_batch_samples(self, epoch_iterator, num_batches, device):
            asked.append(num_batches)
            return [next(epoch_iterator) for _ in range(num_batches)], None

    args = posttrain.core.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=2,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    trainer = ByNext(model=tiny.causal_lm(), args=args, train_dataset=tiny.token_rows(rows), data_collator=pad)
    trainer.train()
    of_epoch = [*[accumulation] * (rows // 2 // accumulation), *filter(None, [rows // 2 % accumulation])]
    assert asked == 2 * of_epoch and trainer.state.epoch == 2
