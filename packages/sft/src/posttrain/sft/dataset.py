"""Tokenizes and labels datasets, and reports kept, truncated and dropped rows.

`posttrain.sft.rows` prepares a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.core.errors import DataError
from posttrain.lm.preparation.pipeline import prepare_rows
from posttrain.sft.report import DataReport
from posttrain.sft.rows import Preparation


def prepare_dataset(
    dataset: Any,
    tokenizer: Any,
    *,
    num_proc: int | None = None,
    limits: Mapping[str, int] | None = None,
    on_bad_rows: str = "drop",
    name: str = "train",
    **options: Any,
) -> tuple[Any, DataReport]:
    """Tokenize and label a dataset.

    Args:
        dataset, num_proc, limits, on_bad_rows: as for `posttrain.lm.preparation.pipeline.prepare_rows`.
        tokenizer: or the processor that holds it.
        name: the dataset's, in the report.
        options: of `Preparation`.

    Returns:
        As `prepare_rows`, with the columns ``input_ids`` and ``labels`` (-100 where not trained on), and the report.

    Raises:
        DataError: as `prepare_rows`, or the dataset has a transform.
    """
    import datasets

    prepare, report = Preparation(tokenizer, **options), DataReport(name)
    if isinstance(dataset, datasets.Dataset) and dataset.format["type"] == "custom":
        raise DataError(
            f"{name}: the dataset has a transform (set_transform or Dataset.with_transform()), which runs when "
            'a row is read. Apply it with dataset.map, or set dataset_kwargs={"skip_prepare_dataset": True} and let it '
            "return trainer-ready rows, with input_ids and labels."
        )
    how: dict[str, Any] = {"num_proc": num_proc, "limits": limits, "on_bad_rows": on_bad_rows}
    return prepare_rows(dataset, prepare, report, what="sft", **how), report


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
