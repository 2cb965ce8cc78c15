"""Tokenizes and labels datasets in one pass and reports kept, truncated and dropped rows.

`posttrain.lm.text.chat_template.FORMATS` defines the formats of rows, and `posttrain.sft.rows` prepares a row. This
module handles kinds of datasets and the cache.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.core.data.batch_limits import out_of_range
from posttrain.core.data.pipeline import check_dataset
from posttrain.core.data.row_reports import naming_undecodable
from posttrain.core.errors import DataError
from posttrain.lm.text import chat_template, tokenization
from posttrain.sft.packing import cache_location
from posttrain.sft.report import FACTS, DataReport
from posttrain.sft.rows import Draft, Preparation

logger = logging.getLogger(__name__)

SFT_FORMATS = ("tokenized", "prompt_completion", "language_modeling")
ROWS_PER_BATCH = 1000
ROWS_PER_STREAMED_BATCH = 256
SHOWN = 400  # characters of a row in an error


def prepare_dataset(
    dataset: Any,
    tokenizer: Any,
    *,
    text_field: str = "text",
    max_length: int | None = None,
    truncation: str = "keep_start",
    too_long: str = "truncate",
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
    train_on: str | Sequence[str] | None = None,
    formatting_func: Callable[[dict[str, Any]], Any] | None = None,
    eos_token: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    num_proc: int | None = None,
    limits: Mapping[str, int] | None = None,
    on_bad_rows: str = "drop",
    name: str = "train",
) -> tuple[Any, DataReport]:
    """Tokenize and label a dataset.

    Args:
        dataset: a `datasets.Dataset`, a list of dicts, a torch dataset of dicts, or a stream (`IterableDataset` of
            datasets or torch). Text, messages (also ShareGPT's), prompt and completion, or tokens; other columns are
            dropped.
        tokenizer: or the processor that holds it.
        text_field: the column of texts.
        max_length: tokens a row may have, None for any number.
        truncation: "keep_start" or "keep_end" of a row that is too long.
        too_long: how it is handled: "truncate", "drop", "split" into rows (each begins with the last token of the one
            before, which it is not trained on), or "error".
        completion_only_loss: train on completions only; None: if there are completions.
        assistant_only_loss: train on the assistant's messages only; the same as ``train_on="assistant"``.
        train_on: the messages of a conversation to train on, see `posttrain.lm.text.chat_template.message_choice`.
        formatting_func: makes a text, a list of texts or a conversation of a row.
        eos_token: ends texts and completions; the tokenizer's by default. Conversations end as in their template.
        chat_template_kwargs: variables for the chat template; a row's own column of that name takes precedence.
        num_proc: processes for a `datasets.Dataset`; one already uses all the threads of a fast tokenizer.
        limits: of the model's token ids, see `posttrain.core.models.embeddings.id_limits`.
        on_bad_rows: "drop" rows that cannot be trained on, or "raise".
        name: the dataset's, in the report.

    Returns:
        A `datasets.Dataset` with ``input_ids`` and ``labels`` (-100 where not trained on), or for a stream an
        `IterableDataset`, and the report, which for a stream grows as it is read. A dataset on disk is cached next to
        itself; other processes wait for the first to finish.

    Raises:
        DataError: no rows, unknown columns, no row to train on, one that cannot be where `on_bad_rows` is "raise", or a
            token outside the model's vocabulary.
    """
    prepare = Preparation(
        tokenizer,
        text_field=text_field,
        max_length=max_length,
        truncation=truncation,
        too_long=too_long,
        completion_only_loss=completion_only_loss,
        assistant_only_loss=assistant_only_loss,
        train_on=train_on,
        formatting_func=formatting_func,
        eos_token=eos_token,
        chat_template_kwargs=chat_template_kwargs,
    )
    report = DataReport(name)
    import datasets
    from torch.utils.data import IterableDataset

    check_dataset(dataset, f"{name}_dataset")
    if isinstance(dataset, Iterator):
        raise TypeError(
            f"{name}_dataset is a {type(dataset).__name__}, which gives its rows once only. Pass list(...) of it, or "
            "datasets.IterableDataset.from_generator(<the function that makes it>)."
        )
    if isinstance(dataset, IterableDataset) and not isinstance(dataset, datasets.IterableDataset):
        dataset = datasets.IterableDataset.from_generator(_rows_of, gen_kwargs={"dataset": dataset})
    if isinstance(dataset, datasets.IterableDataset):
        return _prepare_stream(dataset, prepare, report, limits or {}, on_bad_rows), report
    if isinstance(dataset, datasets.Dataset):
        with naming_undecodable(dataset, report.name):
            prepared = _prepare_arrow(dataset, prepare, report, num_proc)
    else:
        prepared = _prepare_list(dataset, prepare, name)
    for batch in prepared.with_format("arrow").iter(100_000):
        report.add(*_facts(batch))
        _check_numbers(batch, limits or {}, name)
    report.judge(on_bad_rows)
    if report.rows_kept == 0:
        raise _nothing_left(report, dataset[0])
    if report.dropped:
        prepared = prepared.select(np.flatnonzero(np.asarray(prepared.data.column("fault")) == ""))
    return prepared.remove_columns(list(FACTS)), report


def _nothing_left(report: DataReport, row: Any) -> DataError:
    """What to raise where no row is kept; `row` is shown as an example."""
    shown = str(row)
    shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]} ... ({len(shown):,} characters)"
    lines = [f"{report.name}: no row can be trained on.", *report.lines()[1:], f"  for example: {shown}"]
    return DataError("\n".join(lines))


def check_ready(dataset: Any, name: str) -> None:
    """Reject rows with masks but no labels if preparation, which makes labels from masks, is skipped."""
    columns = getattr(dataset, "column_names", None) or []
    masks = sorted({"completion_mask", "assistant_masks"} & set(columns))
    if masks and "labels" not in columns:
        raise DataError(
            f"{name}: the rows have {' and '.join(masks)} but no labels, and skip_prepare_dataset=True skips the "
            "preparation that makes labels from masks, so every token would be trained on. Add a 'labels' column, "
            "-100 at tokens without a loss, or leave skip_prepare_dataset out."
        )


def _rows_of(dataset: Any) -> Iterator[Any]:
    yield from dataset


def _check_columns(columns: list[str], prepare: Preparation, name: str) -> list[str]:
    """The columns to read.

    Raises:
        DataError: the columns fit no format, or not the configured loss.
    """
    if prepare.formatting_func is not None:
        return columns
    known = {"text" if c == prepare.text_field else c for c in columns if c != "text" or c == prepare.text_field}
    try:
        kind = chat_template.detect_format(known, among=SFT_FORMATS)
    except DataError as error:
        raise DataError(f"{name}: {error} The column of texts is named by dataset_text_field.") from None
    if kind == "tokenized" and {"seq_lengths", "position_ids"} & set(columns):
        raise DataError(
            f"{name}: the rows are packed already (they have seq_lengths or position_ids). "
            'Set dataset_kwargs={"skip_prepare_dataset": True}.'
        )
    if kind == "language_modeling" and prepare.completion_only_loss:
        raise DataError(
            f"{name}: completion_only_loss=True needs the columns prompt and completion; found {sorted(columns)}. "
            "For conversations set assistant_only_loss=True."
        )
    wanted = {
        "tokenized": {"input_ids", "labels", "completion_mask", "assistant_masks"},
        "prompt_completion": {"prompt", "completion", "tools", "chat_template_kwargs"},
        "language_modeling": {"messages", "conversations", prepare.text_field, "tools", "chat_template_kwargs"},
    }
    return [column for column in columns if column in wanted[kind]]


def _features():
    from datasets import Features, List, Value

    tokens = {"input_ids": List(Value("int32")), "labels": List(Value("int32"))}
    kinds = {"row": "int64", "fault": "string", "trained": "int32"}
    return Features(tokens | {name: Value(kinds.get(name, "bool")) for name in FACTS})


def _table(drafts: list[Draft]):
    """Prepared rows as an Arrow table of `_features`, built from flat arrays: no Python object per token."""
    import pyarrow as pa

    columns = {}
    for name in ("input_ids", "labels"):
        rows = [np.empty(0, np.int32) if d.fault else d.ids if name == "input_ids" else d.labels for d in drafts]
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
        columns[name] = pa.ListArray.from_arrays(offsets, np.concatenate([np.empty(0, np.int32), *rows]))
    schema = _features().arrow_schema
    for fact in FACTS:
        columns[fact] = pa.array([getattr(draft, fact) for draft in drafts], schema.field(fact).type)
    return pa.table(columns, schema=pa.schema([pa.field(n, c.type) for n, c in columns.items()]))


def _facts(table: Any) -> tuple[dict[str, np.ndarray], np.ndarray]:
    import pyarrow.compute as pc

    lengths = pc.list_value_length(table.column("input_ids")).to_numpy()
    return {name: table.column(name).to_numpy() for name in FACTS}, lengths


def _check_numbers(table: Any, limits: Mapping[str, int], name: str) -> None:
    """Reject prepared rows with tokens outside the model's vocabulary."""
    import pyarrow.compute as pc

    for column in ("input_ids", "labels"):
        if column not in limits:
            continue
        tokens = pc.list_flatten(table.column(column)).to_numpy()
        wrong = (tokens >= limits[column]) | (tokens < 0)
        if column == "labels":
            wrong &= tokens != -100
        if not wrong.any():
            continue
        first = int(wrong.argmax())
        row = int(np.searchsorted(np.cumsum(_facts(table)[1]), first, side="right"))
        where = f" in row {table.column('row')[row].as_py()}"
        raise DataError(f"{name}: {out_of_range(column, int(tokens[first]), limits[column], where)}")


def _prepare_arrow(dataset: Any, prepare: Preparation, report: DataReport, num_proc: int | None) -> Any:
    from filelock import FileLock

    if dataset.format["type"] == "custom":
        raise DataError(
            f"{report.name}: the dataset has a transform (set_transform or Dataset.with_transform()), which runs when "
            'a row is read. Apply it with dataset.map, or set dataset_kwargs={"skip_prepare_dataset": True} and let it '
            "return trainer-ready rows, with input_ids and labels."
        )
    dataset = dataset.with_format(None)
    if prepare.formatting_func is None:
        dataset = dataset.select_columns(_check_columns(dataset.column_names, prepare, report.name))
    cache_file, fingerprint = cache_location(dataset, "sft", content_of(prepare))

    def batch_of(columns: Mapping[str, list[Any]], indices: list[int]):
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return _table(prepare(rows, indices))

    def run():
        return dataset.map(
            batch_of,
            batched=True,
            batch_size=ROWS_PER_BATCH,
            with_indices=True,
            remove_columns=dataset.column_names,
            features=_features(),
            num_proc=num_proc,
            cache_file_name=cache_file,
            keep_in_memory=cache_file is None,
            new_fingerprint=fingerprint,
            desc=f"Preparing {report.name}",
        )

    if cache_file is None:
        return run()
    with FileLock(cache_file + ".lock"):  # whoever comes second reads what the first one wrote
        return run()


def _prepare_list(rows: Any, prepare: Preparation, name: str) -> Any:
    import pyarrow as pa
    from datasets import Dataset

    first = next((row for row in (rows[i] for i in range(len(rows))) if isinstance(row, Mapping)), None)
    if first is not None:
        _check_columns(list(first), prepare, name)
    tables = []
    for start in range(0, len(rows), ROWS_PER_BATCH):
        indices = range(start, min(start + ROWS_PER_BATCH, len(rows)))
        tables.append(_table(prepare([rows[i] for i in indices], indices)))
    return Dataset(pa.concat_tables(tables).cast(_features().arrow_schema))


def _prepare_stream(
    dataset: Any, prepare: Preparation, report: DataReport, limits: Mapping[str, int], on_bad_rows: str
) -> Any:
    columns = dataset.column_names or list(next(iter(dataset), {}))
    if not columns:
        raise DataError(f"{report.name}_dataset has no rows. If it was filtered, see what the filter kept.")
    _check_columns(columns, prepare, report.name)

    def batch_of(batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        drafts = prepare(rows, indices)
        if indices and indices[0] == 0:  # another pass over the stream
            report.clear()
        table, dropped_before = _table(drafts), len(report.dropped)
        report.add(*_facts(table))
        report.judge(on_bad_rows)
        _check_numbers(table, limits, report.name)
        if len(report.dropped) > dropped_before:  # a new reason
            report.tell(logger)
        is_last = len(indices) < ROWS_PER_STREAMED_BATCH
        if report.rows_kept == 0 and (is_last or report.rows_in >= ROWS_PER_BATCH):
            raise _nothing_left(report, rows[0])
        kept = [draft for draft in drafts if not draft.fault]
        return {"input_ids": [d.ids.tolist() for d in kept], "labels": [d.labels.tolist() for d in kept]}

    features = _features()
    return dataset.map(
        batch_of,
        batched=True,
        batch_size=ROWS_PER_STREAMED_BATCH,
        with_indices=True,
        remove_columns=columns,
        features=type(features)({name: features[name] for name in ("input_ids", "labels")}),
    )


def content_of(prepare: Preparation) -> str:
    """Everything that affects the prepared rows, the tokenizer included, as a string to hash."""
    from datasets.fingerprint import Hasher

    tokenizer = prepare.tokenizer
    arguments = {
        item.name: getattr(prepare, item.name)
        for item in dataclasses.fields(prepare)
        if item.name not in ("tokenizer", "formatting_func")
    }
    if getattr(tokenizer, "is_fast", False):
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        vocabulary = backend.to_str()
    else:
        vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    rendered_by = [tokenizer.chat_template, special, tokenization.REVISION]
    return Hasher.hash([vocabulary, *rendered_by, arguments, prepare.formatting_func])
