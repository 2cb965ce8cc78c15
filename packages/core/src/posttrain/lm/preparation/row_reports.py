"""Counts the rows of a dataset that cannot be trained on, and names them by their numbers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from posttrain.core.data.samplers import has_places
from posttrain.core.errors import DataError

ROWS_SHOWN = 5
#: Characters of an example row in an error.
SHOWN = 400
#: Rows, all of them dropped, after which a dataset that is read along the way is given up.
ENOUGH = 256
#: Parts of the reasons for which rows are dropped because an argument says so, and not because they are unusable.
ASKED_FOR = ("longer than max_length", "in a piece of a row that was split")

Faults = dict[str, tuple[int, list[int]]]


@contextlib.contextmanager
def naming_undecodable(dataset: Any, name: str) -> Iterator[None]:
    """Name the row whose bytes are no UTF-8, if the work in this context failed on one and `dataset` has numbered rows.
    Raises a `DataError` instead of Python's error.
    """
    try:
        yield
    except UnicodeDecodeError:
        for number in range(len(dataset) if has_places(dataset) else 0):
            try:
                dataset[number]
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{name}: row {number} holds bytes that are no text in UTF-8 ({error}). Correct or filter that "
                    "row, or convert the file to UTF-8."
                ) from None
        raise


@dataclass
class RowReport:
    """Counts the rows of a dataset that were kept and dropped; extended by the trainers that prepare rows.

    rows_in: rows read. rows_kept: rows to train on. dropped: reason -> (count, first rows).
    """

    #: What to do about rows that were dropped, by a part of the reason.
    remedies: ClassVar[Mapping[str, str]] = {}
    #: Counts a batch of prepared rows.
    add: ClassVar[Callable[..., None]]

    name: str = "train"
    rows_in: int = 0
    rows_kept: int = 0
    dropped: Faults = field(default_factory=dict)
    _logged: int = field(default=0, repr=False, compare=False)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    @staticmethod
    def count(faults: Faults, reason: str, rows: Iterable[int]) -> None:
        """Add `rows` to those of `reason`."""
        (number, first), more = faults.get(reason, (0, [])), list(rows)
        faults[reason] = (number + len(more), [*first, *more][:ROWS_SHOWN])

    def add_read(
        self, facts: Mapping[str, Any], on_bad_rows: str, logger: logging.Logger, rows: int | None = None
    ) -> None:
        """``add(**facts)`` of rows that are prepared while batches are made, and `judge`. `rows`: of the dataset; None:
        an unknown number. Raises a `DataError` where all of them, or the first `ENOUGH`, were dropped.
        """
        known = set(self.dropped)
        self.add(**facts)
        self.judge(on_bad_rows, logger, known)
        if self.rows_kept == 0 and self.rows_in >= min(rows or ENOUGH, ENOUGH):
            raise self.nothing_left()

    def nothing_left(self, row: Any = None) -> DataError:
        """What to raise where no row is kept; `row` is shown as an example."""
        shown = str(row)
        shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]} ... ({len(shown):,} characters)"
        example = [] if row is None else [f"  for example: {shown}"]
        return DataError("\n".join([f"{self.name}: no row can be trained on.", *self.lines()[1:], *example]))

    def clear(self) -> None:
        """Forget all rows."""
        vars(self).update(vars(type(self)(self.name)))

    def lines(self) -> list[str]:
        """The report as sentences for the log."""
        return [f"{self.name}: {self.rows_in:,} rows read, {self.rows_kept:,} kept", *self.lines_of("dropped")]

    def lines_of(self, what: str, faults: Faults | None = None) -> list[str]:
        """A line for each reason in `faults`, by default of the dropped rows."""
        lines = []
        for reason, (count, first) in (self.dropped if faults is None else faults).items():
            more = ", ..." if count > len(first) else ""
            remedy = next((text for part, text in self.remedies.items() if part in reason), "")
            lines.append(f"  {what} {count:,}: {reason} (rows {', '.join(map(str, first))}{more}){remedy}")
        return lines

    @property
    def is_wrong(self) -> bool:
        """Whether the user should look at it."""
        return bool(self.dropped)

    def log(self, logger: logging.Logger) -> None:
        """Log the report, as a warning where rows were dropped or something looks wrong."""
        self._logged = self._num_dropped
        logger.log(logging.WARNING if self.is_wrong else logging.INFO, "%s", "\n".join(self.lines()))

    def log_more(self, logger: logging.Logger) -> None:
        """`log` again if more rows were dropped since: those of streams and images are read while training."""
        if self._num_dropped > self._logged:
            self.log(logger)

    def judge(self, on_bad_rows: str, logger: logging.Logger | None = None, known: Iterable[str] = ()) -> None:
        """Refuse rows that were dropped for a fault, if they are to be; else warn of reasons that are not `known`.
        Raises a `DataError` that names the first rows of each reason.
        """
        bad = {why: rows for why, rows in self.dropped.items() if not any(part in why for part in ASKED_FOR)}
        if bad and on_bad_rows == "raise":
            total = f"{sum(count for count, _ in bad.values()):,} of {self.rows_in:,} rows"
            summary = f"{self.name}: {total} cannot be trained on, and on_bad_rows=raise. Correct or filter such rows."
            raise DataError("\n".join([summary, *self.lines_of("refused", bad)]))
        if logger is not None:
            for reason in self.dropped.keys() - set(known):
                first = self.dropped[reason][1][0]
                logger.warning("%s: row %d is dropped, as others will be for this reason: %s", self.name, first, reason)

    @property
    def _num_dropped(self) -> int:
        return sum(count for count, _ in self.dropped.values())
