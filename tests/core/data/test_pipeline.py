"""Loaders: each row once, in an order that repeats, from any position, on any number of processes."""

from __future__ import annotations

import logging
import os
import random

import datasets
import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from posttrain.core import Trainer, TrainingArguments
from posttrain.core.config import validate
from posttrain.core.data import pipeline, samplers
from posttrain.core.data.pipeline import DataArguments, Loader, adopt
from posttrain.core.data.samplers import EpochSampler, LengthGroupedSampler
from posttrain.core.errors import DataError
from tests import tiny


class NoisyRows(torch.utils.data.Dataset):
    """Rows that differ each time they are read, and a count of how often that was."""

    def __init__(self, num_rows):
        self.num_rows, self.reads = num_rows, 0

    def __len__(self):
        return self.num_rows

    def __getitem__(self, index):
        self.reads += 1
        return {"x": index, "noise": [random.random(), np.random.rand(), torch.rand(()).item()]}


class NoisyStream(IterableDataset):
    """A stream that shuffles as it goes, with the global random numbers, and adds noise."""

    def __init__(self, num_rows):
        self.num_rows, self.epochs = num_rows, []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        rows = list(range(self.num_rows))
        random.shuffle(rows)
        for row in rows:
            yield {"x": row, "noise": [random.random(), np.random.rand(), torch.rand(()).item()]}


class SplitStream(IterableDataset):
    """A stream of which every worker reads a part, parts of unequal length."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        yield from (x for x in range(23) if (x % 5) % workers == worker)


def plain(rows):
    return [row["x"] if isinstance(row, dict) else row for row in rows]


def noisy(rows):
    return {"rows": rows, "drawn": [random.random(), np.random.rand(), torch.rand(()).item()]}


def stack(rows):
    return {"x": torch.tensor(plain(rows))}


def rows_of(batches):
    return [x for batch in batches if not pipeline.is_filler(batch) for x in batch["x"].tolist()]


def global_random_numbers():
    python, numpy = random.getstate(), np.random.get_state()[1].tolist()
    return python, numpy, torch.get_rng_state().tolist()


# ---------------------------------------------------------------------------------------------------- order


def test_order_is_a_permutation_that_depends_on_seed_plus_epoch_alone():
    loader = Loader(range(10), batch_size=3, collate_fn=plain, sampler=EpochSampler(10, seed=42))
    first, second = list(loader), list(loader)
    assert sum(first, []) == torch.randperm(10, generator=torch.Generator().manual_seed(42)).tolist()
    assert sum(second, []) == torch.randperm(10, generator=torch.Generator().manual_seed(43)).tolist()
    assert [len(batch) for batch in first] == [3, 3, 3, 1]
    loader.set_epoch(0)
    assert list(loader) == first


def test_a_torch_random_sampler_is_seeded_and_keeps_its_options():
    sampler = RandomSampler(range(6), replacement=True, num_samples=9)
    loader = Loader(range(6), batch_size=4, collate_fn=plain, sampler=sampler, seed=7)
    expected = list(RandomSampler(range(6), True, 9, generator=torch.Generator().manual_seed(7)))
    assert sum(loader, []) == expected
    assert len(loader) == 3


def test_leaving_an_epoch_early_and_starting_again_repeats_it_while_set_epoch_moves_on():
    loader = Loader(range(8), batch_size=2, collate_fn=plain, sampler=EpochSampler(8, 0))
    whole = list(loader)
    loader.set_epoch(0)
    assert next(iter(loader)) == whole[0]
    assert list(loader) == whole
    assert list(loader) != whole


def test_a_look_at_the_first_batch_does_not_move_a_run_that_is_under_way():
    loader = Loader(range(8), batch_size=2, collate_fn=plain)
    batches = iter(loader)
    next(batches), next(batches)
    assert next(iter(loader)) == [0, 1]
    assert next(batches) == [4, 5] and loader.state_dict()["given"] == [6]


def test_reading_leaves_the_global_random_numbers_alone():
    sets = [
        Loader(range(20), batch_size=4, collate_fn=plain, sampler=EpochSampler(20, 0)),
        Loader(range(20), batch_size=4, collate_fn=plain, sampler=WeightedRandomSampler([1.0] * 20, 20)),
        Loader(NoisyStream(20), batch_size=4, collate_fn=plain),
        Loader(NoisyRows(20), batch_size=4, collate_fn=plain, num_workers=2),
    ]
    before = global_random_numbers()
    for loader in sets:
        assert len(list(loader)) == 5
    assert global_random_numbers() == before


def test_without_workers_rows_are_read_one_batch_at_a_time_from_the_global_random_numbers():
    dataset = NoisyRows(9)
    batches = iter(Loader(dataset, batch_size=3, collate_fn=noisy))
    assert dataset.reads == 0
    torch.manual_seed(5)
    batch = next(batches)
    torch.manual_seed(5)
    assert [row["noise"][2] for row in batch["rows"]] == [torch.rand(()).item() for _ in range(3)]
    assert dataset.reads == 3


def test_group_by_length_puts_like_beside_like_and_the_longest_first():
    lengths = torch.randint(1, 100, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    sampler = LengthGroupedSampler(lengths, batch_size=4, seed=1)
    order = list(sampler)
    assert sorted(order) == list(range(400))
    assert lengths[order[0]] == max(lengths)

    def padded(order):
        return sum(4 * max(lengths[i] for i in order[k : k + 4]) for k in range(0, 400, 4))

    assert padded(order) < 1.15 * sum(lengths) < padded(list(EpochSampler(400, 1)))
    sampler.set_epoch(1)
    assert list(sampler) != order
    sampler.set_epoch(0)
    assert list(sampler) == order


def test_lengths_come_from_the_column_or_the_input_and_their_absence_is_explained():
    rows = [{"input_ids": [1] * n, "n": 10 - n} for n in (3, 1, 2)]
    columns = datasets.Dataset.from_list(rows)
    for dataset in (rows, columns):
        assert samplers.row_lengths(dataset) == [3, 1, 2]
        assert samplers.row_lengths(dataset, length_column_name="n") == [7, 9, 8]
    grouped = pipeline.make_train_sampler(rows, "group_by_length", seed=0, size=(1, 2, 1))
    assert isinstance(grouped, LengthGroupedSampler) and grouped.lengths.tolist() == [3, 1, 2]
    with pytest.raises(DataError, match="neither 'length' nor 'input_ids'.*length_column_name"):
        samplers.row_lengths([{"text": "a"}])


def test_sequential_and_stream_need_no_order():
    assert list(pipeline.make_train_sampler(range(4), strategy="sequential", seed=0)) == [0, 1, 2, 3]
    assert pipeline.make_train_sampler(NoisyStream(4), strategy="random", seed=0) is None
    assert not pipeline.is_stream([1]) and not pipeline.is_stream(datasets.Dataset.from_dict({"x": [1]}))
    assert pipeline.is_stream(datasets.Dataset.from_dict({"x": [1]}).to_iterable_dataset())
    assert pipeline.is_stream(iter([1]))


# ---------------------------------------------------------------------------------------------------- processes


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [12, 13, 14, 17, 23])
@pytest.mark.parametrize("kind", ["rows", "stream", "datasets stream"])
def test_processes_see_each_row_once_in_equally_many_batches(kind, num_rows, world_size):
    columns = datasets.Dataset.from_dict({"x": list(range(num_rows))})
    dataset = {"rows": columns, "stream": NoisyStream(num_rows), "datasets stream": columns.to_iterable_dataset()}[kind]
    ranks = [
        list(tiny.build_loader(dataset, False, DataArguments(), stack, rank=r, world_size=world_size))
        for r in range(world_size)
    ]
    assert {len(batches) for batches in ranks} == {-(-num_rows // (2 * world_size))}
    in_rank_order = [batch for step in zip(*ranks, strict=True) for batch in step]
    seen = rows_of(in_rank_order)
    if kind == "stream":
        seen = sorted(seen)
    assert seen == list(range(num_rows))  # no row twice, none missing, and in the order of the dataset
    fillers = [batch for batch in in_rank_order if pipeline.is_filler(batch)]
    last_rows = (num_rows - 1) % (2 * world_size) + 1
    assert len(fillers) == max(world_size - last_rows, 0)
    assert all(len(batch["x"]) == 1 for batch in fillers)


def test_a_short_last_group_is_dealt_evenly():
    assert [samplers.deal([1, 2, 3, 4, 5], rank, 3, 4) for rank in range(3)] == [
        ([1, 2], False),
        ([3, 4], False),
        ([5], False),
    ]
    assert [samplers.deal([1], rank, 2, 4) for rank in range(2)] == [([1], False), ([1], True)]


@pytest.mark.parametrize("dataset", [range(13), NoisyStream(13)], ids=["rows", "stream"])
def test_drop_last_leaves_out_the_last_group(dataset):
    ranks = [Loader(dataset, batch_size=2, collate_fn=plain, rank=r, world_size=3, drop_last=True) for r in range(3)]
    assert [len(list(loader)) for loader in ranks] == [2, 2, 2]
    if dataset == range(13):
        assert [len(loader) for loader in ranks] == [2, 2, 2]


def test_training_order_of_two_processes_is_that_of_one_with_twice_the_batch():
    def loader(**place):
        return Loader(range(16), collate_fn=plain, sampler=EpochSampler(16, 3), **place)

    one = list(loader(batch_size=4))
    two = [list(loader(batch_size=2, rank=rank, world_size=2)) for rank in range(2)]
    assert one == [a + b for a, b in zip(*two, strict=True)]


def test_fillers_stay_marked_on_the_way_to_the_device_and_through_workers():
    def loader(collate, workers):
        return Loader(
            [{"x": 0}, {"x": 1}, {"x": 2}], batch_size=1, collate_fn=collate, rank=1, world_size=2, num_workers=workers
        )

    for workers in (0, 1):
        real, filler = (pipeline.to_device(batch, "cpu") for batch in loader(stack, workers))
        assert not pipeline.is_filler(real) and pipeline.is_filler(filler)
        assert filler.x.tolist() == [2] and isinstance(filler, dict)
        assert pipeline.is_filler(filler.to("cpu"))
    assert [pipeline.is_filler(batch) for batch in loader(list, 0)] == [False, True]
    with pytest.raises(DataError, match="type Tensor cannot be marked.*dataloader_drop_last"):
        list(loader(lambda rows: torch.zeros(1), 0))


def test_a_distributed_sampler_is_not_split_again():
    ranks = [
        Loader(range(8), batch_size=2, collate_fn=plain, rank=r, world_size=2,
        sampler=DistributedSampler(range(8), 2, r, shuffle=False))
        for r in range(2)
    ]  # fmt: skip
    assert [sum(loader, []) for loader in ranks] == [[0, 2, 4, 6], [1, 3, 5, 7]]


# ---------------------------------------------------------------------------------------------------- resuming


def shuffled_columns_stream():
    return (
        datasets.Dataset.from_dict({"x": list(range(23))})
        .to_iterable_dataset(num_shards=3)
        .shuffle(seed=1, buffer_size=5)
    )


def columns_stream():
    return (
        datasets.Dataset.from_dict({"x": list(range(23))})
        .to_iterable_dataset(num_shards=3)
        .map(lambda row: {"y": row["x"]})
    )


KINDS = {
    "rows": lambda: NoisyRows(23),
    "stream": lambda: NoisyStream(23),
    "split stream": SplitStream,
    "datasets rows": lambda: datasets.Dataset.from_dict({"x": list(range(23))}).with_format("torch"),
    "datasets stream": columns_stream,
    "shuffled datasets stream": shuffled_columns_stream,
}


def make_loader(kind, workers, **options):
    dataset = KINDS[kind]()
    sampler = None if pipeline.is_stream(dataset) else EpochSampler(len(dataset), 9)
    return Loader(dataset, batch_size=2, collate_fn=noisy, sampler=sampler, seed=3, num_workers=workers, **options)


def rng():
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_position_goes_on_bit_for_bit(kind, workers):
    """As the trainer does it: the global random numbers are saved with the position, and restored after ``iter``."""
    straight = make_loader(kind, workers)
    straight.set_epoch(1)
    batches, saved, given = iter(straight), [], []
    while True:
        saved.append((straight.state_dict(), rng()))
        batch = next(batches, None)
        if batch is None:
            break
        given.append(batch)
    following = next(iter(straight))
    assert len(saved) == 13 or workers
    for position in (0, 1, 5, 6, 11, 12) if workers == 0 else (5, 12):
        state, (python, numpy, pytorch) = saved[position]
        pipeline.set_seed(1000 + position)  # a new process finds other random numbers
        resumed = make_loader(kind, workers)
        resumed.load_state_dict(state)
        batches = iter(resumed)
        assert resumed.state_dict() == state  # a save straight after resuming loses nothing
        random.setstate(python), np.random.set_state(numpy), torch.set_rng_state(pytorch)
        assert str(list(batches)) == str(given[position:])
    assert plain(next(iter(resumed))["rows"]) == plain(following["rows"])  # the next epoch starts at its beginning


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["rows", "stream", "split stream", "shuffled datasets stream"])
def test_skip_gives_the_tail_of_the_epoch(kind, workers):
    whole = [plain(batch["rows"]) for batch in make_loader(kind, workers)]
    for num_batches in (0, 3, 10) if workers == 0 else (7,):
        loader = make_loader(kind, workers)
        loader.skip(num_batches)
        assert [plain(batch["rows"]) for batch in loader] == whole[num_batches:]


@pytest.mark.parametrize("workers", [0, 2])
def test_seeking_rows_by_index_reads_none_of_those_before(workers):
    dataset = NoisyRows(1000)
    loader = Loader(dataset, batch_size=2, collate_fn=plain, sampler=EpochSampler(1000, 0), num_workers=workers)
    loader.skip(498)
    assert len(list(loader)) == 2
    assert dataset.reads == (4 if workers == 0 else 0)


def test_a_stream_that_knows_its_position_is_not_read_again(caplog):
    reads = []

    def loader():
        stream = datasets.IterableDataset.from_generator(lambda: ({"x": reads.append(x) or x} for x in range(20)))
        return Loader(stream, batch_size=2, collate_fn=plain)

    first = loader()
    batches = iter(first)
    given = [next(batches) for _ in range(4)]
    state = first.state_dict()
    resumed = loader()
    with caplog.at_level(logging.WARNING):
        resumed.load_state_dict(state)
        batches = iter(resumed)
        assert resumed.state_dict()["dataset"] == state["dataset"]
        assert sum(given + list(batches), []) == list(range(20))
    assert caplog.text == ""
    resumed.set_epoch(0)
    assert sum(resumed, []) == list(range(20))  # the position that was loaded is used once


def test_replaying_a_stream_is_announced_once_with_its_cost(caplog):
    class Once(IterableDataset):
        def __init__(self):
            self.rows = iter(range(20))

        def __iter__(self):
            return self.rows

    for dataset, message in (
        (NoisyStream(20), "reads its first 6 rows again"),
        (Once(), "resuming may not reproduce its order"),
    ):
        caplog.clear()
        loader = Loader(dataset, batch_size=3, collate_fn=plain)
        loader.load_state_dict({"epoch": 0, "given": [6], "turn": 0, "to_drop": 0})
        list(loader), list(loader)
        assert [message in record.message for record in caplog.records] == [True]


def test_a_position_holds_for_another_number_of_processes():
    def loader(rank, world_size):
        return Loader(
            range(25), batch_size=2, collate_fn=stack, sampler=EpochSampler(25, 4), rank=rank, world_size=world_size
        )

    before = loader(0, 1)
    batches = iter(before)
    seen = rows_of([next(batches) for _ in range(5)])
    after = [loader(rank, 2) for rank in range(2)]
    for part in after:
        part.load_state_dict(before.state_dict())
    rest = [list(part) for part in after]
    assert len(rest[0]) == len(rest[1])
    assert sorted(seen + rows_of(rest[0] + rest[1])) == list(range(25))


def test_workers_draw_by_position_and_not_by_worker():
    def batches(workers):
        return str(list(Loader(NoisyRows(12), batch_size=2, collate_fn=noisy, num_workers=workers, seed=1)))

    assert batches(1) == batches(2)


def test_ranks_and_epochs_draw_differently_in_workers():
    def drawn(rank, epoch):
        loader = Loader(NoisyRows(4), batch_size=2, collate_fn=noisy, num_workers=1, rank=rank, world_size=2)
        loader.set_epoch(epoch)
        return tuple(next(iter(loader))["drawn"])

    assert len({drawn(rank, epoch) for rank in range(2) for epoch in range(2)}) == 4


@pytest.mark.parametrize("kind", ["rows", "stream"])
def test_persistent_workers_follow_epochs_and_skips(kind):
    lasting = make_loader(kind, 2, persistent_workers=True)
    for epoch, skipped in ((0, 0), (2, 3), (1, 0), (1, 5)):
        fresh = make_loader(kind, 2)
        for loader in (lasting, fresh):
            loader.set_epoch(epoch)
            loader.skip(skipped)
        assert str(list(lasting)) == str(list(fresh))
    assert lasting.persistent_workers


@pytest.mark.parametrize("evaluating", [False, True])
def test_datasets_hear_of_the_epoch_in_training_alone(evaluating):
    dataset = NoisyStream(12)
    loader = tiny.build_loader(dataset, not evaluating, DataArguments(), plain)
    passes = [list(loader), list(loader)]
    assert dataset.epochs == ([] if evaluating else [0, 1])
    assert (passes[0] == passes[1]) is evaluating


# ---------------------------------------------------------------------------------------------------- what users bring


class EveryOther(torch.utils.data.Sampler):
    def __init__(self, num_rows):
        self.num_rows = num_rows

    def __len__(self):
        return self.num_rows // 2

    def __iter__(self):
        return iter(range(0, self.num_rows, 2))


class Endless(torch.utils.data.Sampler):
    def __iter__(self):
        row = 0
        while True:
            yield row % 5
            row += 1


def test_any_sampler_will_do_and_is_skipped_without_reading_rows():
    dataset = NoisyRows(20)
    loader = Loader(dataset, batch_size=3, collate_fn=plain, sampler=EveryOther(20))
    loader.skip(2)
    assert list(loader) == [[12, 14, 16], [18]] and dataset.reads == 4 and len(loader) == 4
    loader = Loader(range(5), batch_size=3, collate_fn=plain, sampler=Endless())
    loader.skip(4)
    assert next(iter(loader)) == [2, 3, 4]
    assert not pipeline.has_length(loader)


@pytest.mark.parametrize("own_generator", [False, True])
def test_a_random_sampler_of_somebody_else_resumes_exactly(own_generator):
    def loader():
        generator = torch.Generator().manual_seed(11) if own_generator else None
        sampler = WeightedRandomSampler([1.0, 2.0, 3.0] * 5, 15, generator=generator)
        return Loader(range(15), batch_size=2, collate_fn=plain, sampler=sampler, seed=5)

    straight = loader()
    epochs = [list(straight)]
    boundary = straight.state_dict()
    batches = iter(straight)
    epochs.append([next(batches) for _ in range(3)])
    state = straight.state_dict()
    rest = list(batches)
    assert epochs[0][:3] != epochs[1]
    for saved, expected in ((boundary, epochs[1] + rest), (state, rest)):
        torch.manual_seed(1234)
        resumed = loader()
        resumed.load_state_dict(saved)
        assert list(resumed) == expected
    if own_generator:
        expected = list(WeightedRandomSampler([1.0, 2.0, 3.0] * 5, 15, generator=torch.Generator().manual_seed(11)))
        assert sum(epochs[0], []) == expected


def test_a_plain_dataloader_is_adopted_with_everything_a_loader_does():
    given = DataLoader(range(13), batch_size=2, shuffle=True, collate_fn=plain)
    ranks = [adopt(given, rank=rank, world_size=2, seed=6) for rank in range(2)]
    first = [list(loader) for loader in ranks]
    assert (
        sum(first[0][0:1] + first[1][0:1], [])
        == torch.randperm(13, generator=torch.Generator().manual_seed(6)).tolist()[:4]
    )
    assert len(ranks[0]) == len(first[0]) == len(first[1]) == 4
    ranks[0].set_epoch(0)
    ranks[0].skip(2)
    assert list(ranks[0]) == first[0][2:]
    assert ranks[0].dataset is given.dataset and ranks[0].batch_size == 2 and ranks[0].total_batch_size == 4
    assert adopt(ranks[0], rank=0, world_size=2, seed=0) is ranks[0]


def test_a_batch_sampler_is_dealt_batch_by_batch():
    class Sizes(BatchSampler):
        def __iter__(self):
            return iter([[0], [1, 2], [3, 4, 5], [6], [7, 8]])

        def __len__(self):
            return 5

    given = DataLoader(range(9), batch_sampler=Sizes(None, 1, False), collate_fn=list)
    ranks = [adopt(given, rank=rank, world_size=2, seed=0) for rank in range(2)]
    assert list(ranks[0]) == [[0], [3, 4, 5], [7, 8]]
    assert list(ranks[1]) == [[1, 2], [6], [8]] and len(ranks[1]) == 3
    assert [pipeline.is_filler(batch) for batch in ranks[1]] == [False, False, True]
    ranks[0].set_epoch(0)
    ranks[0].skip(1)
    assert list(ranks[0]) == [[3, 4, 5], [7, 8]]


def test_loaders_of_any_other_kind_are_read_batch_by_batch():
    batches = [{"x": torch.tensor([i])} for i in range(5)]
    one = adopt(batches, rank=0, world_size=1, seed=0)
    assert rows_of(one) == [0, 1, 2, 3, 4] and len(one) == 5
    one.skip(3)
    assert rows_of(one) == [3, 4]
    two = adopt(batches, rank=1, world_size=2, seed=0)
    assert [(batch["x"].item(), pipeline.is_filler(batch)) for batch in two] == [(1, False), (3, False), (4, True)]

    class Doubling(DataLoader):
        def __iter__(self):
            return ([x, x] for batch in super().__iter__() for x in batch)

    given = Doubling(range(3), batch_size=3, collate_fn=list)
    assert list(adopt(given, rank=0, world_size=1, seed=0)) == [[0, 0], [1, 1], [2, 2]]
    assert adopt(given, rank=0, world_size=1, seed=0).dataset is given.dataset


class RotatedBatches(BatchSampler):
    """Pairs of rows in an order that the epoch decides, as a batch sampler without an inner sampler draws them."""

    def __init__(self):
        super().__init__(range(8), batch_size=2, drop_last=False)
        del self.sampler
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        starts = [2 * ((number + self.epoch) % 4) for number in range(4)]
        return iter([[start, start + 1] for start in starts])

    def __len__(self):
        return 4


def test_a_batch_sampler_that_accelerate_has_shared_out_is_told_the_epoch():
    def batches(rank, epoch):
        loader = DataLoader(range(8), batch_sampler=RotatedBatches())
        mine = prepare_data_loader(loader, torch.device("cpu"), 2, rank, put_on_device=False)
        adopted = adopt(mine, rank=rank, world_size=2, seed=0)
        adopted.set_epoch(epoch)
        return [batch.tolist() for batch in adopted]

    assert [batches(0, 0), batches(1, 0)] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert [batches(0, 1), batches(1, 1)] == [[[2, 3], [6, 7]], [[4, 5], [0, 1]]]


def test_a_streaming_dataloader_is_adopted():
    given = DataLoader(SplitStream(), batch_size=4, collate_fn=plain)
    assert sum(adopt(given, rank=0, world_size=1, seed=0), []) == list(range(23))
    ready = DataLoader(SplitStream(), batch_size=None, collate_fn=lambda x: {"x": torch.tensor([x])})
    assert rows_of(adopt(ready, rank=1, world_size=2, seed=0)) == list(range(1, 23, 2))


def test_a_loader_prepared_by_accelerate_is_adopted_as_it_is():
    accelerate = pytest.importorskip("accelerate")
    prepared = accelerate.data_loader.prepare_data_loader(
        DataLoader(range(7), batch_size=2, collate_fn=plain), num_processes=1
    )
    loader = adopt(prepared, rank=0, world_size=1, seed=0)
    assert sum(loader, []) == list(range(7)) and len(loader) == 4


def test_what_a_loader_gives_first_is_looked_at_without_taking_it():
    class ByPass(EveryOther):
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter(range(self.passes, self.num_rows, 2))

    given = DataLoader(range(9), batch_size=2, sampler=ByPass(9))
    assert pipeline.first_read(given, 0) == pipeline.first_read(given, 0) == "[1, 3]"
    assert next(iter(given)).tolist() == [1, 3]
    stream = datasets.Dataset.from_dict({"x": [3, 4, 5]}).to_iterable_dataset()
    given, place, drawn = DataLoader(stream, batch_size=2), stream.state_dict(), random.getstate()
    assert pipeline.first_read(given, 0) is not None and stream.state_dict() == place
    assert pipeline.first_read(given, 0) != pipeline.first_read(DataLoader(stream.skip(1)), 0)
    stream = ByPass(9)
    assert pipeline.first_read(DataLoader(stream), 0) == pipeline.first_read(stream, 0) and stream.passes == 0
    shuffled = [pipeline.first_read(DataLoader(NoisyStream(9)), seed) for seed in (1, 1, 2)]
    assert shuffled[0] == shuffled[1] != shuffled[2] and random.getstate() == drawn
    once = iter([{"x": torch.tensor([1])}])
    assert pipeline.first_read(once, 0) is None and len(list(once)) == 1


def test_the_loader_shows_the_users_dataset_and_settings():
    dataset = NoisyRows(7)
    workers = {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 3}
    args = DataArguments(**workers, dataloader_multiprocessing_context="fork")
    loader = tiny.build_loader(dataset, True, args, plain, device="cuda")
    assert loader.dataset is dataset and loader.batch_size == 2 and isinstance(loader, DataLoader)
    assert (loader.num_workers, loader.prefetch_factor, loader.pin_memory) == (1, 3, True)
    assert pipeline.num_examples(loader) == 7
    assert pipeline.num_examples(adopt([{"x": 1}] * 3, rank=0, world_size=1, seed=0)) == 3


@pytest.mark.slow
def test_spawned_workers_read_the_same():
    def rows(context):
        return str(
            list(Loader(NoisyRows(4), batch_size=2, collate_fn=noisy, num_workers=1, multiprocessing_context=context))
        )

    assert rows("spawn") == rows("fork")


# ------------------------------------------------------------------------------------------------- datasets and columns


def test_datasets_that_cannot_work_are_refused_with_a_reason():
    for dataset, error, message in (
        (None, DataError, "train_dataset is None"),
        ([], DataError, "train_dataset has no rows"),
        (datasets.DatasetDict(train=datasets.Dataset.from_dict({"x": [1]})), TypeError, r"dict of datasets \(train\)"),
        ("data.jsonl", TypeError, "the string 'data.jsonl'"),
        (5, TypeError, "type int"),
        (iter([{"x": 1}]), TypeError, "list_iterator, which gives its rows once only"),
    ):
        with pytest.raises(error, match=message):
            pipeline.check_dataset(dataset, "train_dataset")
    pipeline.check_dataset(NoisyStream(3), "train_dataset")


def test_unused_columns_are_dropped_from_datasets_and_from_rows(caplog):
    rows = [{"input_ids": [1], "labels": [2], "text": "a"}]
    with caplog.at_level(logging.INFO):
        dataset, collator = pipeline.keep_columns(
            datasets.Dataset.from_list(rows), plain_rows, {"input_ids", "labels"}, "Training"
        )
        assert dataset.column_names == ["input_ids", "labels"] and collator is plain_rows
        assert "Training" in caplog.text and "text" in caplog.text
    for dataset in (rows, datasets.Dataset.from_list(rows).to_iterable_dataset()):
        same, collator = pipeline.keep_columns(dataset, plain_rows, {"input_ids", "labels"})
        assert same is dataset
        assert collator(list(dataset)) == [{"input_ids": [1], "labels": [2]}]
    assert collator(["text", (1, 2)]) == ["text", (1, 2)]


def plain_rows(rows):
    return list(rows)


def test_columns_that_a_transform_reads_are_dropped_after_it():
    raw = datasets.Dataset.from_dict({"text": ["ab", "c"]})
    transformed = raw.with_transform(
        lambda batch: {"input_ids": [[len(t)] for t in batch["text"]], "text": batch["text"]}
    )
    dataset, collator = pipeline.keep_columns(transformed, plain_rows, {"input_ids"})
    assert list(Loader(dataset, batch_size=2, collate_fn=collator)) == [[{"input_ids": [2]}, {"input_ids": [1]}]]


def test_no_column_left_names_what_was_found_and_wanted():
    for dataset in (datasets.Dataset.from_dict({"txt": ["a"], "input_id": [1]}), [{"txt": "a", "input_id": 1}]):
        with pytest.raises(
            DataError, match="Found: txt, input_id. Wanted: input_ids, labels.*did you mean 'input_ids'"
        ):
            dataset, collator = pipeline.keep_columns(dataset, plain_rows, ["input_ids", "labels"])
            collator(list(dataset))


def test_a_forward_that_hands_on_what_it_gets_keeps_all_columns(tmp_path):
    """As of a wrapper around the model, or of a decorator without ``functools.wraps``."""
    model = tiny.causal_lm()
    forward, read = model.forward, set()
    model.forward = lambda **inputs: read.update(inputs) or forward(**inputs)
    args = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to="none", save_strategy="no")
    Trainer(model, args, train_dataset=[{"input_ids": [5, 6], "labels": [5, 6]}] * 8).train()
    assert read >= {"input_ids", "labels"}


def test_signature_columns_are_the_named_parameters_and_the_labels():
    def forward(self, input_ids, attention_mask=None, *args, labels=None, **kwargs): ...

    assert pipeline.signature_columns(forward) == [
        "self",
        "input_ids",
        "attention_mask",
        "labels",
        "label",
        "label_ids",
    ]


def test_the_default_collator_pads_where_it_can():
    tokenizer = tiny.tokenizer()
    batch = pipeline.default_collator(tokenizer)([{"input_ids": [5] * 3}, {"input_ids": [5] * 9}])
    assert batch["input_ids"].shape == (2, 9)
    assert pipeline.default_collator(None)([{"x": 1}, {"x": 2}])["x"].tolist() == [1, 2]


def test_arguments_that_need_workers_say_so():
    bad = DataArguments(
        dataloader_persistent_workers=True, dataloader_prefetch_factor=2, dataloader_multiprocessing_context="fork"
    )
    with pytest.raises(ValueError, match="dataloader_num_workers") as error:
        validate(bad)
    for name in ("persistent_workers", "prefetch_factor", "multiprocessing_context"):
        assert name in str(error.value)
    validate(DataArguments(dataloader_num_workers=1, dataloader_persistent_workers=True, dataloader_prefetch_factor=2))


# ---------------------------------------------------------------------------------------------------- batches and seeds


def test_to_device_keeps_the_shape_of_a_batch():
    from collections import namedtuple

    from transformers import BatchEncoding

    Pair = namedtuple("Pair", "a b")
    one = torch.ones(1)
    batch = {"t": one, "list": [one, "text"], "pair": Pair(one, 3), "encoding": BatchEncoding({"t": one}), "none": None}
    moved = pipeline.to_device(batch, "meta")
    assert moved["t"].is_meta and moved["list"][0].is_meta and moved["list"][1] == "text"
    assert isinstance(moved["pair"], Pair) and moved["pair"].a.is_meta and moved["pair"].b == 3
    assert isinstance(moved["encoding"], BatchEncoding) and moved["encoding"]["t"].is_meta and moved["none"] is None


def test_set_seed_repeats_every_generator():
    def draw():
        pipeline.set_seed(3)
        return random.random(), np.random.rand(), torch.rand(()).item()

    assert draw() == draw()


def test_full_determinism_is_switched_on(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)  # the real one imports a compiler: 5 s
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    for name in ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.setenv(name, "")
    pipeline.enable_full_determinism(1)
    assert asked == [True] and torch.backends.cudnn.deterministic
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8" and os.environ["CUDA_LAUNCH_BLOCKING"] == "1"
