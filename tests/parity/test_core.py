"""The same model, data, seed and arguments lead transformers' Trainer and ours to the same losses and weights."""

import pytest
import torch

from posttrain.core import Trainer, TrainingArguments
from tests import tiny
from tests.contract.trainers import classification_rows, pad

ARGS = dict(
    learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
    gradient_accumulation_steps=4, per_device_train_batch_size=2, num_train_epochs=4,
)  # fmt: skip


def pair(tmp_path, model, rows, collator, **changes):
    """(losses, weights, evaluation loss) of transformers' Trainer and of ours."""
    import transformers

    found = []
    for trainer_class, arguments in (
        (transformers.Trainer, transformers.TrainingArguments),
        (Trainer, TrainingArguments),
    ):
        args = arguments(str(tmp_path / trainer_class.__module__), **(ARGS | changes))
        options = {} if collator is None else {"data_collator": collator}
        if collator is None:
            options["processing_class"] = tiny.tokenizer()
        trainer = trainer_class(model(), args, train_dataset=rows, eval_dataset=rows[:8], **options)
        trainer.train()
        records = trainer.state.log_history
        logged = {key: [r[key] for r in records if key in r] for key in ("loss", "grad_norm", "learning_rate", "epoch")}
        found.append((logged, dict(trainer.model.state_dict()), trainer.evaluate()["eval_loss"]))
    return found


def assert_equal(theirs, ours, updates):
    for key in ("loss", "grad_norm", "learning_rate"):
        assert len(ours[0][key]) == updates
        assert ours[0][key] == pytest.approx(theirs[0][key], rel=1e-5, abs=1e-7), key
    assert ours[0]["epoch"][:updates] == pytest.approx(theirs[0]["epoch"][:updates])
    for name, value in theirs[1].items():
        torch.testing.assert_close(ours[1][name], value, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("changes", [
    {}, {"weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 5}, {"optim": "sgd"},
    {"max_grad_norm": 0.1}, {"label_smoothing_factor": 0.1}, {"bf16": True}, {"train_sampling_strategy": "sequential"},
], ids=str)  # fmt: skip
def test_a_language_model_over_20_updates_with_a_short_last_window(changes, tmp_path):
    # 35 rows in batches of 2 are 18 batches: windows of 4, 4, 4, 4 and 2, five updates an epoch
    theirs, ours = pair(tmp_path, tiny.causal_lm, tiny.token_rows(35), pad, **changes)
    assert_equal(theirs, ours, updates=20)


def test_a_classifier_of_rows(tmp_path):
    # Without accumulation: a mean over rows, that transformers 5.23 multiplies by the number of micro-batches
    # otherwise.
    changes = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8, "num_train_epochs": 5}
    theirs, ours = pair(tmp_path, tiny.classifier, classification_rows(28), None, **changes)
    assert_equal(theirs, ours, updates=20)
    assert ours[2] == pytest.approx(theirs[2], rel=1e-5)
