"""KTO: eq. 8 by hand, one point of reference for a whole update, and what a run needs."""

import re

import pytest
import torch

from posttrain.rl import KTOConfig, KTOTrainer
from posttrain.rl.algorithms.kto import KTOCollator, apo_zero_unpaired, kto, others_of
from tests import tiny
from tests.contract.trainers import arguments, preference, preference_rows


def sigma(x):
    return torch.sigmoid(torch.tensor(x, dtype=torch.float64)).item()


def beside_another(folder, **options):
    """A trainer whose reference is not what the policy begins as: one with a sharper head."""
    other = tiny.causal_lm()
    with torch.no_grad():
        other.lm_head.weight.mul_(3.0)
    args = arguments(KTOConfig, folder, **options)
    rows = preference_rows(7)
    return KTOTrainer(tiny.causal_lm(), other, args, None, preference_rows(8), rows, tiny.tokenizer())


def test_losses_by_hand():
    ratio = torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64)
    good = torch.tensor([True, False, False])
    kl = torch.tensor(0.5, dtype=torch.float64)
    expected = [1 - sigma(0.2 * 0.5), 1 - sigma(-0.2 * 0.5), 1 - sigma(0.2 * 2.5)]
    assert kto(ratio, good, kl, 0.2).tolist() == pytest.approx(expected)
    expected = [1 - sigma(0.2), sigma(0.2), sigma(-0.4)]
    assert apo_zero_unpaired(ratio, good, kl, 0.2).tolist() == pytest.approx(expected)


def test_an_untrained_policy_loses_one_half_a_row(tmp_path):
    trainer = preference(KTOTrainer)(tmp_path)
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(0.5, abs=1e-6)
    assert metrics["eval_kl"] == pytest.approx(0, abs=1e-5)
    assert metrics["eval_rewards/margins"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("layout", ["shared_prefix", "padding_free", "padded"])
@pytest.mark.parametrize(("loss", "longest"), [("kto", 512), ("kto", 14), ("apo_zero_unpaired", 512)])
def test_rows_are_measured_as_they_are_read_with_the_completion_that_is_lent_to_them(loss, longest, layout, tmp_path):
    layouts = {"shared_prefix": layout == "shared_prefix", "padding_free": layout == "padding_free"}
    it = preference(KTOTrainer)(
        tmp_path, loss_type=loss, max_length=longest, train_sampling_strategy="group_by_length", **layouts
    )
    alone = [it.data_collator([it.train_dataset[i]]) for i in range(len(it.train_dataset))]
    read = [batch["input_ids"].numel() + (batch["kl"]["input_ids"].numel() if "kl" in batch else 0) for batch in alone]
    assert it.row_lengths(it.train_dataset) == read and min(read) < max(read)
    assert len(list(it.get_train_dataloader())) > 1


def labelled(labels):
    rows = preference_rows(len(labels))
    return [{"prompt": r["prompt"], "completion": r["chosen"], "label": v} for r, v in zip(rows, labels, strict=True)]


@pytest.mark.parametrize("empty", [False, True], ids=["given", "left over"])
@pytest.mark.parametrize(("label", "words"), [
    (True, "all 5 rows are good .label=True. and none is bad.*Add rows with label=False.*SFTTrainer"),
    (False, "all 5 rows are bad .label=False. and none is good. KTO then only lowers"),
])  # fmt: skip
def test_rows_of_one_kind_alone_are_warned_of_once(label, words, empty, tmp_path, caplog):
    """By the rows that are trained on: the only row of the other kind may be dropped."""
    rows = labelled([label] * 5 + [not label] * empty)
    if empty:
        rows[-1]["completion"] = ""
    args = arguments(KTOConfig, tmp_path, max_steps=2, faulty_rows="drop")
    trainer = KTOTrainer(tiny.causal_lm(), None, args, None, rows, labelled([True] * 3), tiny.tokenizer())
    trainer.train(), trainer.evaluate()
    [said] = [record.getMessage() for record in caplog.records if "KTO then only" in record.getMessage()]
    assert re.match("train: " + words, said)


def test_rows_of_both_kinds_and_streams_are_not_counted_as_one_sided(tmp_path, caplog):
    import datasets

    for rows in (
        labelled([True] * 4 + [False]),
        datasets.Dataset.from_list(labelled([True] * 5)).to_iterable_dataset(),
    ):
        args = arguments(KTOConfig, tmp_path, max_steps=1)
        KTOTrainer(tiny.causal_lm(), None, args, None, rows, None, tiny.tokenizer())
    assert "KTO then only" not in caplog.text


def test_where_prompts_differ_each_row_is_set_beside_the_completion_of_the_row_before():
    assert others_of([[1], [2], [3], [4]]) == [3, 0, 1, 2]


def test_no_row_is_set_beside_a_completion_of_its_own_prompt(tmp_path):
    rows = preference_rows(16)
    trainer = preference(KTOTrainer)(tmp_path)
    paired = KTOTrainer(trainer.model, None, trainer.args, None, rows, None, trainer.processing_class).train_dataset
    assert len(paired) == 32
    prompts = {tuple(row["completion_ids"]): tuple(row["prompt_ids"]) for row in paired}
    own = [prompts[tuple(row["kl_ids"])] == tuple(row["prompt_ids"]) for row in paired]
    assert sum(own) == 0
    # Each completion serves once, and the chosen as often as the rejected.
    assert sorted(paired["kl_ids"][:]) == sorted(paired["completion_ids"][:])


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2), (3, 1, 2), (5, 1, 1), (2, 2), (1, 4), (3,), (1,)])
def test_the_row_set_beside_a_prompt_is_of_another_one_where_there_is_one(sizes):
    prompts = [[number] for number, size in enumerate(sizes) for _ in range(size)]
    for order in (prompts, prompts[::-1], prompts[::2] + prompts[1::2]):
        taken = others_of(order)
        if len(sizes) > 1:
            assert all(order[row] != order[other] for row, other in enumerate(taken))
        elif len(order) > 1:
            assert all(row != other for row, other in enumerate(taken))
        if 2 * max(sizes) <= len(order):
            assert sorted(taken) == list(range(len(order)))


def test_rows_of_a_stream_take_completions_of_other_prompts_in_their_batch():
    rows = [{"prompt_ids": [p], "completion_ids": [10 * p + k], "label": k == 0} for p in (1, 2) for k in (0, 1)]
    assert KTOCollator(0)(rows)["kl"]["input_ids"].tolist() == [[1, 20], [1, 21], [2, 10], [2, 11]]


def test_prompts_with_others_completions_are_cut_to_the_maximum():
    rows = [{"prompt_ids": [1, 2, 3], "completion_ids": [4], "label": True},
            {"prompt_ids": [1], "completion_ids": [5, 6, 7, 8], "label": False}]  # fmt: skip
    batch = KTOCollator(0, max_length=5)(rows)
    assert batch["label"].tolist() == [True, False]
    assert batch["kl"]["input_ids"].tolist() == [[1, 2, 3, 5, 6], [1, 4, 0, 0, 0]]
    assert "kl" not in KTOCollator(0, with_kl=False)(rows)


def test_the_divergence_is_one_number_for_an_update_however_it_is_cut(tmp_path):
    trainer = beside_another(tmp_path)
    rows = [trainer.train_dataset[i] for i in range(8)]
    whole = trainer.divergence(trainer.model, [trainer.data_collator(rows)])
    cut = trainer.divergence(trainer.model, [trainer.data_collator(rows[:3]), trainer.data_collator(rows[3:])])
    assert float(whole) > 0.01
    torch.testing.assert_close(whole, cut, rtol=1e-5, atol=0)


def test_evaluation_does_not_depend_on_the_batch_size(tmp_path):
    losses = []
    for size in (2, 7):
        metrics = beside_another(tmp_path / str(size), per_device_eval_batch_size=size).evaluate()
        assert metrics["eval_kl"] > 0.01
        losses.append(metrics["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"loss_type": "apo_zero_unpaired"}, {"precompute_ref_log_probs": True}])
def test_training_tells_good_from_bad(options, tmp_path):
    trainer = preference(KTOTrainer)(tmp_path, num_train_epochs=8, learning_rate=3e-3, optim="adamw_torch", **options)
    trainer.train()
    records = [r for r in trainer.state.log_history if "rewards/margins" in r]
    assert records[-1]["rewards/margins"] > 0.01 > records[0]["rewards/margins"]
    assert records[-1]["loss"] < records[0]["loss"]


def test_precomputed_references_give_the_same_run(tmp_path):
    runs = []
    for name, options in (("live", {}), ("kept", {"precompute_ref_log_probs": True})):
        trainer = preference(KTOTrainer)(tmp_path / name, **options)
        trainer.train()
        runs.append([record["loss"] for record in trainer.state.log_history if "loss" in record])
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)


def test_rows_of_one_kind_leave_the_other_out_of_the_log(tmp_path):
    rows = [
        {"prompt": "a cat", "completion": " sat", "label": True},
        {"prompt": "a dog", "completion": " ran", "label": True},
    ]
    usual = preference(KTOTrainer)(tmp_path)
    trainer = KTOTrainer(
        model=usual.model, args=usual.args, processing_class=usual.processing_class, train_dataset=rows
    )
    trainer.train()
    (record, *_) = (r for r in trainer.state.log_history if "loss" in r)
    assert "rewards/chosen" in record and "rewards/rejected" not in record and "rewards/margins" not in record


def test_the_model_cannot_be_its_own_reference(tmp_path):
    usual = preference(KTOTrainer)(tmp_path)
    with pytest.raises(ValueError, match="ref_model is the model itself"):
        KTOTrainer(usual.model, usual.model, usual.args)
