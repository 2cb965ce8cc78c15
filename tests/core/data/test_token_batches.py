"""Micro-batches made by the lengths of rows, of at most so many tokens or of equal cost: little padding, exact
gradients, in step on all processes, resumable.
"""

from __future__ import annotations

import copy
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers.trainer_pt_utils import BatchRebalanceSampler

from posttrain.cli.tools.memory_proposals import _smaller_batches
from posttrain.cli.tools.workload import rows_of
from posttrain.core import Trainer, TrainingArguments
from posttrain.core.data import pipeline
from posttrain.core.data.batch_samplers import BalancedBatchSampler, TokenBatchSampler
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


def cost(rows):
    longest = max(LENGTHS[row] for row in rows)
    return len(rows) * longest * (1000 + longest)


@pytest.mark.parametrize(("accumulation", "processes"), [(1, 1), (4, 1), (1, 4), (4, 4), (16, 1)])
def test_the_micro_batches_of_a_step_cost_about_as_much(accumulation, processes):
    parts, size = accumulation * processes, 16 * accumulation * processes
    sampler, theirs = (
        BalancedBatchSampler(LENGTHS, size, parts, seed=1),
        [list(BatchRebalanceSampler(LENGTHS, size, processes, accumulation, rank=rank)) for rank in range(processes)],
    )
    batches, steps = list(sampler), 1000 // size
    assert len(batches) == len(sampler) == steps * parts + (parts if 1000 % size else 0)
    assert Counter(row for rows in batches for row in rows) == Counter(range(1000))
    for step in range(steps):
        made = batches[step * parts : (step + 1) * parts]
        assert sum(map(len, made)) == size and min(map(len, made)) > 0
        assert sorted(map(cost, made), reverse=True) == list(map(cost, made))
    ours = np.mean([max(map(cost, batches[n * parts : (n + 1) * parts])) for n in range(steps)])
    other = [[rows for one in theirs for rows in one[n * accumulation : (n + 1) * accumulation]] for n in range(steps)]
    assert ours < 1.05 * np.mean([max(map(cost, made)) for made in other])
    if parts > 1:
        even = np.random.default_rng(1).permutation(1000)[: steps * size].reshape(steps, parts, 16)
        assert ours < 0.75 * np.mean([max(map(cost, made)) for made in even])


def test_no_step_is_short_of_rows_where_the_last_ones_are_dropped():
    sampler = BalancedBatchSampler(LENGTHS, 64, 8, seed=1, drop_last=True)
    batches = list(sampler)
    assert len(batches) == len(sampler) == 1000 // 64 * 8 and sum(map(len, batches)) == 1000 // 64 * 64


MADE = [TokenBatchSampler(LENGTHS, 4096, 1, 2), BalancedBatchSampler(LENGTHS, 48, 6, 1)]


@pytest.mark.parametrize("sampler", MADE, ids=["tokens", "balanced"])
def test_a_loader_goes_on_where_it_stood(sampler):
    def loader():
        return Loader(
            list(range(1000)), batch_sampler=copy.deepcopy(sampler), rank=1, world_size=2,
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


@pytest.mark.parametrize("way", ["max_batch_tokens", "batch_rebalance"])
@pytest.mark.parametrize("name", BUDGETS)
def test_the_gradients_are_those_of_any_other_split(name, way, tmp_path):
    results, split = [], {"max_batch_tokens": BUDGETS[name]}
    if way == "batch_rebalance":
        split = {"train_sampling_strategy": way, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 6}
    for changes in ({"per_device_train_batch_size": 22}, split):
        trainer = TRAINERS[name](tmp_path, **{"gradient_accumulation_steps": 99, "num_train_epochs": 1} | changes)
        trainer.train()
        assert trainer.state.global_step == 1
        batches = trainer.run.progress.batches or len(trainer.run.loader)
        results.append((weights(trainer), trainer.state.log_history[0]["loss"], batches))
    (expected, loss, _), (found, other, batches) = results
    assert batches > 3 and other == pytest.approx(loss, rel=1e-5)
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=1e-6, msg=key)


@pytest.mark.parametrize(
    "way",
    [{"max_batch_tokens": 40}, {"train_sampling_strategy": "batch_rebalance", "per_device_train_batch_size": 2}],
    ids=lambda way: "-".join(way),
)
def test_a_run_resumes_bit_for_bit_inside_an_epoch(tmp_path, way):
    def make(folder, **changes):
        return TRAINERS["causal-lm"](
            folder, gradient_accumulation_steps=2, save_strategy="steps", save_steps=2, **way | changes
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
        ({"train_sampling_strategy": "batch_rebalance"}, "each decides which rows"),
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
    with pytest.raises(ConfigError, match="auto_find_batch_size=True does not go with .*batch_rebalance"):
        TrainingArguments("out", train_sampling_strategy="batch_rebalance", auto_find_batch_size=True)
    with pytest.raises(ConfigError, match="batch_rebalance make micro-batches .* KTO compares"):
        KTOConfig("out", train_sampling_strategy="batch_rebalance")
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


@pytest.mark.parametrize("limit", ["limit_train_batches", "overfit_batches"])
def test_a_limit_does_not_cut_a_balanced_step_short(limit):
    """The first 3 of 4 micro-batches hold the long rows of the step: fewer than 3/4 of them."""
    balanced = dict(train_sampling_strategy="batch_rebalance", gradient_accumulation_steps=4)
    for number in (3, 6):
        with pytest.raises(ConfigError, match=f"{number} micro-batches of an epoch cut a step short.* multiple of 4"):
            TrainingArguments("out", **balanced, **{limit: number})
    assert vars(TrainingArguments("out", **balanced, **{limit: 8}))[limit] == 8
