"""A data loader with a resumable position that distributes rows over processes without repeating any.

Every order, and every random number that a worker draws, is a function of the seed, the epoch and the position. So a
loader resumes exactly from its position. Without workers, datasets and collators draw from the global random numbers,
which the trainer saves.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from posttrain.core.data import samplers, workers
from posttrain.core.data.batch_samplers import EpochBatchSampler
from posttrain.core.data.batches import Collate, Rows, as_filler, at_hand
from posttrain.core.data.streams import GAP, Stream, is_one_shot

logger = logging.getLogger(__name__)

#: How a `torch.utils.data.DataLoader` reads, by its attributes.
ENGINE = ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "in_order", "timeout")


@dataclass
class _Position:
    """A place in an epoch."""

    given: list[int]  # rows given out by each stream: by each worker, or by the only one
    turn: int = 0  # the worker whose turn it is
    to_drop: int = 0  # batches that are still to be read and dropped
    dataset: dict[str, Any] | None = None  # the dataset's own position where the iteration started, if it has one
    sampler: torch.Tensor | None = None  # the state of a foreign sampler's generator when the epoch started
    is_reading: bool = False  # the iteration has given a batch


class Loader(DataLoader[Any]):
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
        most: batches of an epoch at most, of rows by index.
        repeats: read in each epoch what the first one reads.
        whole: fill up the last group with the first rows, for a loss that gathers rows; see `Draws`.
        own_rows: each process reads other rows already; none are dealt.
        engine: further arguments of the `DataLoader`, such as ``num_workers``.

    Attributes:
        epoch: the epoch that the next iteration reads.
        rows_per_batch: rows that one batch of this process takes from the data, with those of the other processes.
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
        most: int | None = None,
        repeats: bool = False,
        whole: bool = False,
        own_rows: bool = False,
        **engine: Any,
    ) -> None:
        self.epoch = 0
        self._seed, self._world_size, self._advance = seed, world_size, advance
        self._stream: Stream | None = None
        dealt: dict[str, Any] = {"rank": rank, "world_size": world_size, "drop_last": drop_last, "seed": seed}
        self._generator = torch.Generator()
        engine = {"num_workers": 0} | engine | {"generator": self._generator}
        if engine["num_workers"]:
            engine["worker_init_fn"] = workers.WorkerStart(engine.get("worker_init_fn"))
        if samplers.is_stream(dataset):
            if own_rows or getattr(dataset, "_distributed", None) is not None:  # each process has its own rows already
                dealt["rank"], dealt["world_size"] = 0, 1
            dealt |= {"num_workers": engine["num_workers"], "forward_epoch": advance}
            stream = Stream(dataset, batch_size, **dealt)
            source: Stream | Rows = stream
            self._stream, self.rows_per_batch = stream, stream.group
            sampler, engine["batch_size"] = None, None
        else:
            if type(sampler) is RandomSampler:
                sampler = samplers.SeededRandomSampler(sampler, seed)
            source = Rows(dataset, forward_epoch=advance)
            order = sampler if batch_sampler is None else batch_sampler
            already_dealt = samplers.inner_sampler(batch_sampler) if batch_sampler is not None else sampler
            own_rows |= isinstance(already_dealt, DistributedSampler) and already_dealt.num_replicas == world_size
            if own_rows:
                dealt["rank"], dealt["world_size"] = 0, 1
            size = batch_size if batch_sampler is None else None
            dealt |= {"own_rank": rank, "seeded": engine["num_workers"] > 0, "most": most, "repeats": repeats}
            dealt |= {"whole": whole, "marks": not advance}
            self._draws = samplers.Draws(dataset, order, size, **dealt)
            self.rows_per_batch = self._draws.group
            engine["batch_sampler"] = self._draws
        if batch_sampler is not None:
            shown: dict[str, Any] = {"batch_sampler": batch_sampler}
        else:
            shown = {"batch_size": batch_size, "sampler": sampler, "drop_last": drop_last and batch_size is not None}
        # This DataLoader only has the attributes that users read; an inner one reads rows and batches.
        super().__init__(dataset, collate_fn=collate_fn, **shown)
        collate = Collate(self.collate_fn, self._stream is not None, limits)
        self._engine = DataLoader(source, collate_fn=collate, **engine)
        vars(self).update({name: vars(self._engine)[name] for name in ENGINE})
        self._now = self._next = self._beginning()
        self._highest: Callable[[list[int]], list[int]] | None = None  # see `keep_in_step`
        self._length: int | None = None
        self._shift = 0, 0  # rows by which batches of an epoch begin later than their number says

    @property
    def total_batch_size(self) -> int | None:
        """Rows of one batch over all processes; None where batches come ready-made, of any size."""
        return None if self.batch_size is None else self.batch_size * self._world_size

    @property
    def total_rows(self) -> int | None:
        """Rows of an epoch on all processes; None for a stream, and where batches come ready-made."""
        if self._stream is not None or self._draws.batch_size is None or self._draws.world_size != self._world_size:
            return None
        return self._draws.num_rows if isinstance(self._draws.rows, Sized) else None

    @property
    def rows_per_turn(self) -> float | None:
        """Rows of one batch over all processes, on average, where batches hold as many rows as fit; else None."""
        if isinstance(self.batch_sampler, EpochBatchSampler):
            return len(self.batch_sampler.lengths) / max(len(self), 1)
        return None

    def keep_in_step(self, gather: Callable[[Any], list[Any]], highest: Callable[[list[int]], list[int]]) -> None:
        """Give all processes as many batches, where each has rows of its own, maybe of another number: `gather` lists
        what all of them pass, here and once an epoch. Where a number is not known, `highest` (of each number that they
        pass) is asked for before each batch.

        Rows by index are all read: a process that has read its own goes on with fillers. So it is in an evaluation of
        a stream. In training an epoch of a stream ends for all with the first. Raises a `DataError` on all processes
        where one has no batch.
        """
        dealt = self._draws if self._stream is None else self._stream
        if dealt.world_size > 1:
            return
        if self._stream is None:
            self._draws.gather, self._draws.highest = gather, highest
            if samplers.has_length(self._draws.rows):
                self._draws.agree(self._draws.num_rows, gather)
            return
        lengths = gather(len(self._stream) if samplers.has_length(self._stream.dataset) else None)
        self._highest = highest if None in lengths or len({*lengths}) > 1 else None
        if self._highest is not None and None not in lengths:
            self._length = min(lengths) if self._advance else max(lengths)

    def batches_left(self, state: dict[str, Any]) -> int:
        """Batches of the epoch after a position of `state_dict`, which another batch size or number of processes may
        have led to. The data must have a length.
        """
        given = sum(state["given"]) + state["to_drop"] * self.rows_per_batch
        if self._stream is not None:
            return self._stream.num_batches(len(self._stream.dataset) - given)
        sampler, rows = copy.copy(self._draws.sampler), self._draws.rows
        if isinstance(sampler, samplers.EpochSampler):
            given = sampler.resume(state["epoch"], state.get("cut", sampler.cut(state["epoch"])), given)
            rows = sampler
        own = self._draws.num_batches(self._draws.at_most(len(rows)) - given)
        left: int = max(own, self._draws.longest - given // self.rows_per_batch)
        return left

    def number(self, batches: int) -> None:
        """Let the next batch be number `batches` of its epoch, for `rows_of`."""
        self._shift = self.epoch, sum(self._next.given) - batches * self.rows_per_batch

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
            start.given[0] = num_batches * self.rows_per_batch if rows is None else rows
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
        draw = next(self._draws.from_place(order, epoch, number * self.rows_per_batch + shift), None)
        return None if draw is None else list(draw.indices)

    def rows_ahead(self, batches: int) -> list[int] | None:
        """`rows_of` the batch that comes so many batches after the one that is waited for."""
        shift = self._shift[1] if self._shift[0] == self.epoch else 0
        return self.rows_of(self.epoch, (self._now.given[0] - shift) // self.rows_per_batch + batches)

    def state_dict(self) -> dict[str, Any]:
        """The position: the epoch and the rows read of it, valid for any number of processes."""
        now = self._now
        state = {"epoch": self.epoch, "given": list(now.given), "turn": now.turn, "to_drop": now.to_drop}
        if self._stream is None:
            sampler = self._draws.sampler
            if isinstance(sampler, samplers.EpochSampler) and sampler.own_cut is not None:
                state["cut"] = sampler.cut(self.epoch)
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
        if self._stream is None and isinstance(sampler := self._draws.sampler, samplers.EpochSampler):
            given = [sampler.resume(self.epoch, state.get("cut", sampler.cut(self.epoch)), sum(given))]
        if len(given) == len(start.given):
            start = _Position(given, state["turn"], state["to_drop"], sampler=state.get("sampler"))
            if self._stream is not None and self._stream.keeps_state:
                start.dataset = state.get("dataset")
            self._now = self._next = start
        else:
            self.skip(sum(given) // self.rows_per_batch)
            logger.warning(
                f"The stream was read by {len(given)} workers and is now read by {len(start.given)}: resumed rows come "
                "in another order. Set dataloader_num_workers as it was to resume exactly."
            )
        if self._stream is not None and any(given) and start.dataset is None:
            self._warn_about_replay(self._stream.dataset, sum(given))

    def __len__(self) -> int:
        """Batches of an epoch on this process."""
        if self._length is not None:
            return self._length
        return len(self._draws if self._stream is None else self._stream)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its own iterator's private class
        return at_hand(self._batches()) if self._world_size > 1 else self._batches()

    def _batches(self) -> Iterator[Any]:
        now = replace(self._next, given=list(self._next.given))
        self._now, self._next = now, self._beginning()
        self._generator.manual_seed(samplers.mix(self._seed, self.epoch))
        if self._stream is not None:
            self._stream.seek(self.epoch, now.given, now.turn, now.dataset)
            batches = workers.iterate(self._engine, self)
            if self._highest is not None:
                fill = None if self._advance else (lambda given: (given[0], as_filler(given[1])))
                batches = samplers.in_step(batches, self._highest, fill)
            return self._give_from_stream(batches, now)
        if (generator := self._draws.generator) is not None:
            if now.sampler is not None:
                generator.set_state(now.sampler)
            now.sampler = generator.get_state()
        self._draws.epoch, self._draws.start = self.epoch, now.given[0]
        if self.num_workers == 0 and not self.pin_memory:
            # There the engine does nothing but two calls, in a profiler's range for each batch.
            rows: Any = self._engine.dataset
            return self._give(rows.batches(self._draws, self._engine.collate_fn), now)
        return self._give(workers.iterate(self._engine, self), now)

    def end_workers(self) -> None:
        """End the processes that read for this loader, and an iteration with them; the next starts new ones."""
        workers.end(self._engine)

    def _give(self, batches: Iterator[Any], now: _Position) -> Iterator[Any]:
        given, unit = now.given, self.rows_per_batch
        for batch in batches:
            given[0] += unit
            self._now = now  # of several iterations at a time, the position is that of the one that moved last
            yield batch
        self._end(now)

    def _give_from_stream(self, batches: Iterator[Any], now: _Position) -> Iterator[Any]:
        for worker, batch in batches:
            if worker == GAP:
                continue
            now.given[worker] += self.rows_per_batch
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

    def _warn_about_replay(self, dataset: Any, rows: int) -> None:
        what = f"Resuming a stream of type {type(dataset).__name__} reads its first {rows} rows again and drops them"
        if is_one_shot(dataset):
            why = (
                ". This iterable can be read only once; resuming may not reproduce its order. Pass a dataset whose "
                "__iter__ restarts."
            )
        elif not samplers.knows_position(dataset):
            why = ". Give the dataset state_dict and load_state_dict, or rows by index, to avoid that."
        elif self.num_workers:
            why = ". Its own position is used with dataloader_num_workers=0 only."
        else:
            why = ", because its shuffle buffer is not part of its state."
        logger.warning("%s%s", what, why)
