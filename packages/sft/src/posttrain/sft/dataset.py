"""Tokenizes and labels datasets, and reports kept, truncated and dropped rows.

`posttrain.sft.rows` prepares a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.core.errors import DataError
from posttrain.lm.preparation.pipeline import prepare_rows
from posttrain.sft.report import DataReport
from posttrain.sft.rows import Preparation


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
    import datasets

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
    if isinstance(dataset, datasets.Dataset) and dataset.format["type"] == "custom":
        raise DataError(
            f"{name}: the dataset has a transform (set_transform or Dataset.with_transform()), which runs when "
            'a row is read. Apply it with dataset.map, or set dataset_kwargs={"skip_prepare_dataset": True} and let it '
            "return trainer-ready rows, with input_ids and labels."
        )
    report = DataReport(name)
    options: dict[str, Any] = {"num_proc": num_proc, "limits": limits, "on_bad_rows": on_bad_rows}
    return prepare_rows(dataset, prepare, report, what="sft", **options), report


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
