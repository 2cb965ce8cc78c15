"""What users of a Trainer count on: events, logs, hooks, checkpoints, evaluation."""

import json
import math
import time

import pytest
import torch
from torch import nn

from posttrain.core import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from posttrain.core.callbacks import EVENTS
from posttrain.core.checkpoint.weights import load_weights, save_weights
from posttrain.core.errors import CheckpointError, DataError, NonFiniteError
from posttrain.core.logging import terminal
from posttrain.core.optim.layerwise import Layerwise
from tests import tiny, tiny_vision
from tests.contract.trainers import TRAINERS, classification_rows, classifier, pad, weights

make = TRAINERS["causal-lm"]


class Recorder(TrainerCallback):
    def __init__(self):
        self.events = []


for _event in EVENTS:
    setattr(Recorder, _event, lambda self, args, state, control, _name=_event, **kwargs: self.events.append(_name[3:]))


class Regression(nn.Module):
    """A plain module: no config, a loss in a tuple."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.0)), nn.Parameter(torch.tensor(0.0))
        self.double()

    def forward(self, input_x, labels=None):
        y = input_x * self.a + self.b
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


def line(count=64):
    x = torch.linspace(-1, 1, count, dtype=torch.double)
    return [{"input_x": value, "labels": 2 * value + 3} for value in x]


def regression(tmp_path, callbacks=None, model=None, **changes):
    defaults = dict(
        output_dir=str(tmp_path),
        learning_rate=0.1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    options = {
        k: changes.pop(k)
        for k in list(changes)
        if k in ("compute_metrics", "eval_dataset", "optimizer_cls_and_kwargs", "optimizers", "train_dataset")
    }
    options = {"train_dataset": line(), "eval_dataset": line(20)} | options
    return Trainer(model or Regression(), TrainingArguments(**(defaults | changes)), callbacks=callbacks, **options)


def test_events_come_in_the_documented_order(tmp_path):
    recorder = Recorder()
    trainer = make(
        tmp_path, [recorder], max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        logging_steps=2, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
    )  # fmt: skip
    trainer.train()
    step = ["step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "step_end"]
    evaluation = ["prediction_step", "log", "evaluate"]
    assert recorder.events == [
        "init_end", "train_begin", "epoch_begin", *step, *step, "log", *evaluation, "save", *step, *evaluation, "save",
        "epoch_end", "log", "train_end",
    ]  # fmt: skip


def test_a_plain_module_learns_a_line_and_is_saved(tmp_path):
    trainer = regression(tmp_path, num_train_epochs=20)
    output = trainer.train()
    assert trainer.model.a.item() == pytest.approx(2, abs=0.05) and trainer.model.b.item() == pytest.approx(3, abs=0.05)
    assert output.global_step == 160 and output.training_loss == trainer.state.log_history[-1]["train_loss"]
    trainer.save_model(str(tmp_path / "final"))
    twin = Regression()
    Trainer(twin, TrainingArguments(str(tmp_path), use_cpu=True))._load_from_checkpoint(tmp_path / "final")
    assert torch.equal(twin.a, trainer.model.a)


def test_the_mean_of_the_logged_losses_is_the_training_loss(tmp_path):
    trainer = regression(tmp_path, num_train_epochs=3, logging_steps=5)
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert len(losses) == 4  # updates 5, 10, 15, 20 of 24
    steps = regression(tmp_path / "each", num_train_epochs=3, logging_steps=1)
    expected = steps.train().training_loss
    each = [record["loss"] for record in steps.state.log_history if "loss" in record]
    assert expected == pytest.approx(sum(each) / 24)
    assert trainer.state.log_history[-1]["train_loss"] == pytest.approx(expected)
    assert losses[0] == pytest.approx(sum(each[:5]) / 5)


def test_the_learning_rate_logged_is_the_one_the_step_used(tmp_path):
    trainer = regression(tmp_path, max_steps=10, logging_steps=1, learning_rate=1.0)
    trainer.train()
    rates = [record["learning_rate"] for record in trainer.state.log_history if "learning_rate" in record]
    assert rates == pytest.approx([1 - step / 10 for step in range(10)])


def test_the_log_file_is_strict_json_and_has_each_step_once_after_a_resume(tmp_path):
    options = dict(max_steps=8, logging_steps=1, save_strategy="steps", save_steps=4)
    regression(tmp_path, **options).train()
    again = regression(tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    records = [
        json.loads(text, parse_constant=pytest.fail) for text in (tmp_path / "log.jsonl").read_text().splitlines()
    ]
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(records) == len(again.state.log_history)


class Sleepy(TrainerCallback):
    """Makes each optimizer step take a while."""

    def on_step_begin(self, args, state, control, **kwargs):
        time.sleep(0.05)


def test_the_seconds_of_a_step_are_those_of_the_steps_since_the_run_was_resumed(tmp_path):
    options = dict(logging_steps=4, save_strategy="steps", save_steps=3, lr_scheduler_type="constant")
    regression(tmp_path, **options, max_steps=3).train()
    regression(tmp_path, [Sleepy()], **options, max_steps=4).train(resume_from_checkpoint=True)
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    [seconds] = [record["perf/step_seconds"] for record in records if record["step"] == 4 and "loss" in record]
    assert seconds >= 0.05, "one step was made, and not four"


def test_a_progress_bar_shows_loss_speed_real_tokens_and_time_left(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(terminal, "draws_bars", lambda: True)
    make(tmp_path, disable_tqdm=False, max_steps=4, logging_steps=2).train()
    shown = capsys.readouterr().err
    assert "4/4" in shown and "tok/s" in shown and "% real" in shown and "left" in shown


def test_the_progress_bar_of_an_evaluation_counts_a_stream_without_a_length(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(terminal, "draws_bars", lambda: True)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(tiny.token_rows(10))

    metrics = make(tmp_path, disable_tqdm=False, per_device_eval_batch_size=4).evaluate(Stream())
    assert math.isfinite(metrics["eval_loss"]) and "3batch" in capsys.readouterr().err.replace(" ", "")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_the_run_and_never_reaches_the_weights(bad, tmp_path):
    class Poisoned(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            return loss * bad if self.state.global_step == 2 else loss

    trainer = Poisoned(
        Regression(), TrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True), train_dataset=line()
    )
    with pytest.raises(NonFiniteError, match="Step 3: .*weights are those of step 2"):
        trainer.train()
    assert all(torch.isfinite(value) for value in weights(trainer).values())


def test_the_best_model_is_loaded_at_the_end_and_never_rotated_away(tmp_path):
    scores = iter([0.3, 0.9, 0.5, 0.4])
    trainer = regression(
        tmp_path, max_steps=8, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        save_total_limit=1, load_best_model_at_end=True, metric_for_best_model="score",
        compute_metrics=lambda p: {"score": next(scores)},
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_metric == 0.9 and trainer.state.best_global_step == 4
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-8"]
    best = regression(tmp_path / "other")
    best._load_from_checkpoint(tmp_path / "checkpoint-4")
    assert torch.equal(best.model.a, trainer.model.a)


@pytest.mark.parametrize(("limit", "kept"), [(None, [8]), (2, [4, 8]), (9, [2, 4, 8])])
def test_save_strategy_best_saves_improvements_alone_and_keeps_one_unless_told(limit, kept, tmp_path):
    scores = iter([0.3, 0.9, 0.5, 0.95])
    regression(
        tmp_path, max_steps=8, eval_strategy="steps", eval_steps=2, save_strategy="best", metric_for_best_model="score",
        greater_is_better=True, save_total_limit=limit, compute_metrics=lambda p: {"score": next(scores)},
    ).train()  # fmt: skip
    assert sorted(int(p.name.split("-")[1]) for p in tmp_path.glob("checkpoint-*")) == kept


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(("limit", "kept"), [(None, [4, 8, 12]), (4, [4, 8, 10, 12]), (1, [4, 8, 12])])
def test_the_best_checkpoints_are_kept_and_the_newest(limit, kept, later, tmp_path):
    scores = iter([0.3, 0.9, float("nan"), 0.8, 0.4, 0.1])
    options = dict(
        max_steps=12, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, save_top_k=2,
        save_async=later, save_total_limit=limit, metric_for_best_model="score",
        compute_metrics=lambda p: {"score": next(scores)},
    )  # fmt: skip
    regression(tmp_path, **options | {"max_steps": 6}).train()
    regression(tmp_path, **options).train(resume_from_checkpoint=True)  # the run goes on with what it knew
    assert sorted(int(p.name.split("-")[1]) for p in tmp_path.glob("checkpoint-*")) == kept


def test_no_other_checkpoint_is_kept_where_the_newest_is_among_the_best(tmp_path):
    scores = iter([0.1, 0.2, 0.3, 0.4])
    regression(
        tmp_path, max_steps=8, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, save_top_k=2,
        metric_for_best_model="score", compute_metrics=lambda p: {"score": next(scores)},
    ).train()  # fmt: skip
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-6", "checkpoint-8"]


def test_a_wrong_metric_name_is_answered_at_the_first_evaluation(tmp_path):
    trainer = regression(
        tmp_path, eval_strategy="steps", eval_steps=1, save_strategy="best", metric_for_best_model="acuracy",
        compute_metrics=lambda p: {"accuracy": 1.0},
    )  # fmt: skip
    with pytest.raises(KeyError, match="eval_accuracy, eval_loss.*did you mean 'eval_accuracy'"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_early_stopping_stops(tmp_path):
    scores = iter([0.5, 0.4, 0.3, 0.2])
    trainer = regression(
        tmp_path, [EarlyStoppingCallback(early_stopping_patience=2)], max_steps=8, eval_strategy="steps", eval_steps=2,
        save_strategy="no", metric_for_best_model="score", compute_metrics=lambda p: {"score": next(scores)},
    )  # fmt: skip
    assert trainer.train().global_step == 6


def test_resuming_without_a_checkpoint_says_so(tmp_path):
    with pytest.raises((CheckpointError, ValueError), match="No valid checkpoint found in output directory"):
        regression(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises((CheckpointError, ValueError), match="Can't find a valid checkpoint"):
        regression(tmp_path).train(resume_from_checkpoint=str(tmp_path / "nowhere"))


def test_several_evaluation_sets_have_metrics_of_their_own(tmp_path):
    trainer = regression(tmp_path, eval_dataset={"a": line(5), "b": line(9)})
    metrics = trainer.evaluate()
    assert {"eval_a_loss", "eval_b_loss"} <= metrics.keys()
    assert trainer.evaluate(line(5))["eval_loss"] == pytest.approx(metrics["eval_a_loss"])


def test_the_rows_of_short_windows_are_counted_as_they_were_read(tmp_path):
    for rows, changes, read in (
        (44, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_train_epochs": 1}, 44),
        (10, {"per_device_train_batch_size": 4, "num_train_epochs": 2}, 20),
        (10, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 3}, 18),
        (10, {"per_device_train_batch_size": 4, "num_train_epochs": 1, "dataloader_drop_last": True}, 8),
    ):
        trainer = regression(tmp_path, train_dataset=line(rows), **changes)
        metrics = trainer.train().metrics
        assert trainer.run.rows_read == read
        seconds = metrics["train_runtime"]  # rounded to 1e-4, of which a fast machine needs 40
        rounding = 0.01 + 1e-4 / seconds
        assert metrics["train_samples_per_second"] == pytest.approx(read / seconds, rel=rounding)
        steps = metrics["train_samples_per_second"] / metrics["train_steps_per_second"]
        assert steps == pytest.approx(read / trainer.state.global_step, rel=0.05)


def test_predict_gives_every_row_in_order(tmp_path):
    trainer = regression(tmp_path, per_device_eval_batch_size=3)
    with torch.no_grad():
        trainer.model.a.fill_(1.0)
    output = trainer.predict(line(10))
    assert output.predictions.tolist() == pytest.approx([float(row["input_x"]) for row in line(10)])
    assert output.label_ids.tolist() == pytest.approx([float(row["labels"]) for row in line(10)])
    assert {"test_loss", "test_runtime", "test_samples_per_second"} <= output.metrics.keys()


def test_metrics_are_computed_from_predictions_and_labels(tmp_path):
    def accuracy(prediction):
        logits, labels = prediction
        return {"accuracy": float((logits.argmax(-1) == labels).mean())}

    trainer = classifier(tmp_path)
    trainer.compute_metrics = accuracy
    expected = trainer.predict(classification_rows(7, seed=1))
    assert trainer.evaluate()["eval_accuracy"] == (expected.predictions.argmax(-1) == expected.label_ids).mean()


def test_old_names_are_accepted_and_unknown_ones_answered(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.warns(FutureWarning, match="tokenizer= is now processing_class="):
        trainer = Trainer(tiny.classifier(), args, tokenizer=tiny.tokenizer())
    assert trainer.tokenizer is trainer.processing_class is not None
    with pytest.warns(FutureWarning, match="callback= is now callbacks="):
        trainer = Trainer(tiny.classifier(), args, callback=[Recorder])
    assert isinstance(trainer.callbacks[-2], Recorder)
    with pytest.raises(TypeError, match="'train_datset', did you mean 'train_dataset'"):
        Trainer(tiny.classifier(), args, train_datset=[])


def test_a_log_of_one_argument_and_a_training_step_of_two_still_work(tmp_path):
    calls = []

    class Old(Trainer):
        def log(self, logs):
            calls.append("log")
            super().log(logs)

        def training_step(self, model, inputs):
            calls.append("step")
            return super().training_step(model, inputs)

    Old(
        Regression(), TrainingArguments(str(tmp_path), use_cpu=True, max_steps=2, logging_steps=1), train_dataset=line()
    ).train()
    assert calls == ["step", "log", "step", "log", "log"]


def test_log_metric_is_averaged_over_the_steps_between_logs(tmp_path):
    class Logs(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            self.log_metric("progress", float(self.state.global_step))
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=4, logging_steps=2, eval_strategy="steps")
    trainer = Logs(Regression(), args, train_dataset=line(), eval_dataset=line(4))
    trainer.train()
    assert [r["progress"] for r in trainer.state.log_history if "loss" in r] == [0.5, 2.5]
    assert [r["eval_progress"] for r in trainer.state.log_history if "eval_loss" in r] == [2.0, 4.0]
    args = TrainingArguments(str(tmp_path / "rest"), use_cpu=True, max_steps=5, logging_steps=3)
    trainer = Logs(Regression(), args, train_dataset=line())
    output = trainer.train()  # the steps after the last record are told of in the summary of the run
    assert [r["progress"] for r in trainer.state.log_history] == [1.0, 3.5]
    assert "train_loss" in trainer.state.log_history[-1] and "progress" not in output.metrics


def test_model_init_starts_from_scratch_each_time(tmp_path):
    def model_init():
        return tiny.causal_lm()

    args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=3, save_strategy="no")
    trainer = Trainer(None, args, pad, tiny.token_rows(16), model_init=model_init)
    trainer.train()
    first = weights(trainer)
    trainer.train()
    assert all(torch.equal(value, first[key]) for key, value in weights(trainer).items())
    with pytest.raises(ValueError, match="a model or a model_init"):
        Trainer(tiny.classifier(), args, model_init=model_init)


def test_an_optimizer_and_schedule_that_were_given_are_left_alone(tmp_path):
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    trainer = regression(tmp_path, model=model, optimizers=(optimizer, schedule), max_steps=2)
    trainer.train()
    assert (
        trainer.optimizer is optimizer and trainer.lr_scheduler is schedule and optimizer.param_groups[0]["lr"] == 0.5
    )


def test_saving_that_fails_does_not_end_training(tmp_path, monkeypatch, caplog):
    trainer = regression(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    commit = type(trainer.store).commit
    failed = []

    def fails_once(store, temp, *rest):
        if not failed:
            failed.append(temp)
            raise OSError(28, "No space left on device")
        return commit(store, temp, *rest)

    monkeypatch.setattr(type(trainer.store), "commit", fails_once)
    assert trainer.train().global_step == 4
    assert "checkpoint-2 was not saved" in caplog.text and not failed[0].exists()
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]


def test_any_optimizer_can_update_in_the_backward_pass_where_nothing_needs_the_gradients_after_it(tmp_path):
    adamw = {"lr": 1e-2, "weight_decay": 0.1}
    layerwise = Layerwise, {"optimizer_class": torch.optim.AdamW} | adamw
    made = []
    for chosen in ((torch.optim.AdamW, adamw), layerwise):
        trainer = regression(
            tmp_path, model=Regression(), optimizer_cls_and_kwargs=chosen, max_steps=4, max_grad_norm=0.0
        )
        trainer.train()
        made.append(weights(trainer))
    assert made[0].keys() == made[1].keys() and all(torch.equal(made[1][name], made[0][name]) for name in made[0])
    model = Regression()
    passed = Layerwise(model.parameters(), torch.optim.AdamW, lr=1e-2)
    for options in ({"optimizer_cls_and_kwargs": layerwise}, {"optimizers": (passed, None)}):
        with pytest.raises(ValueError, match=r"Layerwise, .* set gradient_accumulation_steps=1 \(it is 2\)"):
            regression(tmp_path, model=model, gradient_accumulation_steps=2, **options)


def test_no_training_set_is_said_plainly(tmp_path):
    with pytest.raises(ValueError, match="requires a train_dataset"):
        regression(tmp_path, train_dataset=None).train()
    with pytest.raises(ValueError, match="requires an eval_dataset"):
        regression(tmp_path, eval_dataset=None).evaluate()


def test_train_loss_is_finite_and_arguments_are_untouched(tmp_path):
    trainer = regression(tmp_path, max_steps=3)
    before = trainer.args.to_dict()
    assert math.isfinite(trainer.train().training_loss)
    assert trainer.args.to_dict() == before


def test_a_hub_that_cannot_be_reached_does_not_stop_a_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trainer = regression(
        tmp_path, max_steps=4, save_strategy="steps", save_steps=2, push_to_hub=True, hub_model_id="me/model",
        hub_token="x",
    )  # fmt: skip
    assert trainer.train().global_step == 4
    assert trainer.uploader.failed and "hf upload" in caplog.text
    assert (tmp_path / "README.md").is_file() and (tmp_path / "model.safetensors").is_file()
    assert "hub_token" not in (tmp_path / "README.md").read_text()


def test_a_stream_without_a_row_is_an_error_and_no_success(tmp_path):
    class Empty(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(DataError, match="not one batch"):
        regression(tmp_path, train_dataset=Empty(), max_steps=3).train()


def test_wrong_things_in_the_constructor_are_named(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(TypeError, match="model is of type str"):
        Trainer("bert", args)
    with pytest.raises(TypeError, match="args is of type dict"):
        Trainer(Regression(), {"output_dir": "x"})
    with pytest.raises(TypeError, match="5 is no callback"):
        Trainer(Regression(), args, callbacks=[5])
    for name in ("compute_loss_func", "preprocess_logits_for_metrics"):
        with pytest.raises(TypeError, match=f"{name} must be a function, not 5"):
            Trainer(Regression(), args, **{name: 5})


def test_an_id_that_the_model_does_not_know_is_named(tmp_path):
    rows = tiny.token_rows(8)
    rows[5]["input_ids"][2] = 5000
    trainer = Trainer(tiny.causal_lm(), TrainingArguments(str(tmp_path), use_cpu=True), pad, rows)
    with pytest.raises(DataError, match="input_ids holds 5000.*range is 0 to 383"):
        trainer.train()


def test_metrics_of_an_epoch_are_logged_at_its_end_also_by_a_resumed_run(tmp_path):
    class Counts(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            self.log_metric("steps", 1, reduce="sum", per_epoch=True)
            self.log_metric("last", state.global_step, reduce="max")

        def on_prediction_step(self, args, state, control, **kwargs):
            self.log_metric("batches", 1, reduce="sum", per_epoch=True)

    changes = dict(save_strategy="steps", save_steps=2, logging_steps=2, num_train_epochs=2.5)
    trainer = make(tmp_path, [Counts()], eval_strategy="epoch", per_device_eval_batch_size=4, **changes)
    trainer.train()

    def logged(trainer, name):
        return [(record["step"], record[name]) for record in trainer.state.log_history if name in record]

    whole = logged(trainer, "steps")
    assert whole == [(3, 3), (6, 3), (8, 2)]  # the last epoch is a half one
    assert logged(trainer, "last") == [(2, 2), (4, 4), (6, 6), (8, 8)]
    assert [value for _, value in logged(trainer, "eval_batches")] == [2, 2, 2]
    resumed = make(tmp_path, [Counts()], eval_strategy="epoch", per_device_eval_batch_size=4, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert logged(resumed, "steps") == whole


@pytest.mark.parametrize("overrides", [False, True])
def test_forward_and_backward_are_timed_apart_where_the_step_is_ours(tmp_path, overrides):
    class Own(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = self.compute_loss(model, self.prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(loss)
            return loss.detach()

    seen = []

    class Keep(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            seen.append({name for name in logs if name.startswith("perf/") and "ward" in name})

    args = TrainingArguments(str(tmp_path), max_steps=1, logging_steps=1, report_to="none", use_cpu=True)
    trainer = (Own if overrides else Trainer)(Regression(), args, train_dataset=line(), callbacks=[Keep()])
    trainer.train()
    apart = {"perf/forward_seconds", "perf/backward_seconds"}
    assert seen[0] == ({"perf/forward_backward_seconds"} if overrides else apart)
    trainer.training_step(trainer.model, next(iter(trainer.get_train_dataloader())))  # by hand: nothing is timed
    assert set(trainer.clock.phases) <= {"save"}


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("argument", ["limit_train_batches", "overfit_batches"])
def test_an_epoch_of_a_few_batches_and_the_same_ones_to_learn_by_heart(tmp_path, argument, workers):
    class Keeping(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            seen.append(tuple(inputs["input_x"].tolist()))
            return super().training_step(model, inputs, num_items_in_batch)

    def train(**changes):
        seen.clear()
        options = dict(learning_rate=0.1, report_to="none", use_cpu=True, disable_tqdm=True, num_train_epochs=3)
        args = TrainingArguments(
            str(tmp_path), dataloader_num_workers=workers, save_steps=3, **(options | {argument: 2} | changes)
        )
        trainer = Keeping(Regression(), args, train_dataset=line())
        trainer.train(resume_from_checkpoint=changes and str(tmp_path / "checkpoint-3"))
        return trainer, [*seen]

    seen = []
    trainer, batches = train()
    epochs = [batches[i : i + 2] for i in (0, 2, 4)]
    assert (trainer.state.global_step, trainer.state.epoch, len(batches)) == (6, 3.0, 6)
    assert len({row for batch in epochs[0] for row in batch}) == 16
    same = epochs[0] == epochs[1] == epochs[2]
    assert same == (argument == "overfit_batches")
    resumed, rest = train(logging_steps=1)
    assert rest == batches[3:] and torch.equal(resumed.model.a, trainer.model.a)


def test_an_evaluation_of_the_first_batches(tmp_path):
    whole = regression(tmp_path, per_device_eval_batch_size=4)
    trainer = regression(tmp_path, per_device_eval_batch_size=4, limit_eval_batches=2)
    assert trainer.evaluate()["eval_loss"] == whole.evaluate(line(20)[:8])["eval_loss"]
    assert len(trainer.predict(line(20)).predictions) == 20
    with pytest.raises(DataError, match="train_dataset.take"):
        stream = tiny_stream()
        regression(tmp_path, train_dataset=stream, max_steps=2, limit_train_batches=1).train()


def tiny_stream():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(line())

    return Stream()


def test_a_model_without_values_is_named_before_training(tmp_path):
    with torch.device("meta"):
        model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"weights of this Linear are on the meta device.*from_pretrained"):
        Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True), train_dataset=line())


@pytest.mark.parametrize(("rope", "said"), [({}, 0), ({"rope_type": "linear", "factor": 4.0}, 1)])
def test_a_resumed_run_is_told_of_another_scaling_of_its_angles(rope, said, tmp_path, caplog):
    make(tmp_path, max_steps=2, save_strategy="steps", save_steps=1).train()
    again = make(tmp_path, max_steps=2)
    again.model.config.rope_parameters |= rope
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    told = [r.getMessage() for r in caplog.records if "was trained with another config (rope_parameters" in r.message]
    assert len(told) == said
    assert all("'rope_type': 'default'" in text and "'factor': 4.0" in text for text in told)


def test_a_resumed_run_is_told_of_other_angles_in_a_part_of_its_model(tmp_path, caplog):
    model, _ = tiny_vision.qwen2_5_vl()
    save_weights(model, tmp_path)
    load_weights(model, tmp_path)
    assert "another config" not in caplog.text
    model.config.text_config.rope_parameters |= {"factor": 4.0}
    load_weights(model, tmp_path)
    assert "another config (text_config.rope_parameters: " in caplog.text and "'factor': 4.0" in caplog.text
