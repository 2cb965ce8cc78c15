"""Rows for distillation: prompts, with completions where there are any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.core.data import pipeline
from posttrain.core.errors import DataError
from posttrain.lm.text import chat_template


def with_prompts(dataset: Any, name: str) -> Any:
    """Dataset `name`, or each of a dict of them, whose rows of ``messages`` are turned into prompt and completion.

    Raises:
        DataError: the messages of a row are no conversation; names the row.
    """
    if isinstance(dataset, Mapping):
        return {part: with_prompts(rows, f"{name}[{part!r}]") for part, rows in dataset.items()}
    row = _first(dataset)
    if row is None or "prompt" in row or "messages" not in row:
        return dataset

    def numbered(row: Mapping[str, Any], number: int) -> dict[str, Any]:
        try:
            return prompt_and_completion(row)
        except DataError as error:
            raise DataError(f"{name}: {error} (rows {number}). Correct or filter that row.") from None

    if hasattr(dataset, "map"):
        return dataset.map(numbered, with_indices=True, remove_columns=["messages"])
    return [numbered(row, number) for number, row in enumerate(dataset)]


def prompt_and_completion(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of ``messages`` with ``prompt`` and ``completion``, the assistant's last turn, instead; others stay."""
    if "prompt" in row or "messages" not in row:
        return dict(row)
    messages = chat_template.to_messages(row["messages"])
    rest = {name: value for name, value in row.items() if name != "messages"}
    if messages[-1]["role"] != "assistant":
        return rest | {"prompt": messages, "completion": None}
    return rest | {"prompt": messages[:-1], "completion": messages[-1:]}


def has_completions(dataset: Any) -> bool:
    """Whether the first row of `dataset` has a completion; True where no row can be looked at."""
    row = _first(dataset)
    return row is None or row.get("completion") is not None


def _first(dataset: Any) -> Any:
    if dataset is None or pipeline.is_stream(dataset) or not pipeline.has_length(dataset) or not len(dataset):
        return None
    row = dataset[0]
    return row if isinstance(row, Mapping) else None
