"""Micro-batches of at most so many tokens: little padding, exact gradients, in step on all processes, resumable."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset

from posttrain.cli.tools.memory_plan import rows_of
from posttrain.cli.tools.memory_proposals import _smaller_batches
from posttrain.core import Trainer, TrainingArguments
from posttrain.core.data import pipeline
from posttrain.core.data.samplers import TokenBatchSampler
from posttrain.core.data.stateful_dataloader import Loader
from posttrain.core.errors import ConfigError, DataError
from posttrain.rl import DistillationConfig, GRPOConfig, KTOConfig
from posttrain.sft import SFTConfig
from posttrain.sft.cli import workload as sft_workload
from tests import tiny
from tests.contract.trainers import TRAINERS, arguments, pad, weights

RNG = np.random.default_rng(0)
LENGTHS = [int(n) for n in np.clip(RNG.lognormal(4, 0.8, 1000), 4, 1024)]


def padding(batches):
    """The share of padding in batches of rows of `LENGTHS`."""
    read = sum(len(rows) * max(LENGTHS[row] for row in rows) for rows in batches)
    return 1 - sum(LENGTHS) / read


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_row_comes_once_within_the_budget_and_with_little_padding(world_size):
    sampler = TokenBatchSampler(LENGTHS, 4096, seed=1, world_size=world_size)
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler) and len(batches) % world_size == 0
        assert Counter(row for rows in batches for row in rows) == Counter(range(1000))
        assert max(len(rows) * max(LENGTHS[row] for row in rows) for rows in batches) <= 4096
        assert max(LENGTHS) in [LENGTHS[row] for row in batches[0]]
        assert padding(batches) < 0.1
    shuffled = np.random.default_rng(1).permutation(1000)
    assert padding(np.split(shuffled, 1000 // 8)) > 0.55  # batches of 8 random rows


def test_processes_get_about_as_many_tokens_and_equally_many_batches():
    loaders = [
        Loader([{"n": n} for n in LENGTHS], batch_sampler=TokenBatchSampler(LENGTHS, 4096, 1, 4), rank=rank,
               world_size=4, collate_fn=lambda rows: {"n": torch.tensor([row["n"] for row in rows])})
        for rank in range(4)
    ]  # fmt: skip
    read = [[len(batch["n"]) * int(batch["n"].max()) for batch in loader] for loader in loaders]
    assert len({len(tokens) for tokens in read}) == 1 and loaders[0].rows_per_turn == 1000 / len(loaders[0])
    slowest = np.array(read).max(0).sum()
    assert np.array(read).sum() / (4 * slowest) > 0.95  # of the time, if it is that of the most tokens of a round
    dealt = np.random.default_rng(1).permutation(LENGTHS)[:992].reshape(-1, 4, 8).max(2) * 8
    assert dealt.sum() / (4 * dealt.max(1).sum()) < 0.75


def test_a_loader_goes_on_where_it_stood():
    def loader():
        return Loader(
            list(range(1000)), batch_sampler=TokenBatchSampler(LENGTHS, 4096, 1, 2), rank=1, world_size=2,
            collate_fn=lambda rows: {"rows": torch.tensor(rows)},
        )  # fmt: skip

    whole = loader()
    expected = [batch["rows"].tolist() for _ in range(2) for batch in whole]
    first = loader()
    batches = iter(first)
    begun = [next(batches)["rows"].tolist() for _ in range(5)]
    rest = loader()
    rest.load_state_dict(first.state_dict())
    assert begun + [batch["rows"].tolist() for _ in range(2) for batch in rest] == expected
    assert whole.rows_of(0, 3) == expected[3] and expected[: len(whole)] != expected[len(whole) :]


def test_fewer_rows_than_processes_are_filled_up():
    loaders = [
        Loader([5, 6], batch_sampler=TokenBatchSampler([5, 6], 12, 1, 4), rank=rank, world_size=4,
               collate_fn=lambda rows: {"rows": torch.tensor(rows)})
        for rank in range(4)
    ]  # fmt: skip
    batches = [list(loader) for loader in loaders]
    assert [len(b) for b in batches] == [1] * 4 and [type(b[0]).__name__ for b in batches].count("Filler") == 2


#: Budgets under which all rows of an epoch fall into several micro-batches of one optimizer step.
BUDGETS = {"causal-lm": 48, "sft": 64, "sft-mixture": 64, "seq2seq": 40, "dpo": 160, "dpo-padded": 160, "orpo": 160,
           "tpo": 240, "simpo": 160, "reward": 160}  # fmt: skip


@pytest.mark.parametrize("name", BUDGETS)
def test_the_gradients_are_those_of_any_other_split(name, tmp_path):
    results = []
    for split in ({"per_device_train_batch_size": 22}, {"max_batch_tokens": BUDGETS[name]}):
        trainer = TRAINERS[name](tmp_path, **split | {"gradient_accumulation_steps": 99, "num_train_epochs": 1})
        trainer.train()
        assert trainer.state.global_step == 1
        batches = trainer.run.progress.batches or len(trainer.run.loader)
        results.append((weights(trainer), trainer.state.log_history[0]["loss"], batches))
    (expected, loss, _), (found, other, batches) = results
    assert batches > 3 and other == pytest.approx(loss, rel=1e-5)
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=1e-6, msg=key)


def test_a_run_resumes_bit_for_bit_inside_an_epoch(tmp_path):
    def make(folder, **changes):
        return TRAINERS["causal-lm"](
            folder, max_batch_tokens=40, gradient_accumulation_steps=2, save_strategy="steps", save_steps=2, **changes
        )

    whole = make(tmp_path / "whole")
    whole.train()
    make(tmp_path / "cut").train()
    steps = whole.state.global_step
    resumed = make(tmp_path / "cut")
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
    assert resumed.state.global_step == steps > 5
    assert resumed.state.log_history[:-1] == whole.state.log_history[:-1]  # the last record has times
    assert all(torch.equal(value, weights(whole)[key]) for key, value in weights(resumed).items())


def test_another_budget_inside_an_epoch_is_told(tmp_path, caplog):
    options = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2}
    TRAINERS["causal-lm"](tmp_path, max_batch_tokens=40, **options).train()
    trainer = TRAINERS["causal-lm"](tmp_path, max_batch_tokens=60, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "max_batch_tokens: 40 -> 60" in caplog.text and "some are read twice and some not at all" in caplog.text


def test_what_it_does_not_go_with_is_refused(tmp_path):
    for changes, match in (
        ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy='sequential' does not go with"),
        ({"dataloader_drop_last": True}, "no micro-batch is short"),
        ({"auto_find_batch_size": True}, "no set number of rows"),
    ):
        with pytest.raises(ConfigError, match=match):
            TrainingArguments("out", max_batch_tokens=9, **changes)
    for config, match in (
        (KTOConfig, "KTO compares"),
        (GRPOConfig, "policy writes"),
        (DistillationConfig, "policy writes"),
    ):
        with pytest.raises(ConfigError, match=match):
            config("out", max_batch_tokens=9)
    with pytest.raises(ConfigError, match="packing=True fills"):
        SFTConfig("out", max_batch_tokens=9, packing=True)
    with pytest.raises(DataError, match=r"max_batch_tokens=10 is less than row \d+ has, 16 tokens"):
        TRAINERS["causal-lm"](tmp_path, max_batch_tokens=10).train()
    stream = Dataset.from_list(tiny.token_rows(4)).to_iterable_dataset()
    with pytest.raises(ConfigError, match="max_batch_tokens=99 has no effect on a stream"):
        args = arguments(TrainingArguments, tmp_path, max_batch_tokens=99, max_steps=1)
        Trainer(tiny.causal_lm(), args, data_collator=pad, train_dataset=stream)
    with pytest.raises(DataError, match="the training data is a stream"):
        pipeline.token_batches(stream, len, 99, 0, 1)


def test_the_plan_reads_the_budget():
    config = SFTConfig("out", max_batch_tokens=1000, max_length=300, gradient_accumulation_steps=3)
    run = SimpleNamespace(config=config)
    work = sft_workload(run, None)
    assert (work.rows, work.length) == (3, 300) and rows_of(config, 300, sides=2) == 2
    ((changes, _),) = _smaller_batches(run, work)
    assert changes == {"max_batch_tokens": 500, "gradient_accumulation_steps": 6}
