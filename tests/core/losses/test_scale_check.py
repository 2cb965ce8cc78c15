"""Whether a loss is divided by the count of items: declared, known, or tried once, with nothing left of the trial."""

import copy
import dataclasses
import random
from collections import defaultdict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BatchEncoding

from posttrain.core import Trainer, TrainingArguments
from posttrain.core.losses import scale_check
from posttrain.core.training import scaling
from tests import tiny
from tests.contract.trainers import arguments, pad, weights

NOTHING = [-100]


def token_losses(model, inputs):
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), inputs["labels"][:, 1:].flatten(), reduction="sum")


def mean_loss(model, inputs):
    return token_losses(model, inputs) / (inputs["labels"][:, 1:] != -100).sum()


class Scaled(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return token_losses(model, inputs) / num_items_in_batch


class ScaledByHand(Scaled):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return token_losses(model, inputs) * (1 / max(float(num_items_in_batch), 1))


class Mean(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return mean_loss(model, inputs)


class MeanThatLooks(Trainer):
    """Only looks at the count, for a log."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        items = int(num_items_in_batch)
        self.log_metric("items", items + 0.0)
        return mean_loss(model, inputs)


class MeanThatReturnsEarly(Trainer):
    """As code that meets empty micro-batches has it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not (inputs["labels"][:, 1:] != -100).any():
            return model.lm_head.weight.sum() * 0
        return mean_loss(model, inputs)


class ScaledThatReturnsEarly(MeanThatReturnsEarly):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not (inputs["labels"][:, 1:] != -100).any():
            return model.lm_head.weight.sum() * 0
        return token_losses(model, inputs) / num_items_in_batch


def rows_with(unlabelled=()):
    rows = tiny.token_rows(16, seed=3)
    return [{**r, "labels": NOTHING * len(r["labels"]) if i in unlabelled else r["labels"]} for i, r in enumerate(rows)]


def fit(kind, folder, rows=None, model=None, **changes):
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 2} | changes
    options |= {"train_sampling_strategy": "sequential"}
    args = arguments(TrainingArguments, folder, **options)
    trainer = kind(model or tiny.causal_lm(), args, pad, rows or rows_with())
    trainer.train()
    return trainer


def losses(trainer):
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


@pytest.mark.parametrize("unlabelled", [(), (0, 1, 5)], ids=["all labelled", "first micro-batch unlabelled"])
@pytest.mark.parametrize(
    "kind", [Scaled, ScaledByHand, Mean, MeanThatLooks, MeanThatReturnsEarly, ScaledThatReturnsEarly]
)
def test_every_way_to_write_one_loss_gives_the_weights_of_the_models_own(kind, unlabelled, tmp_path):
    rows = rows_with(unlabelled)
    own = fit(Trainer, tmp_path / "own", rows)
    mine = fit(kind, tmp_path / "mine", rows)
    assert losses(mine) == pytest.approx(losses(own), rel=1e-5)
    for name, value in weights(own).items():
        torch.testing.assert_close(weights(mine)[name], value, rtol=0, atol=2e-6, msg=name)


def test_the_count_that_a_loss_is_given_is_a_plain_tensor(tmp_path):
    kinds = []

    class Looks(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            kinds.append(type(num_items_in_batch))
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    fit(Looks, tmp_path, max_steps=1)
    assert set(kinds) == {torch.Tensor}


class MeanThatPops(Trainer):
    """As scripts write it: the labels are taken out of the batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        return mean_loss(model, {**inputs, "labels": labels})


def test_a_loss_may_take_labels_out_of_what_tokenizers_give(tmp_path):
    def train(kind):
        args = arguments(TrainingArguments, tmp_path, max_steps=2, gradient_accumulation_steps=2)
        collator = lambda rows: BatchEncoding(pad(rows))  # noqa: E731
        trainer = kind(tiny.causal_lm(), args, data_collator=collator, train_dataset=tiny.token_rows(16))
        trainer.train()
        return weights(trainer)

    popped, kept = train(MeanThatPops), train(Mean)
    assert all(torch.equal(popped[name], kept[name]) for name in kept)


def test_a_penalty_beside_a_divided_sum_is_a_mean_however_the_step_is_cut(tmp_path, caplog):
    class Mixed(Trainer):
        """As scripts write it: the loss of the base class, and a penalty on the weights."""

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            items = (inputs["labels"][:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
            return token_losses(model, inputs) / items + 0.01 * model.lm_head.weight.square().sum()

    def cut(name, size, accumulation):
        changes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation, "max_steps": 3}
        return fit(Mixed, tmp_path / name, **changes)

    whole = cut("whole", 8, 1)
    for trainer in (cut("4", 2, 4), cut("8", 1, 8)):
        assert losses(trainer) == pytest.approx(losses(whole), rel=1e-5)
        for name, value in weights(trainer).items():
            torch.testing.assert_close(value, weights(whole)[name], rtol=1e-4, atol=1e-6)
    assert "From step 1 on, Mixed.compute_loss divides only a part of its loss by num_items_in_batch" in caplog.text
    Mixed.loss_is_scaled_for_ga = True  # summed instead: the penalty counts four times
    penalty = 0.01 * tiny.causal_lm().lm_head.weight.square().sum().item()
    summed = losses(cut("summed", 2, 4))[0]
    assert summed == pytest.approx(losses(whole)[0] + 3 * penalty, rel=1e-4)


class Distance(Trainer):
    """The loss of the base class, and five times how far the policy is from the weights that it began with."""

    def __init__(self, model, *args, **kwargs):
        super().__init__(model, *args, **kwargs)
        self.first = copy.deepcopy(model).eval()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        mask = inputs["attention_mask"].bool()
        with torch.no_grad():
            before = self.first(**{name: inputs[name] for name in ("input_ids", "attention_mask")}).logits
        chosen = inputs["labels"].clamp(min=0)[..., None]
        now, then = (logits.log_softmax(-1).gather(-1, chosen)[..., 0] for logits in (outputs.logits, before))
        kept = mask[:, 1:] & (inputs["labels"][:, 1:] != -100)
        loss = loss + 5 * (now - then)[:, 1:][kept].mean()
        return (loss, outputs) if return_outputs else loss


def test_a_term_that_is_0_at_first_is_a_mean_from_the_first_step_on(tmp_path, caplog):
    """Its value is 0 where the weights begin, and its gradient is not."""
    whole = fit(Distance, tmp_path / "whole", per_device_train_batch_size=8, gradient_accumulation_steps=1, max_steps=3)
    cut = fit(Distance, tmp_path / "cut", max_steps=3)
    assert "From step 1 on, Distance.compute_loss" in caplog.text
    assert losses(cut) == pytest.approx(losses(whole), rel=1e-5)
    for name, value in weights(cut).items():
        torch.testing.assert_close(value, weights(whole)[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("base", [Scaled, Mean])
def test_a_term_that_comes_later_is_found_at_the_next_power_of_two(base, tmp_path, caplog):
    class Later(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = base.compute_loss(self, model, inputs, False, num_items_in_batch)
            if self.state.global_step < 3:
                return loss
            return loss + (mean_loss if base is Scaled else Scaled.compute_loss.__get__(self))(
                *((model, inputs) if base is Scaled else (model, inputs, False, num_items_in_batch))
            )

    cut = losses(fit(Later, tmp_path / "cut", max_steps=5, rows=rows_with() * 3))
    whole = losses(fit(Later, tmp_path / "whole", max_steps=5, rows=rows_with() * 3, per_device_train_batch_size=8,
                       gradient_accumulation_steps=1))  # fmt: skip
    assert "From step 4 on, Later.compute_loss" in caplog.text
    assert caplog.text.count("divides only a part") == 1  # a step of one micro-batch is not measured
    assert cut == pytest.approx(whole, rel=1e-5)


def test_the_step_after_a_resume_is_computed_as_without_it(tmp_path):
    options = dict(max_steps=4, save_steps=2, save_strategy="steps")
    whole = fit(Distance, tmp_path, **options)
    args = dataclasses.replace(whole.args, output_dir=str(tmp_path / "again"))
    again = Distance(tiny.causal_lm(), args, pad, rows_with())
    again.first = whole.first
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(weights(whole)[name], value) for name, value in weights(again).items())


@pytest.mark.parametrize("kind", [MeanThatLooks, Scaled])
def test_a_loss_that_takes_the_count_gets_one_for_a_window_of_one(kind, tmp_path):
    assert len(losses(fit(kind, tmp_path, gradient_accumulation_steps=1, max_steps=3))) == 3


class Queue(nn.Module):
    """A student with a teacher that follows it, a queue of features and a count of calls."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = nn.Linear(4, 1), nn.Linear(4, 1).requires_grad_(False)
        self.queue, self.rows, self.place = torch.zeros(4), [], 0

    def forward(self, x, labels, num_items_in_batch=None):
        with torch.no_grad():
            for mine, its in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.mul_(0.9).add_(its, alpha=0.1)
            torch._foreach_add_(list(self.teacher.parameters()), 0.01)
            self.queue[self.place % 4] += x.sum()
            self.teacher.weight.data = self.teacher.weight.data * 1.01
        self.place += 1
        self.rows.append(self.place)
        return {"loss": (self.student(x)[:, 0] - labels).square().sum() / num_items_in_batch}


class Follows(Trainer):
    """As scripts keep averages: in a module that is the trainer's."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if "average" not in vars(self):
            self.average = copy.deepcopy(self.model.student)
        with torch.no_grad():
            for mine, its in zip(self.average.parameters(), self.model.student.parameters(), strict=True):
                mine.copy_(0.9 * mine + 0.1 * its)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def test_teachers_queues_and_counts_are_left_as_they_were(tmp_path):
    rows = [{"x": [float(i), 1.0, 0.5, -1.0], "labels": float(i % 3)} for i in range(12)]
    ends = []
    for said in (True, None):
        args = arguments(TrainingArguments, tmp_path / str(said), per_device_train_batch_size=2, max_steps=3)
        args.gradient_accumulation_steps, args.learning_rate = 2, 1e-3
        trainer = type("Follows", (Follows,), {"loss_is_scaled_for_ga": said})(Queue(), args, None, rows)
        trainer.train()
        model = trainer.model
        states = [*model.state_dict().values(), *trainer.average.state_dict().values(), model.queue]
        ends.append((states, model.place, model.rows))
    (declared, *counts), (found, *same) = ends
    assert counts == same == [6, [1, 2, 3, 4, 5, 6]]
    assert all(map(torch.equal, declared, found))


class Meter:
    """As scripts average a metric."""

    def __init__(self):
        self.total, self.seen, self.sums = 0.0, [], {"all": 0}

    def update(self, value):
        self.total += value
        self.seen.append(value)
        self.sums["all"] += 1


class Counts(nn.Module):
    """As torchmetrics keeps a metric: a module with buffers, which is in no other."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))


class Measures(Trainer):
    def __init__(self, *args, **kwargs):
        self.meter, self.meters = Meter(), {"train": defaultdict(Meter)}
        self.table, self.counts = np.zeros(4), {"train": [Counts()]}
        super().__init__(*args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.meter.update(1)
        self.meters["train"]["loss"].update(2)
        self.table[1] += 1
        self.counts["train"][0].count += 1
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def test_meters_and_tables_count_each_micro_batch_once(tmp_path):
    rows = [{"x": [float(i), 1.0, 0.5, -1.0], "labels": float(i % 3)} for i in range(12)]
    args = arguments(TrainingArguments, tmp_path, per_device_train_batch_size=2, max_steps=3, learning_rate=1e-3)
    args.gradient_accumulation_steps = 2
    trainer = Measures(Queue(), args, None, rows)
    trainer.train()
    assert vars(trainer.meter) == {"total": 6.0, "seen": [1] * 6, "sums": {"all": 6}}
    assert vars(trainer.meters["train"]["loss"]) == {"total": 12.0, "seen": [2] * 6, "sums": {"all": 6}}
    assert trainer.table.tolist() == [0, 6, 0, 0] and trainer.counts["train"][0].count == 6


def test_what_is_declared_is_taken_at_its_word_and_nothing_is_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(scale_check, "loss_ratio", lambda *args: pytest.fail("tried"))
    for kind, is_scaled in ((Scaled, True), (Mean, False), (Distance, "mixed")):
        declared = type("Declared", (kind,), {"loss_is_scaled_for_ga": is_scaled})
        fit(declared, tmp_path / kind.__name__, max_steps=1)


class Noisy(nn.Module):
    """A loss with dropout and running statistics, random numbers of three generators, and a log."""

    def __init__(self):
        super().__init__()
        self.line, self.norm, self.drop = nn.Linear(4, 1), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x, labels, num_items_in_batch=None):
        self.calls += 1
        noise = random.random() + np.random.rand()
        losses = (self.line(self.drop(self.norm(x)))[:, 0] - labels).square() * (1 + 0.1 * noise)
        return {"loss": losses.mean() if num_items_in_batch is None else losses.sum() / num_items_in_batch}


class Logs(Trainer):
    seen = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.seen += 1
        self.history["all"].append(self.seen)
        self.log_metric("seen", self.seen)
        if self.seen == 2:
            self.log({"second": 2.0})
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def test_nothing_is_left_of_the_trial(tmp_path, monkeypatch):
    """Weights, running statistics, random numbers, records and counters are those of a run that declares its loss."""
    generator = torch.Generator().manual_seed(0)
    rows = [{"x": torch.randn(4, generator=generator).tolist(), "labels": float(i % 3)} for i in range(16)]
    tried, ends = [], []
    real = scale_check.loss_ratio
    monkeypatch.setattr(
        scale_check, "loss_ratio", lambda *args, **moves: tried.append(real(*args, **moves)) or tried[-1]
    )
    for said in (True, None):
        torch.manual_seed(0)
        kind = type("Logs", (Logs,), {"loss_is_scaled_for_ga": said, "history": {"all": []}})
        kind.__init__ = lambda self, *a, **k: (setattr(self, "history", {"all": []}), Logs.__init__(self, *a, **k))[1]
        args = arguments(TrainingArguments, tmp_path / str(said), per_device_train_batch_size=4, max_steps=3)
        args.gradient_accumulation_steps = 2
        trainer = kind(Noisy(), args, None, rows)
        trainer.train()
        buffers = {name: value.clone() for name, value in trainer.model.named_buffers()}
        ends.append((weights(trainer), buffers, trainer, torch.rand(2), random.random(), np.random.rand()))
    assert [share for share, _ in tried] == pytest.approx([0.5, 0.5])  # at steps 1 and 2
    (declared, found) = ends
    for which in (0, 1):
        assert all(torch.equal(declared[which][name], value) for name, value in found[which].items())
    assert found[1]["calls"] == 6
    assert torch.equal(declared[3], found[3]) and declared[4:] == found[4:]
    (one, other) = (end[2] for end in ends)
    assert one.seen == other.seen == 6 and one.history == other.history == {"all": [1, 2, 3, 4, 5, 6]}
    times = ("train_runtime", "train_samples_per_second", "train_steps_per_second")
    records = [
        [{n: v for n, v in record.items() if n not in times} for record in end.state.log_history]
        for end in (one, other)
    ]
    assert records[0] == records[1] and any("second" in record for record in records[0])


def test_it_is_found_out_again_after_a_resume(tmp_path):
    whole = fit(Scaled, tmp_path / "whole", max_steps=4, save_steps=2, save_strategy="steps")
    args = arguments(
        TrainingArguments, tmp_path / "whole", per_device_train_batch_size=2, gradient_accumulation_steps=4,
        max_steps=4, train_sampling_strategy="sequential",
    )  # fmt: skip
    again = Scaled(tiny.causal_lm(seed=9), args, pad, rows_with())
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert again.scaling.objective.returns_mean is False
    assert all(torch.equal(weights(whole)[name], value) for name, value in weights(again).items())


def test_our_own_losses_are_known_and_one_that_replaces_them_is_not():
    from posttrain.rl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer

    for kind in (DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer):
        without = {"compute_loss_func": None}
        bare = object.__new__(type("Bare", (kind,), without))
        assert scaling.declared_kind(bare) == "sum"
        replaced = type("Mine", (kind,), {"compute_loss": Mean.compute_loss} | without)
        assert scaling.declared_kind(replaced.__new__(replaced)) is None
        bare.compute_loss = lambda *args: None
        assert scaling.declared_kind(bare) is None
