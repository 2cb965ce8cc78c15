"""Going on from a checkpoint that the trainers of transformers and TRL wrote, and their going on from ours."""

import os

import pytest
import torch
import transformers
from datasets import Dataset
from transformers import TrainerCallback

from posttrain.core import Trainer, TrainingArguments
from posttrain.core.errors import CheckpointError
from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny
from tests.contract.trainers import pad, weights

ARGS = dict(
    per_device_train_batch_size=3, gradient_accumulation_steps=2, max_steps=8, learning_rate=0.1, optim="sgd",
    lr_scheduler_type="linear", warmup_steps=2, logging_steps=1, save_steps=2, report_to="none", use_cpu=True,
    disable_tqdm=True, train_sampling_strategy="sequential",
)  # fmt: skip


def make(trainer_class, args_class, folder, **changes):
    args = args_class(output_dir=str(folder), **ARGS | changes)
    return trainer_class(tiny.causal_lm(), args, pad, tiny.token_rows(22), tiny.token_rows(6))


def theirs(folder, **changes):
    return make(transformers.Trainer, transformers.TrainingArguments, folder, **changes)


def ours(folder, **changes):
    return make(Trainer, TrainingArguments, folder, **changes)


def losses(trainer):
    return {record["step"]: record["loss"] for record in trainer.state.log_history if "loss" in record}


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


@pytest.mark.parametrize("step", [2, 4, 6])  # inside the first pass, between two, and inside the second
def test_a_stream_goes_on_where_a_checkpoint_of_transformers_stands(step, tmp_path, caplog):
    def streamed(make, folder):
        trainer = make(folder)
        trainer.train_dataset = Dataset.from_list(tiny.token_rows(22)).to_iterable_dataset()
        return trainer

    straight, resumed = streamed(theirs, tmp_path), streamed(ours, tmp_path / "ours")
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert f"rows of pass {step // 5} over the stream" in caplog.text  # the first has no more after step 4
    assert losses(resumed) == pytest.approx(losses(straight), abs=2e-4)
    for name, value in weights(straight).items():
        torch.testing.assert_close(resumed.model.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("saves", ["steps", "epoch"])
def test_the_end_of_an_epoch_follows_a_checkpoint_of_its_last_step(saves, tmp_path):
    changes = {"save_strategy": saves, "save_steps": 4, "eval_strategy": "epoch"}
    straight, resumed = theirs(tmp_path, **changes), ours(tmp_path / "ours", **changes)
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    steps = [[one["step"] for one in run.state.log_history if "eval_loss" in one] for run in (straight, resumed)]
    assert steps == [[4, 8], [4, 8]]
    assert losses(resumed) == pytest.approx(losses(straight), abs=2e-4)


class EndsEpochs(TrainerCallback):
    """Leaves each epoch after two steps."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step % 2 == 0


def test_an_epoch_that_a_callback_had_ended_is_not_gone_on_with(tmp_path):
    straight, resumed = theirs(tmp_path), ours(tmp_path / "ours")
    for trainer in (straight, resumed):
        trainer.add_callback(EndsEpochs())
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == straight.state.global_step == 4  # two epochs of two steps
    assert losses(resumed) == pytest.approx(losses(straight), abs=2e-4)


def test_true_names_the_checkpoint_of_transformers_that_could_be_taken(tmp_path):
    theirs(tmp_path, max_steps=4).train()
    with pytest.raises(CheckpointError, match=r"2 of them are another trainer's.*checkpoint-4'"):
        ours(tmp_path).train(resume_from_checkpoint=True)
    assert ours(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4")).global_step == 8


def test_weights_that_are_pickles_are_refused_in_another_trainers_checkpoint_too(tmp_path):
    theirs(tmp_path, max_steps=2).train()
    checkpoint = tmp_path / "checkpoint-2"
    torch.save(theirs(tmp_path).model.state_dict(), checkpoint / "pytorch_model.bin")
    os.unlink(checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match="model.safetensors"):
        ours(tmp_path).train(resume_from_checkpoint=str(checkpoint))


ADAMW = dict(
    optim="adamw_torch", max_steps=-1, num_train_epochs=3, learning_rate=1e-2, weight_decay=0.1,
    lr_scheduler_type="cosine", train_sampling_strategy="random",
)  # fmt: skip


def log(trainer, name):
    return [record[name] for record in trainer.state.log_history if name in record]


def assert_same_run(resumed, straight):
    assert log(resumed, "loss") == pytest.approx(log(straight, "loss"), abs=1e-5)
    assert log(resumed, "learning_rate") == pytest.approx(log(straight, "learning_rate"), abs=1e-12)
    assert resumed.state.epoch == pytest.approx(straight.state.epoch)
    for name, value in weights(straight).items():
        torch.testing.assert_close(resumed.model.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("step", [2, 4, 6])  # inside the first epoch of four updates, at its end, inside the second
def test_optimizer_schedule_and_shuffled_rows_continue_as_in_the_uninterrupted_run(step, tmp_path, caplog):
    straight = theirs(tmp_path, **ADAMW)
    straight.train()
    resumed = ours(tmp_path / "ours", **ADAMW)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert_same_run(resumed, straight)
    said = [record.getMessage() for record in caplog.records if "written by another trainer" in record.getMessage()]
    assert len(said) == 1 and "Taken from it: weights, log, step, optimizer, schedule, random numbers." in said[0]
    assert "Not taken: the arguments (training_args.bin is a pickle" in said[0]
    assert f"batch {step % 4 * 2} of epoch {step // 4}, in the order of transformers' Trainer" in said[0]


def test_dropout_goes_on_with_the_random_numbers_of_transformers(tmp_path):
    changes = ADAMW | {"num_train_epochs": 1}
    runs = {}
    for name, make_one in (("straight", theirs), ("resumed", ours)):
        runs[name] = make_one(tmp_path / name, **changes)
        runs[name].model.config.attention_dropout = 0.3
        for layer in runs[name].model.model.layers:
            layer.self_attn.attention_dropout = 0.3
    runs["straight"].train()
    runs["resumed"].train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))
    assert_same_run(runs["resumed"], runs["straight"])


def test_steps_of_another_size_continue_with_the_row_at_which_the_checkpoint_stands(tmp_path, caplog):
    theirs(tmp_path, **ADAMW).train()
    resumed = ours(tmp_path / "ours", **ADAMW | {"gradient_accumulation_steps": 1})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))  # 4 of 8 batches into the second epoch
    assert "stands at epoch 1.5 after 6 steps" in caplog.text
    assert resumed.state.global_step == 6 + 4 + 8 and resumed.state.epoch == 3


@pytest.fixture(scope="module")
def folder_of_theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theirs")
    theirs(folder, **ADAMW | {"save_steps": 1, "num_train_epochs": 2}).train()  # 22 rows: 6, 6, 6, 4
    return folder


@pytest.mark.parametrize(("size", "accumulation", "step"), [(2, 2, 1), (4, 1, 3), (5, 3, 4), (6, 1, 7), (4, 2, 5)])
def test_every_row_is_read_once_an_epoch_after_a_checkpoint_of_steps_of_another_size(
    size, accumulation, step, tmp_path, folder_of_theirs
):
    read, folder = [], folder_of_theirs
    resumed = ours(
        tmp_path, **ADAMW | {"num_train_epochs": 2, "save_strategy": "no"}, per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    resumed.data_collator = lambda rows: read.extend(tuple(row["input_ids"]) for row in rows) or pad(rows)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    epoch, steps = divmod(step, 4)
    rest = 22 - 6 * steps
    assert len(read) == rest + (22 if epoch == 0 else 0) and len({*read[:rest]}) == rest
    assert resumed.state.epoch == 2 and resumed.state.global_step == resumed.state.max_steps


def test_a_learning_rate_that_was_changed_is_said_and_used(tmp_path, caplog):
    theirs(tmp_path, **ADAMW).train()
    resumed = ours(tmp_path / "ours", **ADAMW | {"learning_rate": 5e-3})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert "learning_rate: 0.01 -> 0.005" in caplog.text
    straight = ours(tmp_path / "straight", **ADAMW | {"learning_rate": 5e-3})
    straight.train()
    assert log(resumed, "learning_rate")[6:] == pytest.approx(log(straight, "learning_rate")[6:])


def sft(trainer_class, config_class, folder, **changes):
    from datasets import Dataset

    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    args = ADAMW | {"num_train_epochs": 2, "save_steps": 4, "eos_token": "<|endoftext|>", "bf16": False}
    for name in ("disable_tqdm", "use_cpu", "report_to", "logging_steps", "warmup_steps"):
        args[name] = ARGS[name]
    rows = Dataset.from_list([{"text": text[: 20 + 7 * n]} for n, text in enumerate(tiny.CORPUS * 3)])
    return trainer_class(
        tiny.causal_lm(), config_class(output_dir=str(folder), per_device_train_batch_size=3, **args | changes),
        train_dataset=rows, processing_class=tiny.tokenizer(),
        peft_config=peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0),
    )  # fmt: skip


def test_adapters_that_trl_trains_go_on_here(tmp_path, caplog):
    trl = pytest.importorskip("trl")
    straight = sft(trl.SFTTrainer, trl.SFTConfig, tmp_path)
    straight.train()
    resumed = sft(SFTTrainer, SFTConfig, tmp_path / "ours", save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert "Taken from it: weights, log, step, optimizer, schedule, random numbers." in caplog.text
    assert_same_run(resumed, straight)


def test_transformers_goes_on_from_a_checkpoint_of_ours(tmp_path):
    mine = ours(tmp_path)
    mine.train()
    resumed = theirs(tmp_path / "theirs", max_steps=6, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert resumed.state.global_step == 6
    assert log(resumed, "loss")[:4] == pytest.approx(log(mine, "loss")[:4], abs=1e-6)
    # The weights are those of step 4; its schedule is not there, and starts again with a warm-up from 0.
    assert log(resumed, "loss")[4] == pytest.approx(log(mine, "loss")[4], abs=1e-4)
    assert log(resumed, "learning_rate")[4] == 0
