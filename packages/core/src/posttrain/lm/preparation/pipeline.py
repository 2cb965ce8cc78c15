"""Prepares datasets of every kind in one pass, caches them, and reports kept, truncated and dropped rows.

`posttrain.lm.text.chat_template.FORMATS` defines the formats of rows, and a `RowPreparation` prepares a row.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.core.data.batch_limits import out_of_range
from posttrain.core.data.pipeline import check_dataset
from posttrain.core.errors import DataError
from posttrain.lm.preparation.row_reports import Faults, RowReport, naming_undecodable
from posttrain.lm.preparation.rows import NO_TOKENS, RowPreparation

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset, Features, IterableDataset

logger = logging.getLogger(__name__)

ROWS_PER_BATCH = 1000
ROWS_PER_STREAMED_BATCH = 256


@dataclass
class TokenReport(RowReport):
    """What became of the rows of a dataset that are tokenized.

    truncated: rows cut to the maximum length. longest: tokens of the longest kept row.
    """

    truncated: int = 0
    longest: int = 0

    def add(self, facts: Mapping[str, np.ndarray], lengths: Mapping[str, np.ndarray]) -> None:
        """Count a batch of prepared rows. Subclasses count the rows that were read, of which one may become several.

        Args:
            facts: what is known of each row, by the names in `RowPreparation.facts`.
            lengths: the tokens of each row in each column of tokens, 0 for dropped rows.
        """
        self.rows_kept += int((facts["fault"] == "").sum())
        self.truncated += int(facts["truncated"].sum())
        self.count_reasons(self.dropped, facts["fault"], facts["row"])

    def count_reasons(self, faults: Faults, reasons: np.ndarray, rows: np.ndarray) -> None:
        """Add each of `rows` to those of its reason; "" is none."""
        for reason in dict.fromkeys(reasons[reasons != ""].tolist()):
            self.count(faults, reason, rows[reasons == reason].tolist())


def prepare_rows(
    dataset: Any,
    prepare: RowPreparation,
    report: TokenReport,
    *,
    what: str,
    num_proc: int | None = None,
    limits: Mapping[str, int] | None = None,
    on_bad_rows: str = "drop",
) -> Any:
    """Turn the rows of a dataset into tokens. Raises a `DataError` for no rows, unknown columns, no row to train on,
    one that cannot be where `on_bad_rows` is "raise", a token outside the model's vocabulary, or a row that is longer
    than its positions.

    Args:
        dataset: a `datasets.Dataset`, a list of dicts, a torch dataset of dicts, or a stream (`IterableDataset` of
            datasets or torch).
        report: gets the counts; its name is that of the dataset in messages.
        what: kind of the prepared rows, part of the name of their cache.
        num_proc: processes for a `datasets.Dataset`; one already uses all the threads of a fast tokenizer.
        limits: of the model's token ids, see `posttrain.core.models.embeddings.id_limits`.
        on_bad_rows: "drop" rows that cannot be trained on, or "raise".

    Returns:
        A `datasets.Dataset` with the columns of `prepare`; or an `IterableDataset` for a stream, whose `report` grows
        as it is read. A dataset on disk is cached next to itself; other processes wait for the first to finish.
    """
    import datasets
    from torch.utils.data import IterableDataset

    name, limits = report.name, dict(limits or {})
    check_dataset(dataset, f"{name}_dataset")
    if isinstance(dataset, IterableDataset) and not isinstance(dataset, datasets.IterableDataset):
        dataset = datasets.IterableDataset.from_generator(dataset.__iter__)
    if isinstance(dataset, datasets.IterableDataset):
        return _prepare_stream(dataset, prepare, report, limits, on_bad_rows)
    if isinstance(dataset, datasets.Dataset):
        prepared = _prepare_arrow(dataset, prepare, name, what, num_proc)
    else:
        prepared = _prepare_list(dataset, prepare, name)
    for batch in prepared.with_format("arrow").iter(100_000):
        _add(batch, prepare, report, limits)
        _check_numbers(batch, prepare, limits, name)
    report.judge(on_bad_rows)
    if report.rows_kept == 0:
        raise report.nothing_left(dataset[0])
    if report.dropped:
        prepared = prepared.select(np.flatnonzero(np.asarray(prepared.data.column("fault")) == ""))
    return prepared.remove_columns(list(prepare.facts))


def counts_of(drafts: Sequence[Any], prepare: RowPreparation) -> dict[str, Any]:
    """What a `TokenReport` counts of rows that are prepared while batches are made."""
    return _counts(_table(drafts, prepare, _features(prepare)), prepare)


def cache_location(dataset: Dataset, *what: object) -> tuple[str | None, str]:
    """The file that caches a transformation of `dataset`, None where it has none on disk, and its fingerprint."""
    from datasets import is_caching_enabled
    from datasets.fingerprint import Hasher

    fingerprint = Hasher.hash([dataset._fingerprint, *what])
    folder = os.path.dirname(dataset.cache_files[0]["filename"]) if dataset.cache_files else None
    if folder is None or not is_caching_enabled() or not os.access(folder, os.W_OK):
        return None, fingerprint
    return os.path.join(folder, f"cache-{fingerprint}.arrow"), fingerprint


def _rows_in(columns: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _features(prepare: RowPreparation, columns: Sequence[str] = ()) -> Features:
    """The types of the columns of prepared rows, where the dataset has `columns`."""
    from datasets import Features, List, Value

    kinds = prepare.columns_made(columns) | prepare.facts
    return Features({name: List(Value("int32")) if kind == "tokens" else Value(kind) for name, kind in kinds.items()})


def _table(drafts: Sequence[Any], prepare: RowPreparation, features: Features) -> pa.Table:
    """Prepared rows as an Arrow table, built from flat arrays: no Python object per token."""
    import pyarrow as pa

    rows, columns = [prepare.values_of(draft) for draft in drafts], {}
    for name in prepare.token_columns:
        values = [NO_TOKENS if row["fault"] else row[name] for row in rows]
        offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in values])]).astype(np.int32)
        columns[name] = pa.ListArray.from_arrays(offsets, np.concatenate([NO_TOKENS, *values]))
    for field in features.arrow_schema:
        if field.name not in columns:
            columns[field.name] = pa.array([row[field.name] for row in rows], field.type)
    return pa.table(columns, schema=pa.schema([pa.field(n, c.type) for n, c in columns.items()]))


def _counts(table: pa.Table, prepare: RowPreparation) -> dict[str, Any]:
    """The arguments of `TokenReport.add` for prepared rows."""
    import pyarrow.compute as pc

    lengths = {name: pc.list_value_length(table.column(name)).to_numpy() for name in prepare.token_columns}
    return {"facts": {name: table.column(name).to_numpy() for name in prepare.facts}, "lengths": lengths}


def _add(table: pa.Table, prepare: RowPreparation, report: TokenReport, limits: dict[str, int]) -> None:
    """Add prepared rows to `report`, and say, of a context once, where one is longer than the `limits`."""
    report.add(**_counts(table, prepare))
    longest, what = report.longest, f"{report.name}: a row has {report.longest:,} tokens, and the model"
    if longest > (positions := limits.get("positions", longest)):
        raise DataError(f"{what} has positions for {positions:,}. Set max_length={positions}, or filter such rows.")
    if longest > limits.get("context", longest):
        context = limits.pop("context")
        logger.warning(
            "%s was made to read %s and has not learned later positions. Set max_length=%d, or stretch the positions: "
            "model_init_kwargs={'rope_parameters': {'rope_type': 'yarn', 'factor': ...}}.",
            what,
            f"{context:,}",
            context,
        )


def _check_numbers(table: pa.Table, prepare: RowPreparation, limits: Mapping[str, int], name: str) -> None:
    """Reject prepared rows with tokens outside the model's vocabulary."""
    import pyarrow.compute as pc

    for column in prepare.token_columns:
        kind = "labels" if column == "labels" else "input_ids"
        if kind not in limits:
            continue
        tokens = pc.list_flatten(table.column(column)).to_numpy()
        wrong = (tokens >= limits[kind]) | (tokens < 0)
        if kind == "labels":
            wrong &= tokens != -100
        if not wrong.any():
            continue
        first = int(wrong.argmax())
        lengths = pc.list_value_length(table.column(column)).to_numpy()
        row = int(np.searchsorted(np.cumsum(lengths), first, side="right"))
        where = f" in row {table.column('row')[row].as_py()}"
        raise DataError(f"{name}: {out_of_range(kind, int(tokens[first]), limits[kind], where)}")


def _prepare_arrow(dataset: Dataset, prepare: RowPreparation, name: str, what: str, num_proc: int | None) -> Dataset:
    from filelock import FileLock

    dataset = dataset.with_format(None)
    read = prepare.columns_read(dataset.column_names, name)
    dataset = dataset if read is None else dataset.select_columns(read)
    cache_file, fingerprint = cache_location(dataset, what, prepare.content())
    features = _features(prepare, dataset.column_names)

    def batch_of(columns: Mapping[str, list[Any]], indices: list[int]) -> pa.Table:
        return _table(prepare(_rows_in(columns), indices), prepare, features)

    # Whoever comes second reads what the first one wrote.
    alone = contextlib.nullcontext() if cache_file is None else FileLock(cache_file + ".lock")
    with naming_undecodable(dataset, name), alone:
        return dataset.map(
            batch_of,
            batched=True,
            batch_size=ROWS_PER_BATCH,
            with_indices=True,
            remove_columns=dataset.column_names,
            features=features,
            num_proc=num_proc,
            cache_file_name=cache_file,
            keep_in_memory=cache_file is None,
            new_fingerprint=fingerprint,
            desc=f"Preparing {name}",
        )


def _prepare_list(rows: Any, prepare: RowPreparation, name: str) -> Dataset:
    import pyarrow as pa
    from datasets import Dataset

    first = next((row for row in (rows[i] for i in range(len(rows))) if isinstance(row, Mapping)), None)
    if first is not None:
        prepare.columns_read(list(first), name)
    features, tables = _features(prepare, list(first or ())), []
    for start in range(0, len(rows), ROWS_PER_BATCH):
        indices = range(start, min(start + ROWS_PER_BATCH, len(rows)))
        tables.append(_table(prepare([rows[i] for i in indices], indices), prepare, features))
    return Dataset(pa.concat_tables(tables).cast(features.arrow_schema))


def _prepare_stream(
    dataset: IterableDataset, prepare: RowPreparation, report: TokenReport, limits: dict[str, int], on_bad_rows: str
) -> IterableDataset:
    import pyarrow.compute as pc

    columns = dataset.column_names or list(next(iter(dataset), {}))
    if not columns:
        raise DataError(f"{report.name}_dataset has no rows. If it was filtered, see what the filter kept.")
    prepare.columns_read(columns, report.name)
    features = _features(prepare, columns)
    kept = [name for name in features if name not in prepare.facts]

    def batch_of(batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        rows = _rows_in(batch)
        table = _table(prepare(rows, indices), prepare, features)
        if indices and indices[0] == 0:  # another pass over the stream
            report.clear()
        known = len(report.dropped)
        _add(table, prepare, report, limits)
        report.judge(on_bad_rows)
        _check_numbers(table, prepare, limits, report.name)
        if len(report.dropped) > known:  # a new reason
            report.log(logger)
        is_last = len(indices) < ROWS_PER_STREAMED_BATCH
        if report.rows_kept == 0 and (is_last or report.rows_in >= ROWS_PER_BATCH):
            raise report.nothing_left(rows[0])
        table = table.filter(pc.equal(table.column("fault"), "")).select(kept)
        later = {name: [None] * len(table) for name in batch if name not in columns}  # which the first row did not have
        return table.to_pydict() | later

    return dataset.map(
        batch_of,
        batched=True,
        batch_size=ROWS_PER_STREAMED_BATCH,
        with_indices=True,
        remove_columns=columns,
        features=type(features)({name: features[name] for name in kept}),
    )
