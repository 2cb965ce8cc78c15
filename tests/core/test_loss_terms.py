"""A loss given as a dict of its terms: each is logged under its name, exactly as the loss is."""

import pytest
import torch

from posttrain.core import Trainer
from posttrain.core.losses.normalization import split_terms
from tests.contract.trainers import causal_lm


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
