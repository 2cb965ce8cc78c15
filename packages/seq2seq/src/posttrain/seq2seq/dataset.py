"""Tokenizes rows of text."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from posttrain.core.data.pipeline import is_stream
from posttrain.core.errors import DataError, did_you_mean
from posttrain.lm.preparation.row_reports import RowReport

logger = logging.getLogger(__name__)

ROWS_PER_BATCH = 1000


def tokenize(
    dataset: Any,
    tokenizer: Any,
    source: str = "source",
    target: str = "target",
    *,
    prefix: str = "",
    max_source_length: int | None = None,
    max_target_length: int | None = None,
    on_bad_rows: str = "drop",
    name: str = "train",
) -> Any:
    """A `datasets` dataset with the columns ``input_ids``, ``attention_mask`` and ``labels``, ragged, and nothing else.

    Args:
        source, target: the columns of text; a column may hold texts by name ({"en": ..., "de": ...}), written
            "translation.en".
        prefix: put before every source.
        max_source_length, max_target_length: in tokens, with the special ones; longer ones are truncated at the end.
        on_bad_rows: "drop" rows in which one of them is no text, with a warning that names them, or "raise".
        name: the dataset's, in that warning.

    Raises:
        DataError: there is no such column, or no row with text, or one without where `on_bad_rows` is "raise".
    """
    columns = list(dataset.column_names or next(iter(dataset), {}))
    for column in (source, target):
        if columns and column.split(".")[0] not in columns:
            near = did_you_mean(column, columns, ".")
            raise DataError(
                f"There is no column {column!r}{near} The rows have {', '.join(columns)}: name two in source_column "
                "and target_column."
            )
    report = RowReport(name)

    def usable(rows: dict[str, list[Any]], numbers: Iterable[int]) -> list[int]:
        """The places of the rows with text; the others are counted."""
        pairs = list(zip(_values(rows, source), _values(rows, target), strict=True))
        faults = [_fault(first, source) or _fault(second, target) for first, second in pairs]
        kept = [place for place, fault in enumerate(faults) if not fault]
        report.rows_in, report.rows_kept = report.rows_in + len(pairs), report.rows_kept + len(kept)
        known = set(report.dropped)
        for number, fault in zip(numbers, faults, strict=True):
            if fault:
                report.count(report.dropped, fault, [number])
        report.judge(on_bad_rows, logger if is_stream(dataset) else None, known)
        return kept

    def encode(rows: dict[str, list[Any]], kept: list[int] | None = None) -> dict[str, list[Any]]:
        texts = [_values(rows, column) for column in (source, target)]
        sources, targets = texts if kept is None else [[values[place] for place in kept] for values in texts]
        if not sources:
            return {"input_ids": [], "attention_mask": [], "labels": []}
        sources = [prefix + text for text in sources]
        inputs = tokenizer(sources, max_length=max_source_length, truncation=max_source_length is not None)
        made = tokenizer(text_target=targets, max_length=max_target_length, truncation=max_target_length is not None)
        kept_names = ("input_ids", "attention_mask")
        return {name: inputs[name] for name in kept_names} | {"labels": made["input_ids"]}

    if is_stream(dataset):
        options = {"batched": True, "with_indices": True, "remove_columns": columns or None}
        return dataset.map(lambda rows, numbers: encode(rows, usable(rows, numbers)), **options)
    texts, kept = dataset.select_columns(list({column.split(".")[0] for column in (source, target)})), []
    for start in range(0, len(texts), ROWS_PER_BATCH):
        rows = texts[start : start + ROWS_PER_BATCH]
        numbers = range(start, min(start + ROWS_PER_BATCH, len(texts)))
        kept += [start + place for place in usable(rows, numbers)]
    if not kept:
        raise report.nothing_left()
    if report.dropped:
        report.log(logger)
        dataset = dataset.select(kept)
    return dataset.map(encode, batched=True, remove_columns=columns)


def _values(rows: dict[str, list[Any]], name: str) -> list[Any]:
    """The column of that name, or of a column of dicts what is under the name behind the dot."""
    column, _, key = name.partition(".")
    values = rows[column]
    return [value.get(key) if isinstance(value, dict) else None for value in values] if key else values


def _fault(value: Any, name: str) -> str:
    if isinstance(value, str):
        return ""
    kind = "null" if value is None else f"of type {type(value).__name__}"
    return f"the column {name!r} is {kind}, and text is needed there"
