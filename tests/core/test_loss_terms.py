"""A loss given as a dict of its terms: each is logged under its name, exactly as the loss is."""

import json
import sys
from pathlib import Path

import pytest
import torch

from posttrain.core import Trainer, TrainingArguments
from posttrain.core.data.batches import as_filler
from posttrain.core.losses.normalization import split_terms
from tests import tiny
from tests.contract.trainers import causal_lm, pad
from tests.programs import together


class Scaled(Trainer):
    """Sums over the items of the window, in two terms."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        logps = outputs.logits[:, :-1].log_softmax(-1)
        labels = inputs["labels"][:, 1:]
        mask = labels != -100
        nll = -logps.gather(-1, labels.clamp(min=0)[..., None])[..., 0][mask].sum()
        peak = logps.max(-1).values[mask].sum()
        terms = {"nll": nll / num_items_in_batch, "peak": 0.1 * peak / num_items_in_batch}
        loss = {"loss": terms["nll"] + terms["peak"], **terms}
        return (loss, outputs) if return_outputs else loss


class Means(Scaled):
    """The same as means over each micro-batch, in three arguments."""

    def compute_loss(self, model, inputs, return_outputs=False):
        return super().compute_loss(model, inputs, return_outputs, self.count_items(inputs))


def records(folder, trainer_class, **changes):
    trainer = causal_lm(trainer_class)(
        folder, max_steps=4, logging_steps=2, eval_strategy="steps", eval_steps=4, **changes
    )
    trainer.train()
    train = [r for r in trainer.state.log_history if "loss" in r]
    [evaluated] = [r for r in trainer.state.log_history if "eval_loss" in r]
    return [[r["loss"], r["nll"], r["peak"]] for r in train], [evaluated[f"eval_{n}"] for n in ("loss", "nll", "peak")]


@pytest.mark.parametrize("trainer_class", [Scaled, Means])
def test_terms_are_exact_however_a_window_is_cut_and_add_up_to_the_loss(trainer_class, tmp_path):
    whole, evaluated = records(tmp_path / "8x1", Scaled)
    for loss, nll, peak in [*whole, evaluated]:
        assert loss == pytest.approx(nll + peak, rel=1e-5) and peak < 0
    for size, accumulation in [(2, 4), (1, 8)]:
        cut = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        parts, again = records(tmp_path / str(size), trainer_class, **cut, per_device_eval_batch_size=size)
        assert torch.tensor(parts) == pytest.approx(torch.tensor(whole), rel=1e-5)
        assert again == pytest.approx(evaluated, rel=1e-5)


def test_what_is_no_loss_is_refused_with_what_it_is():
    one = torch.tensor(1.0)
    assert split_terms({"loss": one, "kl": 2.0}) == (one, {"kl": torch.tensor(2.0)})
    with pytest.raises(TypeError, match="a dict of nll; it must return"):
        split_terms({"nll": one})
    with pytest.raises(TypeError, match=r"'logits' is of shape \(2, 3\)"):
        split_terms({"loss": one, "logits": torch.ones(2, 3)})
    with pytest.raises(TypeError, match="NoneType"):
        split_terms(None)
    assert split_terms(torch.ones(1))[0].shape == ()
    with pytest.raises(TypeError, match=r"'loss' is of shape \(3,\); each term must be one number"):
        split_terms({"loss": torch.ones(3)})
    with pytest.raises(ValueError, match=r"a loss of shape \(3,\); it must be one number"):
        split_terms(torch.ones(3))


def test_a_run_stops_at_a_loss_for_each_row(tmp_path):
    class PerRow(Scaled):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).logits.float().mean((1, 2))

    with pytest.raises(ValueError, match=r"compute_loss returned a loss of shape \(4,\)"):
        causal_lm(PerRow)(tmp_path, max_steps=1, per_device_train_batch_size=4).train()


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "compute_loss_func returned NoneType; it must return"),
        (torch.ones(3), r"compute_loss_func returned a loss of shape \(3,\)"),
        ({"nll": torch.ones(())}, "compute_loss_func returned a dict of nll"),
        ({"loss": torch.ones(3)}, "compute_loss_func returned a dict whose 'loss' is of shape"),
    ],
)
def test_what_a_function_for_the_loss_returns_is_named_as_its(returned, said, tmp_path):
    def loss_of(outputs, labels, num_items_in_batch=None):
        return returned

    trainer = causal_lm()(tmp_path, max_steps=1)
    trainer.compute_loss_func = loss_of
    with pytest.raises((TypeError, ValueError), match=said):
        trainer.train()


class Pairs(Scaled):
    """A sum and a count of its own: tokens with an even id, which `count_items` knows nothing of."""

    def compute_loss(self, model, inputs, return_outputs=False):
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        labels = inputs["labels"][:, 1:]
        mask = (labels != -100) & (labels % 2 == 0)
        nll = -outputs.logits[:, :-1].log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0][mask].sum()
        return ((nll, mask.sum()), outputs) if return_outputs else (nll, mask.sum())


class PairsWithCount(Pairs):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs)


@pytest.mark.parametrize("trainer_class", [Pairs, PairsWithCount])
def test_a_sum_with_its_own_count_is_averaged_over_the_window_however_it_is_cut(trainer_class, tmp_path):
    def train(size, accumulation):
        changes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        trainer = causal_lm(trainer_class)(tmp_path / str(size), max_steps=3, logging_steps=1, **changes)
        trainer.train()
        return trainer

    whole = train(8, 1)
    losses = [record["loss"] for record in whole.state.log_history if "loss" in record]
    norms = [record["grad_norm"] for record in whole.state.log_history if "grad_norm" in record]
    for size, accumulation in ((2, 4), (1, 8)):
        cut = train(size, accumulation)
        assert [r["loss"] for r in cut.state.log_history if "loss" in r] == pytest.approx(losses, rel=1e-5)
        assert [r["grad_norm"] for r in cut.state.log_history if "grad_norm" in r] == pytest.approx(norms, rel=1e-4)
        for a, b in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


#: Rows of which one has no even label: batches of 3 hold other shares of what is counted.
LENGTHS = (3, 12, 5, 9, 2, 14, 6)


def ragged_rows(seed):
    rows = [
        {name: value[:length] for name, value in row.items()}
        for row, length in zip(tiny.token_rows(len(LENGTHS), seed=seed), LENGTHS, strict=True)
    ]
    rows[4]["labels"] = [7] * len(rows[4]["labels"])
    return rows


def by_hand(model, rows):
    """The mean over the even labels of all rows, one row at a time."""
    total = count = 0.0
    for row in rows:
        ids, labels = torch.tensor(row["input_ids"])[None], torch.tensor(row["labels"])[None]
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        with torch.no_grad():
            (nll, number) = Pairs.compute_loss(None, model, batch)
        total, count = total + nll.item(), count + number.item()
    return total / count


def evaluated(folder, trainer_class, size, **changes):
    trainer = causal_lm(trainer_class)(folder, max_steps=2, per_device_eval_batch_size=size, **changes)
    trainer.eval_dataset, trainer.train_dataset = ragged_rows(seed=1), ragged_rows(seed=2)
    before = trainer.evaluate()["eval_loss"]
    trainer.model.eval()
    expected = by_hand(trainer.model, trainer.eval_dataset)
    trained = trainer.train().training_loss
    return [before, expected, trained, trainer.evaluate()["eval_loss"]]


@pytest.mark.parametrize("trainer_class", [Pairs, PairsWithCount])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_an_evaluation_divides_all_sums_by_all_counts(trainer_class, size, tmp_path):
    before, expected, *_ = evaluated(tmp_path, trainer_class, size)
    assert before == pytest.approx(expected, rel=1e-6)


@pytest.mark.rotated
@pytest.mark.long
@pytest.mark.parametrize("trainer_class", [Pairs, PairsWithCount])
def test_sums_with_counts_of_two_processes_are_those_of_one(trainer_class, tmp_path):
    alone = evaluated(tmp_path / "alone", trainer_class, 7, per_device_train_batch_size=6)
    done = together(2, [__file__, str(tmp_path), trainer_class.__name__])
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in (0, 1):
        assert json.loads((tmp_path / f"rank-{rank}.json").read_text()) == pytest.approx(alone, rel=1e-5)


def test_nothing_counted_is_no_loss_and_no_step(tmp_path):
    class Nothing(Pairs):
        def compute_loss(self, model, inputs, return_outputs=False):
            (total, _), outputs = super().compute_loss(model, inputs, True)
            pair = (total * 0, torch.zeros((), dtype=torch.long))
            return (pair, outputs) if return_outputs else pair

    trainer = causal_lm(Nothing)(tmp_path, max_steps=1)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert all(map(torch.equal, before, trainer.model.parameters()))
    assert trainer.evaluate()["eval_loss"] != trainer.evaluate()["eval_loss"]  # NaN: a mean over nothing


if __name__ == "__main__":  # two processes, started by the test above
    torch.set_num_threads(1)
    found = evaluated(
        f"{sys.argv[1]}/pair", globals()[sys.argv[2]], 2, per_device_train_batch_size=1, gradient_accumulation_steps=3
    )
    (Path(sys.argv[1]) / f"rank-{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def test_a_batch_that_only_keeps_a_process_in_step_adds_to_no_metric(tmp_path):
    class Counts(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            self.log_metric("rows", len(inputs["input_ids"]))
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    args = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to="none", disable_tqdm=True)
    trainer = Counts(tiny.causal_lm(), args, data_collator=pad, train_dataset=tiny.token_rows(8))
    trainer.train()
    batch = pad(tiny.token_rows(3))
    alone = trainer.evaluation_loop([batch], "Evaluation").metrics
    assert alone["eval_rows"] == 3
    assert trainer.evaluation_loop([batch, as_filler(pad(tiny.token_rows(7)))], "Evaluation").metrics == alone


class OneEach(torch.nn.Module):
    """A loss of 1 for each batch, in the type of its only weight."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros((), dtype=dtype))

    def forward(self, x, labels):
        return {"loss": self.weight + 1, "logits": x}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_16_bits_are_added_up_in_more(dtype, tmp_path):
    rows = [{"x": 1.0, "labels": 1.0}] * 600
    usual = dict(report_to="none", use_cpu=True, disable_tqdm=True, learning_rate=0.0, num_train_epochs=1)
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=1, per_device_eval_batch_size=1, logging_steps=600, **usual
    )
    trainer = Trainer(OneEach(dtype), args, train_dataset=rows, eval_dataset=rows)
    assert trainer.train().training_loss == 1.0
    assert trainer.state.log_history[0]["loss"] == trainer.evaluate()["eval_loss"] == 1.0


@pytest.mark.parametrize("scaled", [True, False])
def test_a_window_of_losses_of_16_bits_is_added_up_in_more(scaled, tmp_path):
    class Terms(Trainer):
        loss_is_scaled_for_ga = scaled

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = model(**inputs)["loss"] / (num_items_in_batch.bfloat16() if scaled else 1)
            return {"loss": loss, "term": loss.detach()}

    args = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=512,
        logging_steps=1,
        max_steps=1,
        learning_rate=0.0,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Terms(OneEach(torch.bfloat16), args, train_dataset=[{"x": 1.0, "labels": 1.0}] * 512)
    trainer.train()
    assert [trainer.state.log_history[0][name] for name in ("loss", "term")] == [1.0, 1.0]


@pytest.mark.parametrize("name", ["grad_norm", "learning_rate", "epoch"])
def test_a_term_with_the_name_of_another_value_of_the_record_is_refused(name):
    with pytest.raises(ValueError, match=f"a term '{name}', a name that every record of the log holds"):
        split_terms({"loss": torch.ones(()), name: torch.ones(())})


def one_step(folder, model=None, trainer_class=Trainer):
    usual = dict(report_to="none", use_cpu=True, disable_tqdm=True, max_steps=1, gradient_accumulation_steps=2)
    args = TrainingArguments(str(folder), per_device_train_batch_size=1, **usual)
    rows = [{"x": 1.0, "labels": 1.0}] * 2
    trainer = trainer_class(OneEach(torch.float32) if model is None else model, args, train_dataset=rows)
    return trainer.train().training_loss


def test_a_training_step_may_return_a_number_and_nothing_else_but_a_tensor(tmp_path):
    class Number(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            return super().training_step(model, inputs, num_items_in_batch).item()

    class Nothing(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            super().training_step(model, inputs, num_items_in_batch)

    assert one_step(tmp_path / "number", trainer_class=Number) == 1.0
    with pytest.raises(TypeError, match="training_step returned NoneType; it must return the detached loss"):
        one_step(tmp_path / "nothing", trainer_class=Nothing)


def test_a_model_that_returns_an_object_of_its_own_is_told_what_to_return(tmp_path):
    class Objects(OneEach):
        def forward(self, x, labels):
            return type("Out", (), super().forward(x, labels))()

    with pytest.raises(TypeError, match="The model returned Out; it must return a loss, a tuple that begins with"):
        one_step(tmp_path, Objects(torch.float32))
