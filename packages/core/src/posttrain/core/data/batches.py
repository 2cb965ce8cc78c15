"""Reads rows and makes batches of them: names the rows in errors, checks ids and labels, and marks fillers."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from posttrain.core.data.batch_limits import check_limits
from posttrain.core.data.samplers import Draw, follows_epochs, seed_cpu
from posttrain.core.data.streams import GAP
from posttrain.core.errors import DataError

logger = logging.getLogger(__name__)

#: The modules of collators that add nothing to rows but padding.
PADDING_COLLATORS = ("posttrain.core.data.collators", "transformers.data.data_collator")
#: Rows that an error names at most.
ROWS_NAMED = 8


class Read(NamedTuple):
    """The rows of a `Draw`."""

    rows: list[Any]
    indices: list[int]
    is_filler: bool
    kept: int | None


class Rows(Dataset[Read]):
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
        return Read(rows, draw.indices, draw.is_filler, draw.kept)

    def batches(self, draws: Iterable[Draw], collate: Callable[[Read], Any]) -> Iterator[Any]:
        """The batches of `draws`, read and collated in this process."""
        for draw in draws:
            yield collate(self.__getitems__(draw))


class _Batch(dict[str, Any]):
    """A batch that can be used as one of transformers' tokenizers."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, *args: Any, **kwargs: Any) -> _Batch:
        moved = copy.copy(self)
        moved.update((k, value.to(*args, **kwargs)) for k, value in self.items() if hasattr(value, "to"))
        return moved


class Filler(_Batch):
    """A batch that only keeps this process in step with the others: it must be computed, and count for nothing."""


class FillerList(list[Any]):
    """A `Filler` for batches that are lists or tuples."""


def is_filler(batch: Any) -> bool:
    """Whether `batch` only keeps processes in step and has no weight."""
    return isinstance(batch, (Filler, FillerList))


class Repeating(_Batch):
    """A batch of `size` rows, the first `kept` of which count, for a loss that wants as many rows on each process: the
    others are repeated.
    """

    def __init__(self, batch: Mapping[str, Any], kept: int | None = None, size: int = 0) -> None:
        super().__init__(batch)
        self.kept, self.size = kept, size

    def counted(self) -> dict[str, Any]:
        """The batch without the repeated rows."""
        return {name: self.cut(value) for name, value in self.items()}

    def cut(self, value: Any) -> Any:
        """`value` without those of the repeated rows, where it has one for each row."""
        has_rows = value.ndim > 0 if isinstance(value, torch.Tensor) else isinstance(value, (list, tuple))
        return value[: self.kept] if has_rows and len(value) == self.size else value


class Present:
    """How many rows count of the batch that this process has at hand, None for all: loaders say it, and loops that read
    ahead.
    """

    kept: int | None = None

    def set(self, batch: Any) -> None:
        self.kept = 0 if is_filler(batch) else batch.kept if isinstance(batch, Repeating) else None


PRESENT = Present()


def at_hand(batches: Iterable[Any]) -> Iterator[Any]:
    """`batches`, where `PRESENT` knows each until the next is asked for."""
    try:
        for batch in batches:
            PRESENT.set(batch)
            yield batch
    finally:
        PRESENT.kept = None


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


class Collate:
    """Runs the user's collator, checks and marks its batch, and adds the worker that a streamed batch is from."""

    def __init__(
        self, collate_fn: Callable[[Any], Any], streamed: bool, limits: Mapping[str, int] | None = None
    ) -> None:
        self.collate_fn, self.streamed = collate_fn, streamed
        self.limits = {name: limit for name, limit in (limits or {}).items() if name != "labels_per_token"}
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
        if self.streamed and read.worker == GAP:
            return GAP, None
        rows, indices = read.rows, None if self.streamed else read.indices
        with naming_rows(indices, self.failure, rows):
            batch = self.collate_fn(rows)
            if batch is None:
                raise DataError("it returned None. Does it lack a return statement?")
            if self.limits:
                check_limits(batch, self.limits, indices)
            if self.looks_at_labels:
                self._compare_labels(rows, batch, indices)
        batch = as_filler(batch) if read.is_filler else batch
        if indices is not None and read.kept is not None and not read.is_filler and isinstance(batch, Mapping):
            batch = Repeating(batch, read.kept, len(rows))
        return (read.worker, batch) if self.streamed else batch

    def _compare_labels(self, rows: Any, batch: Any, indices: list[int] | None) -> None:
        """Reject rows with more or fewer labels than tokens, which padding hides; of a user's collator, warn once."""
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


@contextlib.contextmanager
def naming_rows(indices: list[int] | None, what: str, rows: Any = None) -> Iterator[None]:
    """Adds the rows to an error in this context, as a `DataError` if the error's text is too short."""
    try:
        yield
    except Exception as error:
        indices = indices or []
        shown = ", ".join(map(str, indices[:ROWS_NAMED])) + (", ..." if len(indices) > ROWS_NAMED else "")
        which = f"Rows {shown} of the dataset" if indices else "Rows of the stream"
        # A StopIteration, as of a `next` in `__getitem__`, would end the loop over the batches without a word.
        unclear = (LookupError, TypeError, AttributeError, ValueError, StopIteration)
        if isinstance(error, unclear) or type(error) is RuntimeError:
            reason = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}."
            raise DataError(f"{which} {what}: {reason}{_describe(rows)}") from error
        error.add_note(f"{which} {what}.")
        raise


def _describe(rows: Any) -> str:
    if not isinstance(rows, (list, tuple)) or not rows:
        return ""
    if not isinstance(rows[0], Mapping):
        return f" The first of them is of type {type(rows[0]).__name__}."
    columns = (f"{name} ({type(value).__name__})" for name, value in rows[0].items())
    return f" The first of them holds {', '.join(columns) or 'nothing'}."
