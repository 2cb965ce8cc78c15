"""ORPO, CPO and SimPO: the published formulas by hand, their limits, and a run that widens the margin."""

import math

import pytest
import torch

from posttrain.core.errors import ConfigError
from posttrain.rl import CPOConfig, CPOTrainer, ORPOConfig, ORPOTrainer
from posttrain.rl.algorithms.cpo import LOSSES
from posttrain.rl.algorithms.orpo import log_odds, odds_ratio
from posttrain.rl.policy.logprobs import score_completions
from posttrain.rl.preference.arguments import PreferenceConfig
from posttrain.rl.preference.trainer import PreferenceTrainer
from tests import tiny
from tests.contract.trainers import arguments, preference, preference_rows


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_log_odds_are_those_of_the_probability():
    p = t(0.25, 0.5, 0.9)
    torch.testing.assert_close(log_odds(p.log()), (p / (1 - p)).log())
    assert math.isfinite(log_odds(torch.zeros(())))  # p = 1


def test_the_odds_ratio_loss_is_log_2_between_equals_and_falls_as_the_chosen_one_gains():
    equal = odds_ratio(t(-1.0), t(-1.0))
    assert equal.item() == pytest.approx(math.log(2))
    # odds 1 against 1/3: log odds differ by log 3, and sigma(log 3) is 3/4
    assert odds_ratio(t(math.log(0.5)), t(math.log(0.25))).item() == pytest.approx(-math.log(0.75))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sigmoid", math.log1p(math.exp(-0.5 * 2))),
        ("simpo", math.log1p(math.exp(-(0.5 * 2 - 0.3)))),
        ("hinge", 0.0),
        ("ipo", (2 - 1.0) ** 2),
    ],
)
def test_cpo_losses_by_hand(name, expected):
    assert LOSSES[name](t(2.0), 0.5, 0.0, 0.3).item() == pytest.approx(expected)


def test_label_smoothing_of_a_half_would_be_symmetric():
    loss = LOSSES["sigmoid"]
    torch.testing.assert_close(loss(t(1.5), 1.0, 0.4, 0), 0.6 * loss(t(1.5), 1, 0, 0) + 0.4 * loss(t(-1.5), 1, 0, 0))


@pytest.mark.parametrize(
    ("trainer", "options"),
    [(ORPOTrainer, {}), (CPOTrainer, {}), (CPOTrainer, {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0}),
     (CPOTrainer, {"loss_type": "ipo", "alpha": 0.25})],
)  # fmt: skip
def test_training_widens_the_margin(trainer, options, tmp_path):
    made = preference(trainer)(tmp_path, num_train_epochs=8, learning_rate=3e-3, optim="adamw_torch", **options)
    before = made.evaluate()
    made.train()
    after = made.evaluate()
    assert after["eval_rewards/margins"] > before["eval_rewards/margins"]
    assert after["eval_loss"] < before["eval_loss"]
    assert made.reference is None and made.ref_model is None


def test_the_first_loss_of_orpo_is_the_formula_on_the_models_own_probabilities(tmp_path):
    made = preference(ORPOTrainer)(tmp_path)
    inputs = made.data_collator([made.train_dataset[0], made.train_dataset[1]])
    loss = made.compute_loss(made.model, inputs)
    mean = []
    for row in (made.train_dataset[0], made.train_dataset[1]):
        for side in ("chosen_ids", "rejected_ids"):
            ids = torch.tensor([row["prompt_ids"] + row[side]])
            labels = ids.clone()
            labels[:, : len(row["prompt_ids"])] = -100
            mean.append(-made.model(input_ids=ids, labels=labels).loss)
    chosen, rejected = torch.stack(mean[::2]), torch.stack(mean[1::2])
    odds = chosen - torch.log(1 - chosen.exp()) - rejected + torch.log(1 - rejected.exp())
    expected = (-chosen - 0.1 * torch.nn.functional.logsigmoid(odds)).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(("trainer", "kind"), [(ORPOTrainer, ORPOConfig), (CPOTrainer, CPOConfig)])
def test_an_encoder_decoder_is_trained_on_the_probabilities_of_its_decoder(trainer, kind, tmp_path):
    model, rows = tiny.seq2seq_lm(), preference_rows(8)
    args = arguments(kind, tmp_path, num_train_epochs=8, learning_rate=3e-3, optim="adamw_torch", num_eval_samples=1)
    run = trainer(model, args, None, rows, rows[:3], tiny.tokenizer())
    batch = run.data_collator([run.train_dataset[i] for i in range(2)])
    scores = score_completions(model, batch)
    for i, side in enumerate(("chosen_ids", "chosen_ids", "rejected_ids", "rejected_ids")):
        row = run.train_dataset[i % 2]
        with torch.no_grad():  # its own loss, which is the mean over the tokens
            expected = -model(input_ids=torch.tensor([row["prompt_ids"]]), labels=torch.tensor([row[side]])).loss
        assert float(scores.logps[i].detach().sum()) / len(row[side]) == pytest.approx(float(expected), rel=1e-5)
    run.train()
    records = [record for record in run.state.log_history if "rewards/margins" in record]
    assert records[-1]["rewards/margins"] > records[0]["rewards/margins"] and records[-1]["loss"] < records[0]["loss"]
    assert math.isfinite(run.evaluate()["eval_loss"])


@pytest.mark.parametrize("trainer", [ORPOTrainer, CPOTrainer])
def test_rows_have_the_columns_that_earlier_collators_read(trainer, tmp_path, caplog):
    run = preference(trainer)(tmp_path)
    row = run.train_dataset[0]
    for side in ("chosen", "rejected"):
        assert row[f"{side}_input_ids"] == row["prompt_ids"] + row[f"{side}_ids"]
    with caplog.at_level("INFO"):
        assert next(iter(run.get_train_dataloader()))
    assert "left out" not in caplog.text  # as if the user had to do something about them


def test_alphapo_is_simpo_without_the_likelihood():
    args = CPOConfig(output_dir="out", loss_type="alphapo", alpha=0.5)
    assert (args.loss_type, args.cpo_alpha, args.alpha) == ("simpo", 0.0, 0.5)


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="loss_type"):
        CPOConfig("out", loss_type="simpl")
    with pytest.raises(ConfigError, match="label_smoothing"):
        CPOConfig("out", loss_type="hinge", label_smoothing=0.1)
    with pytest.raises(ConfigError, match="beta"):
        ORPOConfig("out", beta=-1)
    with pytest.raises(ConfigError, match="generate_during_eval"):
        ORPOConfig("out", generate_during_eval=True)


def test_a_loss_that_compares_with_a_reference_needs_the_arguments_of_one(tmp_path):
    args = arguments(PreferenceConfig, tmp_path)
    with pytest.raises(TypeError, match="ReferenceArguments, or set needs_reference = False in"):
        PreferenceTrainer(tiny.causal_lm(), None, args, None, preference_rows(4), None, tiny.tokenizer())
