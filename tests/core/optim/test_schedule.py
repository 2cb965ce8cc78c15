"""Schedules over tokens, and runs whose number of optimizer steps is unknown."""

import itertools
import json
import math

import pytest
import torch

from posttrain.core import Trainer, TrainerCallback, TrainingArguments
from posttrain.core.errors import ConfigError
from posttrain.core.optim import lr_scheduler
from tests import tiny
from tests.contract.trainers import pad


class Stream(torch.utils.data.IterableDataset):
    """Rows of other lengths, without a length of its own."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


class Rates(TrainerCallback):
    """The learning rate of each step, and the tokens read before it."""

    def __init__(self, stop_at=None):
        self.seen, self.stop_at = [], stop_at

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.seen.append((state.num_input_tokens_seen, optimizer.param_groups[0]["lr"]))

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.stop_at:
            control.should_training_stop = control.should_save = True


def make(folder, callback=None, rows=12, stream=True, **changes):
    usual = {
        "per_device_train_batch_size": 2, "learning_rate": 0.1, "optim": "adamw_torch", "save_strategy": "no",
        "report_to": "none", "use_cpu": True, "disable_tqdm": True, "logging_steps": 1,
    }  # fmt: skip
    data = tiny.token_rows(rows, seed=3)
    return Trainer(
        tiny.causal_lm(), TrainingArguments(str(folder), **(usual | changes)), data_collator=pad,
        train_dataset=Stream(data) if stream else data, eval_dataset=data[:2],
        callbacks=[Rates() if callback is None else callback],
    )  # fmt: skip


def test_the_rate_of_a_step_is_the_curve_at_the_tokens_before_it(tmp_path):
    rates = Rates()
    trainer = make(tmp_path, rates, max_duration="400tok", warmup_steps="100tok", lr_scheduler_type="cosine")
    trainer.train()
    curve = lr_scheduler.cosine(100, 400)
    assert [rate for _, rate in rates.seen] == pytest.approx([0.1 * curve(tokens) for tokens, _ in rates.seen])
    tokens = [tokens for tokens, _ in rates.seen]
    assert tokens[0] == 0 and len({b - a for a, b in itertools.pairwise(tokens)}) > 1  # ragged steps
    assert tokens[-1] < 400 <= trainer.state.num_input_tokens_seen
    assert trainer.state.known_steps is None and trainer.state.epoch >= 2  # the stream has 12 rows of about 10


def test_a_share_of_the_run_is_one_of_its_tokens_and_options_count_tokens(tmp_path):
    options = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": "0.1ktok"}}
    rates = Rates()
    make(tmp_path, rates, max_duration="300tok", warmup_steps=0.25, **options).train()
    # The curve beside transformers' own: up to 75 tokens, level to 200, down along half a cosine to 300.
    steps = [
        t / 75 if t < 75 else 1 if t < 200 else (1 + math.cos(math.pi * (t - 200) / 100)) / 2 for t, _ in rates.seen
    ]
    assert [rate for _, rate in rates.seen] == pytest.approx([0.1 * step for step in steps])


@pytest.mark.parametrize("stream", [True, False])
def test_a_run_by_tokens_resumes_bit_for_bit(stream, tmp_path):
    settings = {"max_duration": "500tok", "warmup_steps": "120tok", "stream": stream, "num_train_epochs": 10}
    whole = make(tmp_path / "whole", **settings)
    whole.train()
    stop = Rates(stop_at=7)
    make(tmp_path / "cut", stop, **settings).train()
    rest = Rates()
    resumed = make(tmp_path / "cut", rest, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == whole.state.global_step > 7
    assert resumed.state.num_input_tokens_seen == whole.state.num_input_tokens_seen
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert [r for r in whole.state.log_history if "loss" in r] == [r for r in resumed.state.log_history if "loss" in r]


def test_a_run_that_has_read_its_tokens_is_over(tmp_path, caplog):
    settings = {"max_duration": "200tok", "save_strategy": "steps", "save_steps": 100}
    first = make(tmp_path, **settings)
    first.train()
    again = make(tmp_path, **settings)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == first.state.global_step
    assert "the run ends with max_duration='200tok': nothing is left to train" in caplog.text


def test_a_stream_may_end_with_its_passes_where_the_curve_needs_no_end(tmp_path):
    trainer = make(
        tmp_path, max_duration="2ep", lr_scheduler_type="constant_with_warmup", warmup_steps="50tok",
        eval_strategy="steps", eval_steps=5, save_strategy="steps", save_steps=100,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 12 and trainer.state.epoch == 2.0
    assert (tmp_path / "checkpoint-12").is_dir()  # the last step shows when the stream is over
    assert [r["step"] for r in trainer.state.log_history if "eval_loss" in r] == [5, 10, 12]
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert not any("perf/time_left_seconds" in record for record in records)  # nobody knows
    assert {record["epoch"] for record in records} == {0.0, 1.0, 2.0}


def test_the_time_that_is_left_follows_the_tokens(tmp_path):
    make(tmp_path, max_duration="400tok").train()
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    left = [r["perf/time_left_seconds"] / r["perf/step_seconds"] for r in records if "perf/time_left_seconds" in r]
    assert left[0] > left[-2] > 0 and left[-1] == 0


def test_the_schedule_of_known_data_follows_tokens_too_and_epochs_may_end_it(tmp_path):
    rates = Rates()
    trainer = make(tmp_path, rates, stream=False, max_duration="1000tok", num_train_epochs=2)
    trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps == 12
    assert [rate for _, rate in rates.seen] == pytest.approx([0.1 * (1 - tokens / 1000) for tokens, _ in rates.seen])


def test_lengths_that_cannot_be_compared_are_refused():
    def refused(sentence, **changes):
        with pytest.raises(ConfigError, match=sentence):
            TrainingArguments("out", **changes)

    refused("warmup_steps=100 counts optimizer steps, but max_duration='1Mtok'", warmup_steps=100, max_duration="1Mtok")
    refused("warmup_steps='1Mtok' counts tokens, and lr_scheduler_type='linear' needs", warmup_steps="1Mtok")
    refused("warmup_steps='2ep' counts epochs", warmup_steps="2ep")
    refused("warmup_steps='1parsec' must be a number above 0 with a unit", warmup_steps="1parsec")
    wsd = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": "1Mtok"}}
    refused("lr_scheduler_kwargs: num_decay_steps counts tokens, and the schedule follows steps", **wsd)
    TrainingArguments("out", max_duration="5Mtok", **wsd)
    assert TrainingArguments("out", warmup_steps="20st").warmup_steps == 20
    with pytest.raises(ValueError, match="counts tokens, and a number of steps is needed"):
        TrainingArguments("out", max_duration="5Mtok", warmup_steps="1Mtok").get_warmup_steps(100)


def test_a_stream_without_an_end_is_refused_with_what_to_set(tmp_path):
    for changes in ({}, {"max_duration": "1ep"}, {"max_duration": "2h"}):
        with pytest.raises(ValueError, match=r"Set max_steps; or max_duration in tokens, such as '100Mtok'"):
            make(tmp_path, **changes)
    trainer = make(tmp_path, max_duration="1ktok", save_strategy="steps", save_steps=0.1)
    with pytest.raises(ValueError, match="save_steps=0.1 is a share of all optimizer steps, whose number is unknown"):
        trainer.train()


def test_a_schedule_over_steps_is_stepped_as_ever(tmp_path):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    args = TrainingArguments(str(tmp_path), warmup_steps=2, max_steps=10)
    by_steps = lr_scheduler.make(args, optimizer, 10)
    optimizer.step()
    lr_scheduler.step(by_steps, tokens=12345)
    assert not isinstance(by_steps, lr_scheduler.TokenLR) and by_steps.last_epoch == 1
