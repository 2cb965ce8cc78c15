"""Going on from a checkpoint that transformers' trainer wrote."""

import os

import pytest
import torch
import transformers

from posttrain.core import Trainer, TrainingArguments
from posttrain.core.errors import CheckpointError
from tests import tiny
from tests.contract.trainers import pad, weights

ARGS = dict(
    per_device_train_batch_size=3, gradient_accumulation_steps=2, max_steps=8, learning_rate=0.1, optim="sgd",
    lr_scheduler_type="linear", warmup_steps=2, logging_steps=1, save_steps=2, report_to="none", use_cpu=True,
    disable_tqdm=True, train_sampling_strategy="sequential",
)  # fmt: skip


def make(trainer_class, args_class, folder, **changes):
    args = args_class(output_dir=str(folder), **ARGS | changes)
    return trainer_class(tiny.causal_lm(), args, pad, tiny.token_rows(22))


def theirs(folder, **changes):
    return make(transformers.Trainer, transformers.TrainingArguments, folder, **changes)


def ours(folder, **changes):
    return make(Trainer, TrainingArguments, folder, **changes)


def losses(trainer):
    return {record["step"]: record["loss"] for record in trainer.state.log_history if "loss" in record}


# finding_D5
@pytest.mark.parametrize("step", [2, 6])  # inside the first epoch of four updates, and inside the second
def test_a_checkpoint_of_transformers_is_gone_on_from_where_it_stands(step, tmp_path, caplog):
    straight = theirs(tmp_path)
    straight.train()
    resumed = ours(tmp_path / "ours")
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert "written by another trainer" in caplog.text and f"The schedule continues at step {step}" in caplog.text
    assert resumed.state.global_step == 8 and resumed.state.epoch == pytest.approx(straight.state.epoch)
    assert losses(resumed) == pytest.approx(losses(straight), abs=2e-4)  # theirs are rounded
    for name, value in weights(straight).items():  # this optimizer has no state that could be lacking
        torch.testing.assert_close(resumed.model.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)


# finding_D5
def test_true_names_the_checkpoint_of_transformers_that_could_be_taken(tmp_path):
    theirs(tmp_path, max_steps=4).train()
    with pytest.raises(CheckpointError, match=r"2 of them are another trainer's.*checkpoint-4'"):
        ours(tmp_path).train(resume_from_checkpoint=True)
    assert ours(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4")).global_step == 8


# finding_D5
def test_weights_that_are_pickles_are_refused_in_another_trainers_checkpoint_too(tmp_path):
    theirs(tmp_path, max_steps=2).train()
    checkpoint = tmp_path / "checkpoint-2"
    torch.save(theirs(tmp_path).model.state_dict(), checkpoint / "pytorch_model.bin")
    os.unlink(checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match="model.safetensors"):
        ours(tmp_path).train(resume_from_checkpoint=str(checkpoint))
