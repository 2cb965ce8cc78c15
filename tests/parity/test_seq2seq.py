"""The same model, rows and arguments lead transformers' Seq2SeqTrainer and ours to the same losses, tokens and
metrics.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from posttrain.seq2seq import Seq2SeqTrainer, Seq2SeqTrainingArguments
from tests import tiny
from tests.contract.trainers import seq2seq_rows

transformers = pytest.importorskip("transformers")
ARGS = dict(
    learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
    per_device_train_batch_size=4, per_device_eval_batch_size=4, num_train_epochs=3, predict_with_generate=True,
    generation_max_length=16, train_sampling_strategy="sequential",
)  # fmt: skip


def marian():
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    size = {
        f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 2), ("attention_heads", 4))
    }
    size |= dict(
        d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=384, max_position_embeddings=64, dropout=0.0
    )
    return MarianMTModel(MarianConfig(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, init_std=0.2, **size))


MODELS = {"t5": tiny.seq2seq_lm, "marian": marian}


def both(tmp_path, model, **changes):
    """(log, metrics, predictions, labels) of transformers' trainer and of ours, before and after training."""
    found = []
    for trainer_class, arguments in (
        (transformers.Seq2SeqTrainer, transformers.Seq2SeqTrainingArguments),
        (Seq2SeqTrainer, Seq2SeqTrainingArguments),
    ):
        made, tokenizer = model(), tiny.tokenizer()
        trainer = trainer_class(
            made,
            arguments(str(tmp_path / trainer_class.__module__), **(ARGS | changes)),
            data_collator=transformers.DataCollatorForSeq2Seq(tokenizer, model=made),
            train_dataset=seq2seq_rows(18),
            eval_dataset=seq2seq_rows(11, seed=3),
            processing_class=tokenizer,
            compute_metrics=lambda evaluated: {"sum": float(evaluated.predictions.clip(min=0).sum())},
        )
        trainer.train()
        output = trainer.predict(seq2seq_rows(11, seed=3))
        losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
        found.append((losses, trainer.evaluate(), output))
    return found


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_losses_tokens_and_metrics(model, beams, tmp_path):
    theirs, ours = both(tmp_path, model, generation_num_beams=beams)
    assert len(ours[0]) == 15
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    assert ours[1]["eval_sum"] == theirs[1]["eval_sum"] == ours[2].metrics["test_sum"]
    expected, found = theirs[2].predictions, ours[2].predictions
    width = found.shape[1]  # theirs are as wide as the generation config says, or as the widest batch
    assert expected.shape[1] >= width
    fill = expected[:, width:]
    assert np.isin(fill, (0, -100)).all()
    assert found.tolist() == np.where(expected == -100, 0, expected)[:, :width].tolist()
    labels = theirs[2].label_ids[:, : ours[2].label_ids.shape[1]]
    assert (
        np.where(ours[2].label_ids == -100, 0, ours[2].label_ids).tolist()
        == np.where(labels == -100, 0, labels).tolist()
    )


def test_the_loss_of_equal_batches(tmp_path):
    """Theirs is the mean of batch means, so it is compared where there is one batch."""
    theirs, ours = both(tmp_path, tiny.seq2seq_lm, per_device_eval_batch_size=11)
    assert ours[1]["eval_loss"] == pytest.approx(theirs[1]["eval_loss"], rel=1e-5)


@pytest.mark.parametrize(
    "changes", [{"label_smoothing_factor": 0.1}, {"bf16": True}, {"lr_scheduler_type": "cosine"}], ids=str
)
def test_losses_under_other_arguments(changes, tmp_path):
    theirs, ours = both(tmp_path, tiny.seq2seq_lm, **changes)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5 if "bf16" not in changes else 5e-3)
