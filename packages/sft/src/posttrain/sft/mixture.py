"""Mixes several datasets: computes the rows of each in an epoch, and their order.

The order is a function of the datasets' lengths, the weights and the seed and is computed before training, so a mixture
behaves and resumes like a single dataset. Rows carry the number of their dataset in the column ``source``.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posttrain.core.data.samplers import is_stream
from posttrain.core.errors import DataError, did_you_mean

SPLITS = {"train", "test", "validation"}


@dataclass(frozen=True)
class Mixture:
    """How one epoch is made up.

    names: of the datasets; ``source`` counts them from 0. rows: rows that each has. drawn: rows of it in an epoch.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    drawn: tuple[int, ...]

    def lines(self) -> list[str]:
        """The mixture as sentences for the log."""
        total = sum(self.drawn)
        return [
            f"  {name}: {drawn:,} rows an epoch ({drawn / total:.1%}), each of its {rows:,} rows {drawn / rows:.2f} "
            "times"
            for name, rows, drawn in zip(self.names, self.rows, self.drawn, strict=True)
        ]


def check_parts(parts: Mapping[str, Any], name: str = "train") -> None:
    """Reject a dict that is not one of datasets to mix.

    Raises:
        DataError: it is empty, or holds the splits of one dataset.
    """
    if not parts:
        raise DataError(f"{name}_dataset is an empty dict. Pass a dataset, or several by name.")
    for part, rows in parts.items():
        if isinstance(rows, list) and rows and not isinstance(rows[0], Mapping):
            raise DataError(
                f"{name}_dataset is a dict whose {part!r} is a list of {type(rows[0]).__name__}s and not of rows. "
                "Columns are passed as datasets.Dataset.from_dict(...)."
            )
    splits = SPLITS & set(map(str, parts))
    if splits or type(parts).__name__ in ("DatasetDict", "IterableDatasetDict"):
        raise DataError(
            f"{name}_dataset is a dict of splits ({', '.join(map(str, parts))}). Pass one of them. To mix several "
            "datasets, pass a plain dict with other names."
        )


def shares(names: tuple[str, ...], weights: Mapping[str, float]) -> np.ndarray:
    """(G,) the share of each dataset: its weight, divided by the sum.

    Raises:
        DataError: a weight is missing, not positive, or for no dataset.
    """
    unknown = [name for name in weights if name not in names]
    if unknown:
        raise DataError(
            f"dataset_weights names {unknown[0]!r}{did_you_mean(unknown[0], names)}; the datasets are "
            f"{', '.join(names)}."
        )
    for name in names:
        weight = weights.get(name)
        if isinstance(weight, bool) or not isinstance(weight, numbers.Real) or not 0 < weight < math.inf:
            raise DataError(
                f"dataset_weights has {weight!r} for {name!r}; each dataset needs a number above 0. Leave a "
                "dataset out to train without it."
            )
    given = np.array([float(weights[name]) for name in names])
    return given / given.sum()


def mix_rows(
    lengths: np.ndarray, weights: np.ndarray | None = None, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which rows an epoch of a mixture holds, spread evenly.

    Args:
        lengths: (G,) rows of each dataset, laid end to end.
        weights: (G,) the share of the rows of an epoch that comes from each; the epoch stays as long as all datasets
            together. A dataset with too few rows is repeated, and one with too many is sampled with `seed`. None: each
            row once.

    Returns:
        ``(order (N,), source (N,), drawn (G,))``: indices into the datasets laid end to end, the dataset of each, and
        how many are of each. The k-th of n rows of a dataset is at (k + 1/2) / n of the epoch.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    total, first = int(lengths.sum()), np.cumsum(lengths) - lengths
    if weights is None:
        drawn = lengths.copy()
    else:
        edges = np.rint(np.concatenate([[0.0], np.cumsum(weights)]) * total).astype(np.int64)
        drawn = np.diff(edges)
    rows, places = [], []
    for source, (length, count) in enumerate(zip(lengths.tolist(), drawn.tolist(), strict=True)):
        passes, rest = divmod(count, length)
        part = np.sort(np.random.default_rng([seed, source]).permutation(length)[:rest])
        rows.append(first[source] + np.concatenate([np.tile(np.arange(length), passes), part]))
        places.append((np.arange(count) + 0.5) / max(count, 1))
    order = np.argsort(np.concatenate(places), kind="stable")
    sources = np.repeat(np.arange(len(lengths)), drawn)
    return np.concatenate(rows).astype(np.int64)[order], sources[order], drawn


def mix_datasets(
    parts: Mapping[str, Any],
    weights: Mapping[str, float] | None = None,
    seed: int = 0,
    row_tokens: Sequence[float] | None = None,
) -> tuple[Any, Mixture | None]:
    """Prepared datasets as one, with a column ``source``.

    Args:
        parts: `datasets.Dataset` of ``input_ids`` and ``labels`` by name, or streams, or both.
        weights: name -> weight, for `shares`; a mixture with a stream in it needs them.
        row_tokens: (G,) trained tokens of a mean row of each, 0 of a stream, where weights are shares of tokens.

    Returns:
        A `datasets.Dataset` and how it is made up; or an `IterableDataset`, which draws each row's dataset by its
        weight and ends when each has been read, and None.
    """
    names = tuple(parts)
    given = None if weights is None else shares(names, weights)
    if row_tokens is not None:
        if given is None:
            raise DataError("dataset_weights_of='tokens' says what dataset_weights are shares of; set these too.")
        if 0 in row_tokens:
            raise DataError(
                f"dataset_weights_of='tokens' needs the tokens of {names[row_tokens.index(0)]!r}, a stream, before it "
                "is read. Set 'rows', and divide its weight by the tokens of a mean row."
            )
        given = given / row_tokens
        given /= given.sum()
    if any(is_stream(part) for part in parts.values()):
        if given is None:
            raise DataError("A mixture with a stream needs dataset_weights, because a stream has no known length.")
        return _mix_streams(parts, given, seed), None
    import datasets

    lengths = np.array([len(part) for part in parts.values()])
    order, _, drawn = mix_rows(lengths, given, seed)
    labelled = [
        part.add_column("source", np.full(len(part), number, dtype=np.int32))
        for number, part in enumerate(parts.values())
    ]
    mixed = datasets.concatenate_datasets(labelled).select(order)
    return mixed, Mixture(names, tuple(lengths.tolist()), tuple(drawn.tolist()))


def _mix_streams(parts: Mapping[str, Any], weights: np.ndarray, seed: int) -> Any:
    import datasets

    tokens = datasets.List(datasets.Value("int32"))
    features = datasets.Features({"input_ids": tokens, "labels": tokens, "source": datasets.Value("int32")})
    labelled = []
    for number, part in enumerate(parts.values()):
        stream = part if is_stream(part) else part.to_iterable_dataset()
        labelled.append(stream.map(_Source(number), batched=True, features=features))
    return datasets.interleave_datasets(
        labelled, probabilities=weights.tolist(), seed=seed, stopping_strategy="all_exhausted"
    )


@dataclass(frozen=True)
class _Source:
    """Adds the column ``source`` to a batch of rows; a class, so that workers can be given it."""

    number: int

    def __call__(self, batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        return {"source": [self.number] * len(batch["input_ids"])}


def named_sets(dataset: Any, name: str = "eval") -> list[tuple[str, Any]]:
    """``[(name, dataset), ...]`` of a dict of datasets; one dataset is called `name`."""
    return list(dataset.items()) if isinstance(dataset, Mapping) else [(name, dataset)]


def representative(dataset: Any) -> Any:
    """One of several datasets as a placeholder until they are mixed; a stream if there is one."""
    parts = list(dataset.values()) if isinstance(dataset, Mapping) else [dataset]
    return next((part for part in parts if part is not None and is_stream(part)), parts[0])
