"""Splits a stream of rows over the processes, and finds a position in it again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from posttrain.core.data.samplers import deal, follows_epochs, knows_position, mix, private_random_numbers, seed_cpu

GAP = -1
"""In place of a worker's number: nothing to train on, only this worker's turn, which it had before the interruption."""


class Share(NamedTuple):
    """This process's part of a group of streamed rows."""

    worker: int
    rows: Any
    is_filler: bool = False


@dataclass(eq=False, repr=False)
class Stream(IterableDataset[Share]):
    """Splits a stream into groups and yields this process's part of each.

    Every group is read with its own seed, equal in all processes that read the whole stream, so that all read the same
    rows, also when reading again.
    """

    dataset: Any
    batch_size: int | None
    rank: int
    world_size: int
    drop_last: bool
    seed: int
    num_workers: int
    forward_epoch: bool

    def __post_init__(self) -> None:
        self.group = (self.batch_size or 1) * self.world_size
        # Epoch, turn, then the rows that each worker has given. Shared, for workers that live on from epoch to epoch.
        self.position = torch.zeros(2 + max(self.num_workers, 1), dtype=torch.long)
        if self.num_workers:
            self.position.share_memory_()
        self.forwards = self.forward_epoch and follows_epochs(self.dataset)
        self.keeps_state = self.num_workers == 0 and _has_exact_state(self.dataset)
        self._state: dict[str, Any] | None = None
        self._blank = self.dataset.state_dict() if self.keeps_state else None
        self._was_loaded = False

    def __len__(self) -> int:
        return self.num_batches(len(self.dataset))

    def num_batches(self, rows: int) -> int:
        """Batches that `rows` rows make, the last ones of an epoch; 0 where there is none."""
        whole, rest = divmod(max(rows, 0), self.group)
        return whole + (rest > 0 and not self.drop_last)

    def seek(self, epoch: int, given: list[int], turn: int, state: dict[str, Any] | None) -> None:
        """Where the next iteration starts; `state` is the dataset's own, if it was saved."""
        self.position.copy_(torch.tensor([epoch, turn, *given]))
        self._state = state

    def __iter__(self) -> Iterator[Share]:
        epoch, turn, *given = self.position.tolist()
        info = get_worker_info()
        worker = info.id if info is not None else 0
        if self.forwards:
            self.dataset.set_epoch(epoch)
        state, skip = self._state, given[worker]
        if state is not None or self._was_loaded:  # otherwise every iteration would start at the loaded position
            self.dataset.load_state_dict(self._blank if state is None else state)
            self._was_loaded = state is not None
        return self._shares(epoch, worker, skip, worker < turn, skip if state is not None else 0, info is None)

    def _shares(self, epoch: int, worker: int, skip: int, gap: bool, place: int, in_main: bool) -> Iterator[Share]:
        if gap:
            yield Share(GAP, None)

        def read(num_rows: int, place: int, source: Iterator[Any] | None) -> Any:
            seed = mix(self.seed, epoch, worker, place)
            if not in_main:
                seed_cpu(seed)  # also for the collator, which comes after
                return iter(self.dataset) if source is None else list(islice(source, num_rows))
            with private_random_numbers(seed):
                return iter(self.dataset) if source is None else list(islice(source, num_rows))

        source = read(0, -1, None)
        while place < skip:
            dropped = len(read(min(self.group, skip - place), place, source))
            if dropped == 0:
                return
            place += dropped
        while group := read(self.group, place, source):
            if len(group) < self.group and self.drop_last:
                return
            part, is_filler = deal(group, self.rank, self.world_size, self.batch_size or 1)
            yield Share(worker, part if self.batch_size is not None else part[0], is_filler)
            if len(group) < self.group:
                return
            place += self.group


def is_one_shot(dataset: Any) -> bool:
    """Whether every ``iter(dataset)`` is the same iterator, so that it can be read only once."""
    source = getattr(dataset, "loader", dataset)
    if isinstance(source, DataLoader):
        return False
    with private_random_numbers(0):
        return iter(source) is iter(source)


def _has_exact_state(dataset: Any) -> bool:
    """Whether ``dataset.state_dict()`` is all of its position: a shuffle buffer of `datasets` is not part of it."""
    if not knows_position(dataset):
        return False
    layers = [dataset]
    while layers:
        layer = layers.pop()
        if "BufferShuffled" in type(layer).__name__:
            return False
        below = [getattr(layer, name, None) for name in ("_ex_iterable", "ex_iterable")]
        layers += [one for one in (*below, *(getattr(layer, "ex_iterables", None) or ())) if one is not None]
    return True
