"""Numbers that are not finite: kept from the weights, named, counted, and saved for whoever mends them."""

import dataclasses
import json
import math
import re

import pytest
import torch
from torch import nn

from posttrain.core import Trainer
from posttrain.core.checkpoint import codec
from posttrain.core.errors import NonFiniteError
from posttrain.core.training import guards
from posttrain.core.training.nonfinite import Counts, FiniteGuard, Update, first_nonfinite, watched
from tests import tiny
from tests.contract.trainers import TRAINERS, arguments, pad, weights

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def same_weights_each_time():
    torch.manual_seed(0)


def update(loss=1.0, grad_norm=1.0, step=0, num_items=None):
    loss, items = torch.tensor(loss), None if num_items is None else torch.tensor(num_items)
    return Update(step, 0, step, [None], [loss], loss, torch.tensor(grad_norm), items)


# ---------------------------------------------------------------------------------------------------- the guard


def sgd():
    return torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)


def flagged_step(optimizer, guard, loss, gradient, step):
    [parameter] = optimizer.param_groups[0]["params"]
    parameter.grad = torch.full_like(parameter, gradient)
    guard.flag(optimizer, update(loss, float(parameter.grad.norm()), step))
    optimizer.step()
    return parameter.detach().clone(), {k: v.clone() for k, v in optimizer.state[parameter].items()}


@pytest.mark.parametrize(("loss", "gradient"), [(NAN, 1.0), (1.0, INF), (1.0, NAN)])
def test_a_fused_optimizer_skips_a_step_that_is_not_finite_and_goes_on(loss, gradient):
    optimizer, guard = torch.optim.AdamW([nn.Parameter(torch.ones(3))], lr=0.1, fused=True), FiniteGuard()
    before, moments = flagged_step(optimizer, guard, 1.0, 1.0, step=0)
    after, unchanged = flagged_step(optimizer, guard, loss, gradient, step=1)
    assert torch.equal(before, after) and all(torch.equal(moments[name], unchanged[name]) for name in moments)
    with pytest.raises(NonFiniteError, match="Step 2: .*weights are those of step 1"):
        guard.settle()
    guard.settle()  # told once
    moved, _ = flagged_step(optimizer, guard, 1.0, 1.0, step=2)
    assert not torch.equal(moved, after) and torch.isfinite(moved).all()
    guard.settle()


def stops_at_the_third_update(tmp_path, **changes):
    """The whole of a run; `tests/gpu` calls it where flags are read from a device."""
    trainer = TRAINERS["causal-lm"](tmp_path, optim="adamw_torch_fused", **changes)
    stock, kept = trainer.compute_loss, {}

    def compute_loss(*args, **kwargs):
        if trainer.state.global_step == 2:
            kept.update({name: value.clone() for name, value in weights(trainer).items()})
            return stock(*args, **kwargs) * float("nan")
        return stock(*args, **kwargs)

    trainer.compute_loss = compute_loss
    with pytest.raises(NonFiniteError, match=r"^Step 3: .*weights are those of step 2"):
        trainer.train()
    for name, value in weights(trainer).items():
        torch.testing.assert_close(value, kept[name], rtol=0, atol=0)


@pytest.mark.parametrize("flagged", [False, True], ids=["asked before the step", "flagged, as on a GPU"])
def test_a_run_stops_with_the_weights_from_before_the_update_at_fault(flagged, tmp_path, monkeypatch):
    if flagged:
        monkeypatch.setattr(
            FiniteGuard, "may_step", lambda self, optimizer, update, *_: self.flag(optimizer, update) or True
        )
    stops_at_the_third_update(tmp_path, use_cpu=True)


def test_a_flag_is_read_a_few_steps_later_without_anyone_asking():
    optimizer, guard = torch.optim.AdamW([nn.Parameter(torch.ones(3))], lr=0.1, fused=True), FiniteGuard(lag=2)
    flagged_step(optimizer, guard, NAN, 1.0, step=0)
    flagged_step(optimizer, guard, 1.0, 1.0, step=1)
    with pytest.raises(NonFiniteError, match="Step 1: .*not applied; later ones were"):
        flagged_step(optimizer, guard, 1.0, 1.0, step=2)


def test_a_step_made_by_hand_after_training_is_not_skipped():
    optimizer, guard = torch.optim.AdamW([nn.Parameter(torch.ones(3))], lr=0.1, fused=True), FiniteGuard("skip")
    flagged_step(optimizer, guard, NAN, 1.0, step=0)
    guard.settle()
    [parameter] = optimizer.param_groups[0]["params"]
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert (parameter != 1).all()


def test_on_the_cpu_it_is_said_before_the_step():
    with pytest.raises(NonFiniteError, match="Step 5: .*weights are those of step 4"):
        FiniteGuard().may_step(sgd(), update(NAN, step=4))
    assert FiniteGuard().may_step(sgd(), update())


def test_a_window_without_a_label_is_left_out_and_only_many_in_a_row_stop_the_run(caplog):
    guard = FiniteGuard(limit=3)
    empty = update(NAN, num_items=0)
    assert [guard.may_step(sgd(), one) for one in (empty, empty, update(), empty, empty)] == [
        False,
        False,
        True,
        False,
        False,
    ]
    assert "all labels of its rows are -100" in caplog.text and guard.counts.count == 0 and guard.logged() == {}
    with pytest.raises(NonFiniteError, match="all labels of its rows are -100.*max_nonfinite_steps=3 of them"):
        guard.may_step(sgd(), empty)
    guard = FiniteGuard("warn")
    assert guard.may_step(sgd(), empty) is False  # there is nothing to make of it
    with pytest.raises(NonFiniteError, match="for every optimizer step of the run"):
        guard.finish()
    guard.may_step(sgd(), update())
    guard.finish()


def test_what_is_let_go_on_stops_after_so_many_in_a_row(caplog):
    guard = FiniteGuard("skip", limit=3)
    answers = [guard.may_step(sgd(), update(loss)) for loss in (NAN, NAN, 1.0, NAN, NAN)]
    assert answers == [False, False, True, False, False] and guard.counts.count == 4
    with pytest.raises(NonFiniteError, match="max_nonfinite_steps=3 of them"):
        guard.may_step(sgd(), update(NAN))
    assert FiniteGuard("warn").may_step(sgd(), update(NAN)) is True  # warned of, and made


def test_the_count_is_logged_once_and_survives_a_checkpoint():
    guard, other = FiniteGuard("skip"), FiniteGuard("skip")
    guard.may_step(sgd(), update(NAN))
    other.counts = Counts(**dataclasses.asdict(guard.counts))
    assert (other.logged(), other.logged(), other.counts.in_a_row) == ({"nonfinite_steps": 1}, {}, 1)


def test_a_loss_scaler_may_overflow_as_long_as_it_has_a_scale_to_lower():
    guard = FiniteGuard()
    assert guard.may_step(sgd(), update(1.0, INF), loss_scale=lambda: 1024.0)
    with pytest.raises(NonFiniteError):
        guard.may_step(sgd(), update(1.0, INF), loss_scale=lambda: 1.0)
    with pytest.raises(NonFiniteError):
        guard.may_step(sgd(), update(NAN, INF), loss_scale=lambda: 1024.0)


def test_processes_agree_when_one_alone_has_a_loss_that_is_not_finite():
    guard = FiniteGuard("skip", total=lambda mine: mine + 1)  # another process says 1
    assert guard.may_step(sgd(), update(1.0)) is False


# ---------------------------------------------------------------------------------------------------- where it began


class Two(nn.Module):
    def __init__(self, spoil=lambda h: h):
        super().__init__()
        self.first, self.second, self.spoil = nn.Linear(2, 2), nn.Linear(2, 1), spoil

    def forward(self, x):
        return self.second(self.spoil(self.first(x)))


def run(model):
    return lambda batch: model(**batch).sum().backward()


class Log(nn.Module):
    def forward(self, h):
        return torch.log(h * 0)


class Root(nn.Module):
    """Finite, with a gradient that is not."""

    def forward(self, h):
        return torch.sqrt(h * 0)


def test_the_first_bad_module_is_named():
    x = {"x": torch.ones(1, 2)}
    model = Two()
    assert first_nonfinite(model, [x], run(model)) is None
    # the log of zero is -inf, and what the layer behind it makes of that is the first with NaN or worse
    spoilt = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    spoilt[1].register_forward_hook(lambda m, a, out: out * NAN)
    found = first_nonfinite(spoilt, [torch.ones(1, 2)], lambda batch: spoilt(batch).sum().backward())
    assert found == "the output of 1 (Linear) is the first with NaN"
    model = Two(spoil=lambda h: h * NAN)
    assert "what reaches second (Linear) holds" in first_nonfinite(model, [x], run(model))


def test_a_loss_that_goes_bad_behind_the_model_is_said_to(tmp_path):
    model = Two()
    found = first_nonfinite(model, [{"x": torch.ones(1, 2)}], lambda batch: (model(**batch) * INF).sum())
    assert re.match("the loss itself is -?inf, but every module's output is finite", found)


def test_a_gradient_that_is_not_finite_is_traced_in_the_backward_pass():
    model = Two(spoil=Root())
    found = first_nonfinite(model, [{"x": torch.ones(1, 2)}], run(model))
    assert "the gradient at the output of first (Linear) is the first in the backward pass" in found


def test_minus_infinity_alone_is_named_last_for_masks_hold_it_rightly():
    model = nn.Sequential(nn.Linear(2, 2), Log())
    assert "-inf" in first_nonfinite(model, [torch.ones(1, 2)], model)


def test_bad_batches_and_bad_weights_are_named_before_any_module():
    model = Two()
    assert first_nonfinite(model, [{"x": torch.tensor([[1.0, NAN]])}], run(model)) == "the batch itself holds NaN, in x"
    with torch.no_grad():
        model.second.bias.fill_(INF)
    assert (
        first_nonfinite(model, [{"x": torch.ones(1, 2)}], run(model)) == "the parameter second.bias holds inf already"
    )


def test_a_watched_model_says_at_once_where_it_overflows():
    model = nn.Sequential(nn.Linear(2, 2), Root(), nn.Linear(2, 2), Log(), nn.Linear(2, 1))
    with (
        watched(model),
        pytest.raises(NonFiniteError, match=r"(?s)output of 4 \(Linear\) holds .*0 \(Linear\): output"),
    ):
        model(torch.ones(1, 2))
    model(torch.ones(1, 2))  # not watched any more


# ---------------------------------------------------------------------------------------------------- in training


class Poisoned(Trainer):
    """The MLP of layer 1 gives NaN where a batch holds row 5 in epoch 0."""

    poison = NAN

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        mlp = model.model.layers[1].mlp
        if (inputs["input_ids"] == 7).any():  # only row 5 holds it
            mlp.forward = lambda hidden: type(mlp).forward(mlp, hidden) * self.poison
        try:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            vars(mlp).pop("forward", None)


def poisoned(folder, poison=NAN, **changes):
    rows = [{**row, "input_ids": [4 if i == 7 else i for i in row["input_ids"]]} for row in tiny.token_rows(16)]
    rows[5]["input_ids"][0] = 7
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 1} | changes
    from posttrain.core import TrainingArguments

    trainer = Poisoned(
        tiny.causal_lm(), arguments(TrainingArguments, folder, **options), pad, rows, processing_class=None
    )
    trainer.poison = poison
    return trainer


def bad_step(trainer):
    """(update, batch) that row 5 is in."""
    loader = trainer.get_train_dataloader()
    [batch] = [number for number in range(8) if 5 in loader.rows_of(0, number)]
    return batch // 2 + 1, batch


def test_the_first_bad_step_stops_the_run_and_says_all_that_can_be_known(tmp_path):
    trainer = poisoned(tmp_path)
    step, batch = bad_step(trainer)
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    text, rows = str(caught.value), trainer.get_train_dataloader().rows_of(0, batch)
    assert f"Step {step}: the loss is nan" in text and f"the weights are those of step {step - 1}" in text
    assert f"batch {batch} of epoch 0 (rows {rows[0]}, {rows[1]})" in text and 5 in rows
    assert "the output of model.layers.1.mlp (Qwen3MLP) is the first with NaN" in text
    assert trainer.state.global_step == step - 1
    assert all(torch.isfinite(value).all() for value in weights(trainer).values())
    saved = codec.load_tree(tmp_path / f"nonfinite-step-{step}" / "rank-0")
    at_fault = saved["micro_batches"][batch % 2]
    assert saved["rows"][batch % 2] == rows and (at_fault["input_ids"] == 7).any()
    assert "codec.load_tree" in text and "load_tree" in saved["how_to_read"]
    assert not list(tmp_path.glob("**/*.bin")) and not list(tmp_path.glob("**/*.pt"))


def test_skipping_leaves_the_update_out_and_everything_else_as_it_was(tmp_path, caplog):
    trainer = poisoned(tmp_path, on_nonfinite="skip")
    step, _ = bad_step(trainer)
    result = trainer.train()
    records = {r["step"]: r for r in trainer.state.log_history if "loss" in r}
    assert math.isnan(records[step]["loss"]) and records[step]["nonfinite_steps"] == 1
    others = [record["loss"] for number, record in records.items() if number != step]
    assert all(map(math.isfinite, others)) and not any("nonfinite_steps" in records[n] for n in records if n != step)
    assert result.training_loss == pytest.approx(sum(others) / len(others))
    assert result.metrics["nonfinite_steps"] == 1 and result.global_step == 4
    assert "model.layers.1.mlp" in caplog.text and "not applied" in caplog.text
    [line] = [json.loads(x) for x in (tmp_path / "log.jsonl").read_text().splitlines() if f'"step": {step}}}' in x][:1]
    assert line["loss"] is None  # strict JSON, and no 0.0

    class Left(Trainer):  # the same run, with a step that does nothing
        def train_on_window(self, model, window, num_items=None):
            if self.state.global_step + 1 == step:
                for group in self.optimizer.param_groups:
                    group["lr"] *= 0
            super().train_on_window(model, window, num_items)

    other = poisoned(tmp_path / "other", poison=1.0)
    other.__class__ = type("LeftOut", (Left, Poisoned), {})
    other.train()
    for name, value in weights(other).items():
        assert torch.equal(value, weights(trainer)[name]), name


def test_warning_makes_the_update_all_the_same_and_stops_in_the_end(tmp_path, caplog):
    trainer = poisoned(tmp_path, on_nonfinite="warn", max_nonfinite_steps=1)
    with pytest.raises(NonFiniteError, match="max_nonfinite_steps=1 of them"):
        trainer.train()
    caplog.clear()
    trainer = poisoned(tmp_path, on_nonfinite="warn")
    trainer.train()
    assert "applied nevertheless" in caplog.text
    assert not all(torch.isfinite(value).all() for value in weights(trainer).values())


def test_looking_for_the_fault_changes_nothing_of_the_run(tmp_path, monkeypatch):
    """Random numbers, metrics and gradients are those of a run in which nobody looked."""
    looking, blind = (poisoned(tmp_path / name, on_nonfinite="skip") for name in ("looking", "blind"))
    random = []
    for trainer in (looking, blind):
        if trainer is blind:
            monkeypatch.setattr(guards.Reporter, "_find", lambda self, update: None)
        torch.manual_seed(0)
        trainer.train()
        random.append(torch.rand(4))
    assert torch.equal(*random)
    history = [
        [{k: v for k, v in r.items() if "train_" not in k} for r in t.state.log_history] for t in (looking, blind)
    ]
    assert str(history[0]) == str(history[1])


def test_a_loss_that_is_bad_in_a_layerwise_optimizer_never_goes_backward(tmp_path):
    trainer = poisoned(tmp_path, optim="lomo", gradient_accumulation_steps=1, max_grad_norm=None)
    with pytest.raises(NonFiniteError, match="model.layers.1.mlp"):
        trainer.train()
    assert all(torch.isfinite(value).all() for value in weights(trainer).values())


def test_running_statistics_that_were_spoilt_cannot_be_skipped(tmp_path):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(1), nn.Linear(1, 1)

        def forward(self, x, labels):
            return {"loss": (self.head(self.norm(x[:, None]))[:, 0] - labels).square().mean()}

    from posttrain.core import TrainingArguments

    rows = [{"x": NAN if i == 3 else float(i), "labels": 1.0} for i in range(8)]
    args = arguments(TrainingArguments, tmp_path, on_nonfinite="skip", per_device_train_batch_size=2)
    with pytest.raises(NonFiniteError, match="left NaN in norm.running_mean.*the run stops"):
        Trainer(Normed(), args, train_dataset=rows).train()


def test_a_loss_scaler_skips_its_own_overflows_and_a_loss_that_is_nan_stops_the_run(tmp_path):
    trainer = poisoned(tmp_path, gradient_accumulation_steps=1)
    trainer.dist.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)  # the first steps overflow
    with pytest.raises(NonFiniteError, match="model.layers.1.mlp"):
        trainer.train()
    assert trainer.dist.scaler.get_scale() < 2.0**127
    assert all(torch.isfinite(value).all() for value in weights(trainer).values())


def test_debugging_names_the_module_in_the_very_step(tmp_path):
    class Overflows(nn.Linear):
        def forward(self, x, labels):
            return {"loss": super().forward(x[:, None] * INF).abs().mean()}

    from posttrain.core import TrainingArguments

    args = arguments(TrainingArguments, tmp_path, debug="underflow_overflow")
    with pytest.raises(NonFiniteError, match="debug='underflow_overflow': the output of the model"):
        Trainer(Overflows(1, 1), args, train_dataset=[{"x": 1.0, "labels": 1.0}] * 8).train()


@pytest.mark.parametrize("name", ["classifier", "sft", "sft-packed"])
def test_every_trainer_names_the_batch(name, tmp_path):
    trainer = TRAINERS[name](tmp_path)
    stock = trainer.compute_loss
    trainer.compute_loss = lambda *a, **k: stock(*a, **k) * (NAN if trainer.state.global_step == 1 else 1)
    with pytest.raises(NonFiniteError, match=r"Step 2: .*batch 1 of epoch 0 \(rows \d+, "):
        trainer.train()


# ---------------------------------------------------------------------------------------------------- without labels


def masked_rows(*labelled):
    """Rows of a masked language model, of which those in `labelled` have labels."""
    rows = tiny.token_rows(12, seed=5)
    return [{**r, "labels": r["labels"] if i in labelled else [-100] * len(r["labels"])} for i, r in enumerate(rows)]


def masked_lm():
    from transformers import BertConfig, BertForMaskedLM

    size = dict(vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **size))


def divides_by_zero(outputs, labels, num_items_in_batch=None):
    mask = (labels != -100).flatten()
    losses = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten().clamp(min=0), reduction="none")
    return (losses * mask).sum() / mask.sum()


@pytest.mark.parametrize("loss_func", [None, divides_by_zero], ids=["the model's", "by hand"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_micro_batch_without_labels_adds_nothing_to_a_loss_that_is_a_mean(accumulation, loss_func, tmp_path, caplog):
    from posttrain.core import TrainingArguments

    trainers = {}
    for name, rows in {"with": masked_rows(1, 2, 4, 7, 10, 11), "without": masked_rows(*range(12))}.items():
        if name == "without":  # the same windows, of the labelled rows alone
            labelled = masked_rows(1, 2, 4, 7, 10, 11)
            rows = [row for row in labelled if set(row["labels"]) != {-100}]
        options = {
            "per_device_train_batch_size": 1,
            "num_train_epochs": 1,
            "optim": "adamw_torch",
            "learning_rate": 0.01,
        }
        options |= {"train_sampling_strategy": "sequential", "lr_scheduler_type": "constant"}
        options["gradient_accumulation_steps"] = accumulation if name == "with" else 1
        args = arguments(TrainingArguments, tmp_path / name, **options)
        trainers[name] = Trainer(masked_lm(), args, pad, rows, compute_loss_func=loss_func)
        if name == "with" or accumulation == 1:
            trainers[name].train()
    found = trainers["with"]
    losses = [r["loss"] for r in found.state.log_history if "loss" in r]
    assert all(torch.isfinite(value).all() for value in weights(found).values())
    if accumulation == 1:  # a window without labels changes neither weights nor moments
        assert found.state.global_step == 12 and "all labels of its rows are -100" in caplog.text
        assert [loss == 0 for loss in losses] == [i not in (1, 2, 4, 7, 10, 11) for i in range(12)]
        assert found.state.log_history[-1]["train_loss"] == pytest.approx(
            trainers["without"].state.log_history[-1]["train_loss"]
        )
        for name, value in weights(trainers["without"]).items():
            assert torch.equal(value, weights(found)[name]), name
    else:
        assert found.state.global_step == 4 and all(map(math.isfinite, losses))


def test_losses_that_were_never_finite_have_no_mean(tmp_path):
    trainer = poisoned(tmp_path, on_nonfinite="skip", logging_steps=100)
    assert math.isnan(trainer.train().training_loss)
    assert math.isnan(trainer.state.log_history[-1]["train_loss"])


# ---------------------------------------------------------------------------------------------------- float16


def test_what_float16_weights_need_is_said_when_the_trainer_is_made(tmp_path, caplog):
    from posttrain.core import TrainingArguments

    args = arguments(TrainingArguments, tmp_path, per_device_train_batch_size=2, max_steps=8)
    trainer = Trainer(tiny.causal_lm().half(), args, pad, tiny.token_rows(16))
    assert "are in float16" in caplog.text and "Load the model in float32" in caplog.text
    stock, before = trainer.compute_loss, weights(trainer)
    # One batch overflows, as one does now and then.
    trainer.compute_loss = lambda *a, **k: stock(*a, **k) * (INF if trainer.state.global_step == 3 else 1)
    trainer.train()
    assert trainer.state.global_step == 8 and trainer.state.log_history[-1]["nonfinite_steps"] == 1
    after = weights(trainer)
    assert all(torch.isfinite(value).all() for value in after.values())
    assert any(not torch.equal(after[name], value) for name, value in before.items())
    caplog.clear()
    Trainer(tiny.causal_lm(), args, pad, tiny.token_rows(16))
    assert "float16" not in caplog.text


@pytest.fixture
def fp16_on_the_cpu(monkeypatch):
    from posttrain.core.distributed import environment

    monkeypatch.setattr(environment, "precision", lambda args: "fp16")
    monkeypatch.setattr(environment, "accelerator_present", lambda: True)


def fp16_trainer(folder, kind=Trainer, model=None):
    from posttrain.core import TrainingArguments

    args = arguments(TrainingArguments, folder, per_device_train_batch_size=2, max_steps=4, use_cpu=False)
    return kind(model or tiny.causal_lm(), args, pad, tiny.token_rows(16))


def test_a_loss_scaler_refuses_float16_weights_before_anything_runs(fp16_on_the_cpu, tmp_path):
    with pytest.raises(ValueError, match="gradients must be in float32. Load the model in float32"):
        fp16_trainer(tmp_path, model=tiny.causal_lm().half())


class OldStep(Trainer):
    """`training_step` as scripts override it."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.go_backward(loss)
        return loss.detach()

    def go_backward(self, loss):
        self.accelerator.backward(loss)


def test_a_training_step_that_calls_the_accelerator_trains_in_fp16_as_ours_does(fp16_on_the_cpu, tmp_path):
    old, ours = fp16_trainer(tmp_path / "old", OldStep), fp16_trainer(tmp_path / "ours")
    for trainer in (old, ours):
        assert trainer.dist.scaler is not None
        trainer.train()
    for name, value in weights(ours).items():
        torch.testing.assert_close(weights(old)[name], value, msg=name)
    plain = type("Plain", (OldStep,), {"go_backward": lambda self, loss: loss.backward()})
    with pytest.raises(RuntimeError, match=r"call self.accelerator.backward\(loss\)"):
        fp16_trainer(tmp_path / "plain", plain).train()
