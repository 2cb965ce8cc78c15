"""Tokenizes rows of text."""

from __future__ import annotations

from typing import Any

from posttrain.core.errors import DataError, did_you_mean


def tokenize(
    dataset: Any,
    tokenizer: Any,
    source: str = "source",
    target: str = "target",
    *,
    prefix: str = "",
    max_source_length: int | None = None,
    max_target_length: int | None = None,
) -> Any:
    """A `datasets` dataset with the columns ``input_ids``, ``attention_mask`` and ``labels``, ragged, and nothing else.

    Args:
        source, target: the columns of text; a column may hold texts by name ({"en": ..., "de": ...}), written
            "translation.en".
        prefix: put before every source.
        max_source_length, max_target_length: in tokens, with the special ones; longer ones are truncated at the end.

    Raises:
        DataError: there is no such column, or it holds something other than text.
    """
    columns = list(dataset.column_names or [])
    for name in (source, target):
        if columns and name.split(".")[0] not in columns:
            near = did_you_mean(name, columns)
            raise DataError(f"There is no column {name!r}{near or '.'} The rows have {', '.join(columns)}.")

    def encode(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        sources = [prefix + text for text in _texts(rows, source)]
        inputs = tokenizer(sources, max_length=max_source_length, truncation=max_source_length is not None)
        targets = tokenizer(
            text_target=_texts(rows, target), max_length=max_target_length, truncation=max_target_length is not None
        )
        return {
            "input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "labels": targets["input_ids"]
        }  # fmt: skip

    return dataset.map(encode, batched=True, remove_columns=columns or None)


def _texts(rows: dict[str, list[Any]], name: str) -> list[str]:
    column, _, key = name.partition(".")
    values = rows[column]
    if key:
        values = [value.get(key) if isinstance(value, dict) else None for value in values]
    for number, value in enumerate(values):
        if not isinstance(value, str):
            raise DataError(
                f"The column {name!r} holds {value!r} in row {number} of a batch, and text is needed there."
            )
    return values
