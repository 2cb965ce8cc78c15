"""Samplers whose order is a function of (seed, epoch), and the split of rows over processes.

They read no rows and do not change the global random state.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import cache
from itertools import chain, cycle, islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.random import mtrand
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from posttrain.core.errors import DataError

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Strategies that need the length of each row.
BY_LENGTH = ("group_by_length", "batch_rebalance")
STRATEGIES = ("random", "sequential", *BY_LENGTH)
MEGABATCHES = 50
"""Batches that `LengthGroupedSampler` sorts together, at most: more pad less, and mix rows less."""


class EpochSampler(Sampler[int]):
    """A sampler whose order is a function of its seed and the epoch alone, so that any position can be sought."""

    #: What the order depends on that a resumed run may set otherwise; None: nothing.
    own_cut: Any = None

    def __init__(self, num_rows: int, seed: int) -> None:
        self.num_rows, self.seed, self.epoch = num_rows, seed, 0
        self._begun: dict[int, Any] = {}  # `own_cut` of an epoch that was begun with another

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def generator(self) -> torch.Generator:
        """A fresh generator, in the state that belongs to this epoch."""
        return torch.Generator().manual_seed(self.seed + self.epoch)

    def order(self) -> torch.Tensor:
        """The indices of this epoch, shape (num_rows,), long."""
        return torch.randperm(self.num_rows, generator=self.generator())

    def cut(self, epoch: int) -> Any:
        """`own_cut` of the order of `epoch`."""
        return self._begun.get(epoch, self.own_cut)

    def resume(self, epoch: int, cut: Any, given: int) -> int:
        """Continue `epoch` after `given` indices of its order under `cut`; returns their number in this order."""
        return given

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[int]:
        return iter(self.order().tolist())


class PartSampler(EpochSampler):
    """The rows of a run in their order, of which each of its `epochs` reads as many; then they begin again."""

    def __init__(self, num_rows: int, epochs: float) -> None:
        super().__init__(int(num_rows / epochs), seed=0)
        self.rows, self.epochs = torch.arange(num_rows), math.ceil(epochs)

    def order(self) -> torch.Tensor:
        return self.rows[self.epoch % self.epochs * self.num_rows :][: self.num_rows]


class SeededRandomSampler(EpochSampler):
    """The order of a `torch.utils.data.RandomSampler` with a generator seeded with ``seed + epoch``."""

    def __init__(self, sampler: RandomSampler, seed: int) -> None:
        super().__init__(sampler.num_samples, seed)
        self.population, self.replacement = len(sampler.data_source), sampler.replacement

    def order(self) -> torch.Tensor:
        options: dict[str, Any] = {"replacement": self.replacement, "num_samples": self.num_rows}
        drawn = RandomSampler(range(self.population), generator=self.generator(), **options)
        return torch.tensor(list(drawn), dtype=torch.long)


class LengthGroupedSampler(EpochSampler):
    """A random order in which adjacent rows have similar `lengths` (in tokens), so that batches need little padding.

    The rows are shuffled, split into chunks of up to 50 times the `batch_size` rows of one optimizer step on one
    process, and each chunk is sorted, longest row first. The longest row of all comes first, so that a run that does
    not fit into memory fails at once.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        super().__init__(len(lengths), seed)
        self.lengths = torch.as_tensor(lengths)
        # At least four stretches, or a small dataset would come in the order of its lengths.
        self.own_cut = batch_size * max(min(len(lengths) // (4 * batch_size), MEGABATCHES), 1)

    def resume(self, epoch: int, cut: Any, given: int) -> int:
        self._begun = {epoch: cut}
        return given

    def order(self) -> torch.Tensor:
        stretches = torch.randperm(self.num_rows, generator=self.generator()).split(self.cut(self.epoch))
        ordered = torch.cat([part[self.lengths[part].argsort(descending=True, stable=True)] for part in stretches])
        if self.num_rows:
            longest = int(self.lengths[ordered].argmax())
            ordered[[0, longest]] = ordered[[longest, 0]]
        return ordered


def row_lengths(dataset: Any, length_column_name: str = "length", main_input: str = "input_ids") -> list[int]:
    """The length of each row, from its column or from `main_input`, for which every row is read."""
    columns = columns_of(dataset)
    if length_column_name in columns:
        return [int(length) for length in dataset[length_column_name]]
    if main_input in columns:
        return [len(value) for value in dataset[main_input]]
    rows = (dataset[i] for i in range(len(dataset)))
    try:
        return [row[length_column_name] if length_column_name in row else len(row[main_input]) for row in rows]
    except (TypeError, KeyError, IndexError) as error:
        raise DataError(
            "Rows of similar length are to be grouped, and the rows hold neither "
            f"{length_column_name!r} nor {main_input!r}. Add a column {length_column_name!r}, name another one in "
            "length_column_name, or override row_lengths."
        ) from error


def has_length(data: Any) -> bool:
    """Whether ``len(data)`` gives an answer."""
    try:
        return len(data) is not None
    except (TypeError, NotImplementedError, AttributeError):
        return False


def has_places(dataset: Any) -> bool:
    """Whether `dataset` gives its rows by their place, and says how many they are."""
    return hasattr(dataset, "__getitem__") and isinstance(dataset, Sized)


def columns_of(dataset: Any) -> list[str]:
    """The columns that `dataset` names; empty where it names none."""
    return getattr(dataset, "column_names", None) or []


def transforms_rows(dataset: Any) -> bool:
    """Whether a `datasets.Dataset` computes its rows as they are read, by ``set_transform``."""
    layout = getattr(dataset, "format", None)
    return isinstance(layout, dict) and layout.get("type") == "custom"


def is_stream(dataset: Any) -> bool:
    """Whether rows can only be had one after the other."""
    if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__getitem__"):
        return True
    return isinstance(dataset, Iterable) and not isinstance(dataset, Sized) and knows_position(dataset)


def follows_epochs(source: Any) -> bool:
    """Whether a dataset, a sampler or a loader is given the epoch."""
    return hasattr(source, "set_epoch")


def knows_position(dataset: Any) -> bool:
    """Whether a dataset can save and restore its own position, and asks for nothing else to do so."""
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        return False
    parameters = inspect.signature(dataset.state_dict).parameters.values()
    return all(one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters)


def inner_sampler(sampler: Any) -> Any:
    """What a batch sampler, or a loader, draws from; None for any other."""
    return getattr(sampler, "sampler", None)


def draw_order(sampler: Any, epoch: int, seed: int) -> Sequence[int] | torch.Tensor | Iterator[int]:
    """The indices that `sampler` gives in `epoch`; an iterator only if they are too many to count. One that draws from
    the global random numbers finds them in a state that belongs to the epoch, and leaves them as they were.
    """
    source = sampler if follows_epochs(sampler) else inner_sampler(sampler)
    if follows_epochs(source):
        source.set_epoch(epoch)
    if isinstance(sampler, EpochSampler):
        return sampler.order()
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    with private_random_numbers(mix(seed, epoch)):
        return list(sampler) if has_length(sampler) else iter(sampler)


def groups(order: Any, start: int, size: int) -> Iterator[tuple[int, list[int]]]:
    """``(place of its first index, the indices)`` of each `size` of `order`, from place `start` on; the last may be
    short. A sequence is sliced, so starting late costs nothing; an iterator is run up to the start.
    """
    if isinstance(order, Iterator):
        for _ in islice(order, start):
            pass
        while group := list(islice(order, size)):
            yield start, group
            start += size
        return
    stretch = size * 256  # indices are converted in chunks, because one by one would take as long as reading
    for begin in range(start, len(order), stretch):
        indices = order[begin : begin + stretch]
        indices = indices.tolist() if isinstance(indices, torch.Tensor) else list(indices)
        for place in range(0, len(indices), size):
            yield begin + place, indices[place : place + size]


def deal(group: list[T], rank: int, world_size: int, size: int) -> tuple[list[T], bool]:
    """``(this process's part of `group`, whether it only fills up)``.

    A whole group holds `size` rows for each process. A short one is split into equal, contiguous parts, with one more
    for the first processes if necessary. A process without rows gets a copy of another's row, flagged to have no
    weight, because all processes must stay in step. The parts, in rank order, are the group.
    """
    if len(group) == size * world_size:
        return group[rank * size : (rank + 1) * size], False
    each, rest = divmod(len(group), world_size)
    start = rank * each + min(rank, rest)
    part = group[start : start + each + (rank < rest)]
    return (part, False) if part else (group[-1:], True)


def in_step(
    items: Iterator[T], highest: Callable[[list[int]], list[int]], fill: Callable[[T], T] | None
) -> Iterator[T]:
    """`items`, of which no process knows how many the others have, so each is asked before each: `highest` gives the
    largest of each number that all pass.

    With `fill`, a process whose items have ended goes on with fillers of its last one as long as another has any; a
    `DataError` where it had none. Without, all end with the first, and a warning says so.
    """
    last: T | None = None
    while True:
        item = next(items, None)
        has_ended, has_more = highest([int(item is None), int(item is not None)])
        if not has_more:
            return
        if has_ended and fill is None:
            logger.warning("The data of this epoch has ended on one process, so it ends here: %s", _SHORTER)
            return
        if item is None:
            if last is None or fill is None:
                raise DataError(f"This process has no batch, and others have. {_AS_MANY}")
            item = fill(last)
        last = item
        yield item


_AS_MANY = "Let what divides the rows give each process as many batches."
_SHORTER = f"what others have left of it is not read. {_AS_MANY}"


class Draw(NamedTuple):
    """One batch to be read, as it travels to a worker."""

    indices: list[int]
    is_filler: bool
    seed: int | None
    epoch: int
    kept: int | None = None
    """The first rows of it that count, where the others are repeated; None: all count."""


@dataclass(eq=False, repr=False)
class Draws(Sampler[Draw]):
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
    whole: bool
    marks: bool

    def __post_init__(self) -> None:
        self.gather: Callable[[Any], list[Any]] | None = None
        self.highest: Callable[[list[int]], list[int]] | None = None
        self.longest = 0
        self.drop_last = self.drop_last and self.batch_size is not None  # a batch sampler decides for itself
        self.group = (self.batch_size or 1) * self.world_size
        self.most = None if self.most is None else self.most * self.group
        self.epoch = self.start = 0
        # A custom sampler's order may depend on the random state at this point.
        found = (getattr(one, "generator", None) for one in (self.sampler, inner_sampler(self.sampler)))
        self.generator = next((one for one in found if isinstance(one, torch.Generator)), None)

    def __len__(self) -> int:
        return max(self.num_batches(self.num_rows), self.longest)

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
        order = self.order(self.epoch)
        if self.gather is not None and not isinstance(order, Iterator):
            self.agree(len(order), self.gather)
        draws = self.from_place(order, self.epoch, self.start)
        if self.highest is None or not isinstance(order, Iterator):
            return draws
        return in_step(draws, self.highest, (lambda draw: draw._replace(is_filler=True)) if self.marks else None)

    def agree(self, rows: int, gather: Callable[[Any], list[Any]]) -> None:
        """Find the `longest` of the epoch, of which this process reads so many `rows`. Raises a `DataError` on all
        processes where one has no batch.
        """
        counts, before = gather(self.num_batches(rows)), self.longest
        self.longest = max(counts)
        shown = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts))
        if min(counts) == 0 < self.longest:
            raise DataError(f"The batches of an epoch are {shown}, and a process needs one. {_AS_MANY}")
        if min(counts) < self.longest != before:
            logger.warning(
                f"The batches of an epoch are {shown}. A process that has read its own computes, for each further one "
                f"of the others, a batch that does not count. {_AS_MANY}"
            )

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
                break
            indices, is_filler, kept = self._part(group, order)
            yield Draw(indices, is_filler, self._seed_of(epoch, place), epoch, kept)
        if self.longest and not isinstance(order, Iterator):
            for number in range(max(self.num_batches(len(order)), start // self.group), self.longest):
                last: Any = next(groups(order, len(order) - 1, 1))[1]
                seed = self._seed_of(epoch, number * self.group)
                yield Draw(last if self.batch_size is not None else last[0][-1:], True, seed, epoch)

    def _part(self, group: list[Any], order: Any) -> tuple[list[int], bool, int | None]:
        """(rows of this process in `group`, whether they only fill up, how many count if not all)."""
        if self.batch_size is None:
            [indices], is_filler = deal(group, self.rank, self.world_size, 1)
            return indices[-1:] if is_filler else indices, is_filler, None
        if not self.whole or len(group) == self.group or isinstance(order, Iterator):
            return *deal(group, self.rank, self.world_size, self.batch_size), None
        _, first = next(groups(order, 0, self.group))
        begin = self.rank * self.batch_size
        filled = [*islice(chain(group, cycle(first)), begin, begin + self.batch_size)]
        kept = min(max(len(group) - begin, 0), self.batch_size)
        return filled, self.marks and kept == 0, kept if self.marks else None

    def _seed_of(self, epoch: int, place: int) -> int | None:
        return mix(self.seed, epoch, place, self.own_rank) if self.seeded else None


def mix(*numbers: int) -> int:
    """A 32-bit seed that depends on all of `numbers`, the same in every process and every run."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest(), "little")


def seed_cpu(seed: int) -> None:
    """Seed the random numbers of Python, numpy and torch on the CPU; those of accelerators are left alone."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


@cache
def _private_bits() -> np.random.MT19937:
    return np.random.MT19937(0)


@contextlib.contextmanager
def private_random_numbers(seed: int) -> Iterator[None]:
    """Seed the CPU's random numbers with `seed` in this context and restore them afterwards.

    Only the cached second normal number of ``np.random.randn`` is lost.
    """
    # numpy's bits are swapped and not copied: its get_state and set_state take 100 us, all of the rest 20 us.
    python, numpy, pytorch = random.getstate(), mtrand.get_bit_generator(), torch.get_rng_state()
    mtrand.set_bit_generator(_private_bits())
    seed_cpu(seed)
    try:
        yield
    finally:
        random.setstate(python)
        mtrand.set_bit_generator(numpy)
        torch.set_rng_state(pytorch)
