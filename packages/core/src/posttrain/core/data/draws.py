"""Reads rows by index: which rows each batch of a process holds, in what order, under which seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, Sampler

from posttrain.core.data.batches import naming_rows
from posttrain.core.data.samplers import deal, draw_order, follows_epochs, groups, inner_sampler, mix, seed_cpu


class Draw(NamedTuple):
    """One batch to be read, as it travels to a worker."""

    indices: list[int]
    is_filler: bool
    seed: int | None
    epoch: int


class Read(NamedTuple):
    """The rows of a `Draw`."""

    rows: list[Any]
    indices: list[int]
    is_filler: bool


@dataclass(eq=False, repr=False)
class Draws(Sampler):
    """The batches of this process, as `Draw`, from `start` of `epoch` on; see `Loader` for the arguments.

    Args:
        rank, world_size: 0 and 1 where a distributed sampler gives each process its own rows.
        own_rank: the rank in any case. seeded: each batch has a seed of its own, for the worker that reads it.
    """

    dataset: Any
    sampler: Any
    batch_size: int | None
    rank: int
    world_size: int
    drop_last: bool
    seed: int
    own_rank: int
    seeded: bool
    most: int | None
    repeats: bool

    def __post_init__(self) -> None:
        self.drop_last = self.drop_last and self.batch_size is not None  # a batch sampler decides for itself
        self.group = (self.batch_size or 1) * self.world_size
        self.most = None if self.most is None else self.most * self.group
        self.epoch = self.start = 0
        # A custom sampler's order may depend on the random state at this point.
        found = (getattr(one, "generator", None) for one in (self.sampler, inner_sampler(self.sampler)))
        self.generator = next((one for one in found if isinstance(one, torch.Generator)), None)

    def __len__(self) -> int:
        return self.num_batches(self.num_rows)

    @property
    def rows(self) -> Any:
        """What gives the rows of an epoch: the sampler, or the dataset in its order."""
        return self.dataset if self.sampler is None else self.sampler

    @property
    def num_rows(self) -> int:
        """What an epoch reads: rows, or batches that a sampler makes."""
        return self.at_most(len(self.rows))

    def at_most(self, number: int) -> int:
        """`number` rows, or as many as an epoch may have."""
        return number if self.most is None else min(number, self.most)

    def num_batches(self, rows: int) -> int:
        """Batches that `rows` rows make, the last ones of an epoch; 0 where there is none."""
        whole, rest = divmod(max(rows, 0), self.group)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Draw]:
        return self.from_place(self.order(self.epoch), self.epoch, self.start)

    def order(self, epoch: int) -> Any:
        """The rows in the order of `epoch`; an iterator only if they are too many to count."""
        epoch = 0 if self.repeats else epoch
        order = range(len(self.dataset)) if self.sampler is None else draw_order(self.sampler, epoch, self.seed)
        if self.most is None:
            return order
        return islice(order, self.most) if isinstance(order, Iterator) else order[: self.most]

    def from_place(self, order: Any, epoch: int, start: int) -> Iterator[Draw]:
        for place, group in groups(order, start, self.group):
            if len(group) < self.group and self.drop_last:
                return
            indices: Any
            indices, is_filler = deal(group, self.rank, self.world_size, self.batch_size or 1)
            if self.batch_size is None:
                indices = indices[0][-1:] if is_filler else indices[0]
            seed = mix(self.seed, epoch, place, self.own_rank) if self.seeded else None
            yield Draw(indices, is_filler, seed, epoch)


class Rows(Dataset):
    """Reads the rows of a `Draw`: in a worker, under the draw's own seed."""

    def __init__(self, dataset: Any, forward_epoch: bool) -> None:
        self.dataset = dataset
        self.epoch: int | None = None
        self.forwards = forward_epoch and follows_epochs(dataset)

    def __getitems__(self, draw: Draw) -> Read:
        dataset = self.dataset
        if draw.seed is not None:
            seed_cpu(draw.seed)
        if self.forwards and draw.epoch != self.epoch:
            self.epoch = draw.epoch
            dataset.set_epoch(draw.epoch)
        read_all = getattr(dataset, "__getitems__", None)
        with naming_rows(draw.indices, "could not be read"):
            rows = read_all(draw.indices) if read_all else [dataset[index] for index in draw.indices]
        return Read(rows, draw.indices, draw.is_filler)
