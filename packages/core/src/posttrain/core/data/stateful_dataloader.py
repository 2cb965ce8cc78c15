"""A data loader with a resumable position that distributes rows over processes without repeating any.

Every order, and every random number that a worker draws, is a function of the seed, the epoch and the position. So a
loader resumes exactly from its position. Without workers, datasets and collators draw from the global random numbers,
which the trainer saves.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from posttrain.core.data import workers
from posttrain.core.data.batch_limits import check_limits
from posttrain.core.data.samplers import (
    EpochSampler,
    SeededRandomSampler,
    TokenBatchSampler,
    deal,
    draw_order,
    groups,
    is_stream,
    mix,
    private_random_numbers,
    seed_cpu,
)
from posttrain.core.errors import DataError

logger = logging.getLogger(__name__)


@dataclass
class _Position:
    """A place in an epoch.

    Attributes:
        given: rows given out by each stream: by each worker, or by the only one.
        turn: the worker whose turn it is.
        to_drop: batches that are still to be read and dropped.
        dataset: the position of the dataset itself where the iteration started, if it has one.
        sampler: the state of a foreign sampler's generator when the epoch started.
        is_reading: the iteration has given a batch.
    """

    given: list[int]
    turn: int = 0
    to_drop: int = 0
    dataset: dict[str, Any] | None = None
    sampler: torch.Tensor | None = None
    is_reading: bool = False


class Loader(DataLoader):
    """A `torch.utils.data.DataLoader` for one of several processes, with a position that can be saved and restored.

    Rows are taken in groups of ``batch_size * world_size``, of which each process gets `batch_size`, in rank order. The
    last, short group is split evenly; no row is repeated. If it has fewer rows than there are processes, some get a
    `Filler`, so that all have the same number of batches.

    Args:
        dataset: rows by index, or a stream of rows.
        batch_size: rows of a batch on each process; None: the stream yields whole batches, one for each process.
        collate_fn: makes a batch from a list of rows.
        sampler: the order of the rows; None: sequential. A `RandomSampler` is seeded with ``seed + epoch``.
        batch_sampler: yields lists of indices, one for each process; instead of `batch_size` and `sampler`.
        seed: of the order and of the workers' random numbers.
        rank, world_size: this process, of how many.
        drop_last: leave out the last, short group.
        advance: move to the next epoch after a complete iteration.
        limits: of the model's ids, see `check_limits`; each batch is checked before it is yielded.
        any_rank: returns whether a flag is true on any process. With it, a `datasets.IterableDataset` whose shards can
            be split is read by shards, and processes agree at each batch whether to continue. Without it, each process
            reads the whole stream and keeps its part.
        most: batches of an epoch at most, of rows by index.
        repeats: read in each epoch what the first one reads.
        engine: further arguments of the `DataLoader`, such as ``num_workers``.

    Attributes:
        epoch: the epoch that the next iteration reads.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[list[int]] | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        advance: bool = True,
        limits: Mapping[str, int] | None = None,
        any_rank: Callable[[bool], bool] | None = None,
        most: int | None = None,
        repeats: bool = False,
        **engine: Any,
    ) -> None:
        self.epoch = 0
        self._seed, self._rank, self._world_size, self._advance = seed, rank, world_size, advance
        self._any_rank: Callable[[bool], bool] | None = None
        self._stream: _Stream | None = None
        dealt: dict[str, Any] = {"rank": rank, "world_size": world_size, "drop_last": drop_last, "seed": seed}
        self._generator = torch.Generator()
        engine = {"num_workers": 0} | engine | {"generator": self._generator}
        if engine["num_workers"]:
            engine["worker_init_fn"] = workers.WorkerStart(engine.get("worker_init_fn"))
        if is_stream(dataset):
            if any_rank is not None and world_size > 1 and _splits_evenly(dataset, world_size):
                from datasets.distributed import split_dataset_by_node

                dataset, self._any_rank = split_dataset_by_node(dataset, rank=rank, world_size=world_size), any_rank
            if getattr(dataset, "_distributed", None) is not None:  # each process has its own rows already
                dealt["rank"], dealt["world_size"] = 0, 1
            dealt |= {"num_workers": engine["num_workers"], "forward_epoch": advance}
            stream = _Stream(dataset, batch_size, **dealt)
            source: _Stream | _Rows = stream
            self._stream, self._unit = stream, stream.group
            sampler, engine["batch_size"] = None, None
        else:
            if type(sampler) is RandomSampler:
                sampler = SeededRandomSampler(sampler, seed)
            source = _Rows(dataset, forward_epoch=advance)
            order = sampler if batch_sampler is None else batch_sampler
            already_dealt = getattr(batch_sampler, "sampler", None) if batch_sampler is not None else sampler
            if isinstance(already_dealt, DistributedSampler) and already_dealt.num_replicas == world_size:
                dealt["rank"], dealt["world_size"] = 0, 1
            size = batch_size if batch_sampler is None else None
            seeded = engine["num_workers"] > 0
            self._draws = _Draws(
                dataset, order, size, own_rank=rank, seeded=seeded, most=most, repeats=repeats, **dealt
            )
            self._unit = self._draws.group
            engine["batch_sampler"] = self._draws
        if batch_sampler is not None:
            shown: dict[str, Any] = {"batch_sampler": batch_sampler}
        else:
            shown = {"batch_size": batch_size, "sampler": sampler, "drop_last": drop_last and batch_size is not None}
        # This DataLoader only has the attributes that users read; an inner one reads rows and batches.
        super().__init__(dataset, collate_fn=collate_fn, **shown)
        collate = _Collate(self.collate_fn, self._stream is not None, limits)
        self._engine = DataLoader(source, collate_fn=collate, **engine)
        for name in ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "in_order", "timeout"):
            self.__dict__[name] = getattr(self._engine, name)
        self._now = self._next = self._beginning()
        self._shift = 0, 0  # rows by which batches of an epoch begin later than their number says

    @property
    def total_batch_size(self) -> int | None:
        """Rows of one batch over all processes; None where batches come ready-made, of any size."""
        return None if self.batch_size is None else self.batch_size * self._world_size

    @property
    def rows_per_batch(self) -> int:
        """Rows that one batch of this process takes from the data, with those of the other processes."""
        return self._unit

    @property
    def total_rows(self) -> int | None:
        """Rows of an epoch on all processes; None for a stream, and where batches come ready-made."""
        if self._stream is not None or self._draws.batch_size is None or self._draws.world_size != self._world_size:
            return None
        return self._draws.num_rows if hasattr(self._draws.rows, "__len__") else None

    @property
    def rows_per_turn(self) -> float | None:
        """Rows of one batch over all processes, on average, where batches hold as many rows as fit; else None."""
        if isinstance(self.batch_sampler, TokenBatchSampler):
            return len(self.batch_sampler.lengths) / max(len(self), 1)
        return None

    def batches_left(self, state: dict[str, Any]) -> int:
        """Batches of the epoch after a position of `state_dict`, which another batch size or number of processes may
        have led to. The data must have a length."""
        given = sum(state["given"]) + state["to_drop"] * self._unit
        if self._stream is not None:
            return self._stream.num_batches(len(self._stream.dataset) - given)
        sampler, rows = copy.copy(self._draws.sampler), self._draws.rows
        if isinstance(sampler, EpochSampler):
            given = sampler.resume(state["epoch"], state.get("cut", sampler.cut(state["epoch"])), given)
            rows = sampler
        return self._draws.num_batches(self._draws.at_most(len(rows)) - given)

    def number(self, batches: int) -> None:
        """Let the next batch be number `batches` of its epoch, for `rows_of`."""
        self._shift = self.epoch, sum(self._next.given) - batches * self._unit

    def set_epoch(self, epoch: int) -> None:
        """Choose the pass over the data; unless it is the present one, the next iteration starts at its beginning."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._now = self._next = self._beginning()

    def skip(self, num_batches: int, rows: int | None = None) -> None:
        """Start the next iteration after this many batches of its epoch, or after `rows` where rows go by index.

        No row is read unless the data is a stream.
        """
        start = self._beginning()
        if len(start.given) == 1:
            start.given[0] = num_batches * self._unit if rows is None else rows
        else:
            # only reading shows how many batches each worker yields: some may run out of rows
            start.to_drop = num_batches
        self._now = self._next = start

    def rows_of(self, epoch: int, number: int) -> list[int] | None:
        """The dataset's indices of the rows in batch `number` of `epoch` on this process; None if unknown."""
        if self._stream is not None or not self.in_order:
            return None
        generator, began = self._draws.generator, self._now.sampler
        if generator is None:
            order = self._draws.order(epoch)
        elif epoch == self.epoch and began is not None:
            stands = generator.get_state()
            generator.set_state(began)
            order = self._draws.order(epoch)
            generator.set_state(stands)
        else:
            return None
        if isinstance(order, Iterator):
            return None
        shift = self._shift[1] if self._shift[0] == epoch else 0
        draw = next(self._draws.from_place(order, epoch, number * self._unit + shift), None)
        return None if draw is None else list(draw.indices)

    def state_dict(self) -> dict[str, Any]:
        """The position: the epoch and the rows read of it, valid for any number of processes."""
        now = self._now
        state = {"epoch": self.epoch, "given": list(now.given), "turn": now.turn, "to_drop": now.to_drop}
        if self._stream is None:
            sampler = self._draws.sampler
            if isinstance(sampler, EpochSampler) and (cut := sampler.cut(self.epoch)) is not None:
                state["cut"] = cut
            if self._draws.generator is not None:
                state["sampler"] = self._draws.generator.get_state() if now.sampler is None else now.sampler
        elif now.is_reading and self._stream.keeps_state:
            state["dataset"] = self._stream.dataset.state_dict()
        elif now.dataset is not None:
            state["dataset"] = now.dataset
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration start where `state` was taken."""
        self.epoch, given = state["epoch"], list(state["given"])
        start = self._beginning()
        if self._stream is None and isinstance(sampler := self._draws.sampler, EpochSampler):
            given = [sampler.resume(self.epoch, state.get("cut", sampler.cut(self.epoch)), sum(given))]
        if len(given) == len(start.given):
            start = _Position(given, state["turn"], state["to_drop"], sampler=state.get("sampler"))
            if self._stream is not None and self._stream.keeps_state:
                start.dataset = state.get("dataset")
            self._now = self._next = start
        else:
            self.skip(sum(given) // self._unit)
            logger.warning(
                "The stream was read by %s workers and is now read by %s: resumed rows come in another order. Set "
                "dataloader_num_workers as it was to resume exactly.", len(given), len(start.given),
            )  # fmt: skip
        if self._stream is not None and any(given) and start.dataset is None:
            self._warn_about_replay(self._stream.dataset, sum(given))

    def __len__(self) -> int:
        """Batches of an epoch on this process."""
        return len(self._draws if self._stream is None else self._stream)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its own iterator's private class
        now = replace(self._next, given=list(self._next.given))
        self._now, self._next = now, self._beginning()
        self._generator.manual_seed(mix(self._seed, self.epoch))
        if self._stream is not None:
            self._stream.seek(self.epoch, now.given, now.turn, now.dataset)
            return self._give_from_stream(self._stream, workers.iterate(self._engine), now)
        if (generator := self._draws.generator) is not None:
            if now.sampler is not None:
                generator.set_state(now.sampler)
            now.sampler = generator.get_state()
        self._draws.epoch, self._draws.start = self.epoch, now.given[0]
        return self._give(self._read_here() if self._reads_here else workers.iterate(self._engine), now)

    def end_workers(self) -> None:
        """End the processes that read for this loader, and an iteration with them; the next starts new ones."""
        workers.end(self._engine)

    @property
    def _reads_here(self) -> bool:
        # Without workers and pinning, the engine does nothing but two calls, in a profiler's range for each batch.
        return self.num_workers == 0 and not self.pin_memory

    def _read_here(self) -> Iterator[Any]:
        rows: Any = self._engine.dataset
        read, collate = rows.__getitems__, self._engine.collate_fn
        for draw in self._draws:
            yield collate(read(draw))

    def _give(self, batches: Iterator[Any], now: _Position) -> Iterator[Any]:
        given, unit = now.given, self._unit
        for batch in batches:
            given[0] += unit
            self._now = now  # of several iterations at a time, the position is that of the one that moved last
            yield batch
        self._end(now)

    def _give_from_stream(self, stream: _Stream, batches: Iterator[Any], now: _Position) -> Iterator[Any]:
        last, any_rank = None, self._any_rank
        while True:
            worker, batch = next(batches, (None, None))
            if worker == _GAP:
                continue
            if any_rank is not None:
                if not any_rank(worker is not None):
                    break
                if worker is None:
                    batch = as_filler(self._first_batch(stream) if last is None else last)
                last = batch
            elif worker is None:
                break
            if worker is not None:
                now.given[worker] += self._unit
                now.turn, now.is_reading = (worker + 1) % len(now.given), True
            self._now = now
            if now.to_drop:
                now.to_drop -= 1
                continue
            yield batch
        self._end(now)

    def _end(self, now: _Position) -> None:
        if self._advance and now is self._now:
            self.set_epoch(self.epoch + 1)

    def _beginning(self) -> _Position:
        return _Position([0] * (max(self.num_workers, 1) if self._stream is not None else 1))

    def _first_batch(self, stream: _Stream) -> Any:
        with private_random_numbers(self._seed):
            rows = list(islice(iter(stream.dataset), 1))
            if not rows:
                raise DataError(
                    f"Process {self._rank} of {self._world_size} got not one row of the stream. Use fewer processes."
                )
            return self.collate_fn(rows if self.batch_size is not None else rows[0])

    def _warn_about_replay(self, dataset: Any, rows: int) -> None:
        what = f"Resuming a stream of type {type(dataset).__name__} reads its first {rows} rows again and drops them"
        if _is_one_shot(dataset):
            logger.warning(
                "%s. This iterable can be read only once; resuming may not reproduce its order. Pass a dataset whose "
                "__iter__ restarts.", what,
            )  # fmt: skip
        elif not hasattr(dataset, "state_dict"):
            logger.warning(
                "%s. Give the dataset state_dict and load_state_dict, or rows by index, to avoid that.", what
            )
        elif self.num_workers:
            logger.warning("%s. Its own position is used with dataloader_num_workers=0 only.", what)
        else:
            logger.warning("%s, because its shuffle buffer is not part of its state.", what)


# ---------------------------------------------------------------------------------------------------- rows by index


class _Draw(NamedTuple):
    """One batch to be read, as it travels to a worker."""

    indices: list[int]
    is_filler: bool
    seed: int | None
    epoch: int


class _Read(NamedTuple):
    """The rows of a `_Draw`."""

    rows: list[Any]
    indices: list[int]
    is_filler: bool


class _Draws(Sampler):
    """The batches of this process, as `_Draw`, from `start` of `epoch` on."""

    def __init__(
        self, dataset: Any, sampler: Any, batch_size: int | None, *, rank: int, world_size: int, drop_last: bool,
        seed: int, own_rank: int, seeded: bool, most: int | None, repeats: bool,
    ) -> None:  # fmt: skip
        self.dataset, self.sampler, self.batch_size, self.repeats = dataset, sampler, batch_size, repeats
        self.rank, self.world_size, self.drop_last = rank, world_size, drop_last
        self.seed, self.own_rank, self.seeded = seed, own_rank, seeded
        self.group = (batch_size or 1) * world_size
        self.most = None if most is None else most * self.group
        self.epoch = self.start = 0
        # A custom sampler's order may depend on the random state at this point.
        generator = getattr(sampler, "generator", None) or getattr(getattr(sampler, "sampler", None), "generator", None)
        self.generator = generator if isinstance(generator, torch.Generator) else None

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
        return whole + (rest > 0 and not self._drops_rest)

    @property
    def _drops_rest(self) -> bool:
        return self.drop_last and self.batch_size is not None  # a batch sampler sets it

    def __iter__(self) -> Iterator[_Draw]:
        return self.from_place(self.order(self.epoch), self.epoch, self.start)

    def order(self, epoch: int) -> Any:
        """The rows in the order of `epoch`; an iterator only if they are too many to count."""
        epoch = 0 if self.repeats else epoch
        order = range(len(self.dataset)) if self.sampler is None else draw_order(self.sampler, epoch, self.seed)
        if self.most is None:
            return order
        return islice(order, self.most) if isinstance(order, Iterator) else order[: self.most]

    def from_place(self, order: Any, epoch: int, start: int) -> Iterator[_Draw]:
        for place, group in groups(order, start, self.group):
            if len(group) < self.group and self._drops_rest:
                return
            part, is_filler = deal(group, self.rank, self.world_size, self.batch_size or 1)
            indices: Any = part
            if self.batch_size is None:
                indices = indices[0][-1:] if is_filler else indices[0]
            seed = mix(self.seed, epoch, place, self.own_rank) if self.seeded else None
            yield _Draw(indices, is_filler, seed, epoch)


class _Rows(Dataset):
    """Reads the rows of a `_Draw`: in a worker, under the draw's own seed."""

    def __init__(self, dataset: Any, forward_epoch: bool) -> None:
        self.dataset = dataset
        self.epoch: int | None = None
        self.forwards = forward_epoch and hasattr(dataset, "set_epoch")

    def __getitems__(self, draw: _Draw) -> _Read:
        dataset = self.dataset
        if draw.seed is not None:
            seed_cpu(draw.seed)
        if self.forwards and draw.epoch != self.epoch:
            self.epoch = draw.epoch
            dataset.set_epoch(draw.epoch)
        read_all = getattr(dataset, "__getitems__", None)
        with _naming_rows(draw.indices, "could not be read"):
            rows = read_all(draw.indices) if read_all else [dataset[index] for index in draw.indices]
        return _Read(rows, draw.indices, draw.is_filler)


PADDING_COLLATORS = ("posttrain.core.data.collators", "transformers.data.data_collator")


class _Collate:
    """The user's collator, which also sees to fillers and passes on which worker a streamed batch is from."""

    def __init__(
        self, collate_fn: Callable[[Any], Any], streamed: bool, limits: Mapping[str, int] | None = None
    ) -> None:
        self.collate_fn, self.streamed, self.limits = collate_fn, streamed, limits
        collate = collate_fn
        while hasattr(collate, "collator"):
            collate = collate.collator
        self.name = getattr(collate, "__name__", type(collate).__name__)
        self.failure = f"could not be made into a batch by {self.name}"
        module = getattr(collate, "__module__", None) or type(collate).__module__
        self.only_pads = module in PADDING_COLLATORS
        joins = module.startswith("posttrain.") and not self.only_pads  # prompt and target, or as the trainer sets
        self.looks_at_labels = bool(limits and limits.get("labels_per_token")) and not joins

    def __call__(self, read: Any) -> Any:
        if not self.streamed:
            return self._collate(read.rows, read.is_filler, read.indices)
        if read.worker == _GAP:
            return _GAP, None
        return read.worker, self._collate(read.rows, read.is_filler, None)

    def _collate(self, rows: Any, is_filler: bool, indices: list[int] | None) -> Any:
        with _naming_rows(indices, self.failure, rows):
            batch = self.collate_fn(rows)
            if batch is None:
                raise DataError("it returned None. Does it lack a return statement?")
            if self.limits:
                check_limits(batch, self.limits, indices)
            if self.looks_at_labels:
                self._compare_labels(rows, batch, indices)
        return as_filler(batch) if is_filler else batch

    def _compare_labels(self, rows: Any, batch: Any, indices: list[int] | None) -> None:
        """Reject rows whose numbers of labels and tokens differ, which padding would hide.

        A user's collator may add the missing labels itself, so it only gets one warning.
        """
        if not isinstance(batch, Mapping):
            return
        shapes = [getattr(batch.get(name), "shape", None) for name in ("input_ids", "labels")]
        if shapes[0] is None or shapes[0] != shapes[1]:
            return
        for place, row in enumerate(rows):
            try:
                tokens, labels = len(row["input_ids"]), len(row["labels"])
            except (KeyError, TypeError):  # rows without such columns
                return
            if tokens != labels:
                where = "A row of the stream" if indices is None else f"Row {indices[place]} of the dataset"
                message = (
                    f"{where} has {tokens} input_ids and {labels} labels, and {self.name} padded both to "
                    f"{shapes[0][1]}."
                )
                if self.only_pads:
                    raise DataError(f"{message} Give each token a label, -100 for no loss.")
                self.looks_at_labels = False
                logger.warning("%s Unless it adds the rest itself, labels are at the wrong tokens.", message)
                return


class _naming_rows:
    """Adds the rows to an error in this context, as a `DataError` if the error's text is too short."""

    def __init__(self, indices: list[int] | None, what: str, rows: Any = None) -> None:
        self.indices, self.what, self.rows = indices, what, rows

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if not isinstance(error, Exception):
            return
        indices = self.indices or []
        shown = ", ".join(map(str, indices[:ROWS_NAMED])) + (", ..." if len(indices) > ROWS_NAMED else "")
        which = f"Rows {shown} of the dataset" if indices else "Rows of the stream"
        if isinstance(error, (LookupError, TypeError, AttributeError, ValueError)) or type(error) is RuntimeError:
            reason = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}."
            raise DataError(f"{which} {self.what}: {reason}{_describe(self.rows)}") from error
        error.add_note(f"{which} {self.what}.")


ROWS_NAMED = 8


def _describe(rows: Any) -> str:
    if not isinstance(rows, (list, tuple)) or not rows:
        return ""
    if not isinstance(rows[0], Mapping):
        return f" The first of them is of type {type(rows[0]).__name__}."
    columns = (f"{name} ({type(value).__name__})" for name, value in rows[0].items())
    return f" The first of them holds {', '.join(columns) or 'nothing'}."


# ---------------------------------------------------------------------------------------------------- streams

_GAP = -1
"""In place of a worker's number: nothing to train on, only this worker's turn, which it had before the interruption."""


class _Share(NamedTuple):
    """This process's part of a group of streamed rows."""

    worker: int
    rows: Any
    is_filler: bool = False


class _Stream(IterableDataset):
    """Splits a stream into groups and yields this process's part of each.

    Every group is read with its own seed, equal in all processes that read the whole stream, so that all read the same
    rows, also when reading again.
    """

    def __init__(
        self, dataset: Any, batch_size: int | None, *, rank: int, world_size: int, drop_last: bool, seed: int,
        num_workers: int, forward_epoch: bool,
    ) -> None:  # fmt: skip
        self.dataset, self.batch_size = dataset, batch_size
        self.rank, self.world_size, self.drop_last = rank, world_size, drop_last
        self.seed = seed
        self.group = (batch_size or 1) * world_size
        # Epoch, turn, then the rows that each worker has given. Shared, for workers that live on from epoch to epoch.
        self.position = torch.zeros(2 + max(num_workers, 1), dtype=torch.long)
        if num_workers:
            self.position.share_memory_()
        self.forwards = forward_epoch and hasattr(dataset, "set_epoch")
        self.keeps_state = num_workers == 0 and _has_exact_state(dataset)
        self._state: dict[str, Any] | None = None
        self._blank = dataset.state_dict() if self.keeps_state else None
        self._was_loaded = False

    def __len__(self) -> int:
        return self.num_batches(len(self.dataset))

    def num_batches(self, rows: int) -> int:
        """As that of `_Draws`."""
        whole, rest = divmod(max(rows, 0), self.group)
        return whole + (rest > 0 and not self.drop_last)

    def seek(self, epoch: int, given: list[int], turn: int, state: dict[str, Any] | None) -> None:
        """Where the next iteration starts; `state` is the dataset's own, if it was saved."""
        self.position.copy_(torch.tensor([epoch, turn, *given]))
        self._state = state

    def __iter__(self) -> Iterator[_Share]:
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

    def _shares(self, epoch: int, worker: int, skip: int, gap: bool, place: int, in_main: bool) -> Iterator[_Share]:
        if gap:
            yield _Share(_GAP, None)

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
            yield _Share(worker, part if self.batch_size is not None else part[0], is_filler)
            if len(group) < self.group:
                return
            place += self.group


def _is_one_shot(dataset: Any) -> bool:
    """Whether every ``iter(dataset)`` is the same iterator, so that it can be read only once."""
    source = getattr(dataset, "loader", dataset)
    if isinstance(source, DataLoader):
        return False
    with private_random_numbers(0):
        return iter(source) is iter(source)


def _splits_evenly(dataset: Any, world_size: int) -> bool:
    shards = getattr(dataset, "num_shards", 0)
    return getattr(dataset, "_distributed", None) is None and shards > 0 and shards % world_size == 0


def _has_exact_state(dataset: Any) -> bool:
    """Whether ``dataset.state_dict()`` is all of its position: a shuffle buffer of `datasets` is not part of it."""
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        return False
    layers = [getattr(dataset, "_ex_iterable", None)]
    while layers:
        layer = layers.pop()
        if "BufferShuffled" in type(layer).__name__:
            return False
        layers += [getattr(layer, "ex_iterable", None)] if hasattr(layer, "ex_iterable") else []
        layers += getattr(layer, "ex_iterables", None) or []
    return True


# ---------------------------------------------------------------------------------------------------- fillers


class Filler(dict):
    """A batch that only keeps this process in step with the others: it must be computed, and count for nothing."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, *args: Any, **kwargs: Any) -> Filler:
        moved = ((key, value.to(*args, **kwargs) if hasattr(value, "to") else value) for key, value in self.items())
        return Filler(moved)


class FillerList(list):
    """A `Filler` for batches that are lists or tuples."""


def is_filler(batch: Any) -> bool:
    """Whether `batch` only keeps processes in step and has no weight."""
    return isinstance(batch, (Filler, FillerList))


def as_filler(batch: Any) -> Filler | FillerList:
    """`batch`, marked as a filler."""
    if isinstance(batch, Mapping):
        return Filler(batch)
    if isinstance(batch, (list, tuple)):
        return FillerList(batch)
    raise DataError(
        f"The last rows of an epoch do not go round all processes, and a batch of type {type(batch).__name__} cannot "
        "be marked as one that does not count. Let the collator return a dict, or set dataloader_drop_last=True."
    )
