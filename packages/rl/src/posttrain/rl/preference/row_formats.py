"""Functions that bring preferences into another format by hand, under the names that scripts for trl call.

No trainer here needs them: each finds prompts and takes pairs apart itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.core.data.samplers import is_stream
from posttrain.rl.preference.rows import PAIR, extract_prompt

__all__ = ["extract_prompt", "maybe_extract_prompt", "maybe_unpair_preference_dataset", "unpair_preference_dataset"]


def maybe_extract_prompt(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """`extract_prompt` of a pair without a prompt; any other row as it is."""
    return row if row.get("prompt") is not None or not {*PAIR} <= row.keys() else extract_prompt(row)


def unpair_preference_dataset(dataset: Any, num_proc: int | None = None, desc: str | None = None) -> Any:
    """Two rows of each pair: prompt, completion and label, True for the chosen one. Other columns are kept.

    Args:
        dataset: a Dataset, an IterableDataset or a DatasetDict. Of each 1,000 pairs the chosen ones come first.
        num_proc: processes that work on it. desc: beside the progress bar. Neither is used for a stream.
    """
    known = {} if is_stream(_first(dataset)) else {"num_proc": num_proc, "desc": desc}
    return dataset.map(_unpaired, batched=True, remove_columns=list(PAIR), **known)


def maybe_unpair_preference_dataset(dataset: Any, num_proc: int | None = None, desc: str | None = None) -> Any:
    """`unpair_preference_dataset` of a dataset of pairs; any other as it is."""
    return unpair_preference_dataset(dataset, num_proc, desc) if {*PAIR} <= _columns(dataset) else dataset


def _first(dataset: Any) -> Any:
    """The dataset, or the first one of a dict of datasets."""
    return next(iter(dataset.values())) if isinstance(dataset, Mapping) else dataset


def _columns(dataset: Any) -> set[str]:
    one = _first(dataset)
    return set(one.column_names if one.column_names is not None else next(iter(one)))


def _unpaired(pairs: dict[str, list[Any]]) -> dict[str, list[Any]]:
    rows = [dict(zip(pairs, values, strict=True)) for values in zip(*pairs.values(), strict=True)]
    rows = [dict(maybe_extract_prompt(row)) for row in rows]
    kept = [name for name in rows[0] if name not in PAIR]
    made = {name: [row[name] for row in rows] * 2 for name in kept}
    made["completion"] = [row[name] for name in PAIR for row in rows]
    return made | {"label": [name == "chosen" for name in PAIR for _ in rows]}
