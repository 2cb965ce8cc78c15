"""Mixes several datasets: computes the rows of each in an epoch, and their order.

The order is a function of the datasets' lengths, the weights and the seed and is computed before training, so a mixture
behaves and resumes like a single dataset. Rows carry the number of their dataset in the column ``source``.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posttrain.core.data.samplers import is_stream
from posttrain.core.errors import DataError, did_you_mean
from posttrain.sft.packing import trained_tokens

SPLITS = {"train", "test", "validation"}


@dataclass(frozen=True)
class Mixture:
    """How one epoch is made up.

    names: of the datasets; ``source`` counts them from 0. rows: rows that each has. drawn: rows of it in an epoch.
    stages: rows of each in each stage of an epoch, one stage where no weight changes.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    drawn: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]

    def lines(self) -> list[str]:
        """The mixture as sentences for the log."""
        total = sum(self.drawn)
        lines = [
            f"  {name}: {drawn:,} rows an epoch ({drawn / total:.1%}), each of its {rows:,} rows {drawn / rows:.2f} "
            "times"
            for name, rows, drawn in zip(self.names, self.rows, self.drawn, strict=True)
        ]
        for number, stage in enumerate(self.stages if len(self.stages) > 1 else (), 1):
            listed = ", ".join(f"{count:,} rows of {name}" for name, count in zip(self.names, stage, strict=True))
            lines.append(f"  stage {number} of {len(self.stages)}: {listed}")
        return lines


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


def stages_of(names: tuple[str, ...], weights: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The stages of an epoch, between which a weight changes.

    Args:
        weights: by name, a number, or ``{share of the epoch: weight from there on}``; before the first it is 0.

    Returns:
        ``(spans (S,), shares (S, G))``: the share of the epoch that each stage takes, and in each stage the weight of
        each dataset divided by their sum.

    Raises:
        DataError: a weight is missing, or for no dataset; or it is no weight; or a stage has none above 0.
    """
    _check_names("dataset_weights", weights, names)
    changes = []
    for name in names:
        given = weights.get(name)
        found: dict[float, Any] = {0.0: given}
        if isinstance(given, Mapping):
            try:
                found = {float(place): weight for place, weight in given.items()}
            except (TypeError, ValueError):
                found = {math.nan: given}
        if not all(0 <= place < 1 for place in found):
            raise DataError(
                f"dataset_weights has {given!r} for {name!r}; a weight changes at shares of the epoch, from 0 to below "
                "1: {0: 1, 0.8: 5}."
            )
        if not all(_is_amount(weight) for weight in found.values()) or not any(found.values()):
            raise DataError(
                f"dataset_weights has {given!r} for {name!r}; each dataset needs a number above 0. Leave a "
                "dataset out to train without it."
            )
        changes.append(found)
    starts = sorted({0.0}.union(*changes))
    table = np.array([[float(_in_force(found, start)) for found in changes] for start in starts])
    if empty := [start for start, row in zip(starts, table, strict=True) if not row.any()]:
        raise DataError(
            f"dataset_weights has no weight above 0 at {empty[0]:g} of the epoch; give a dataset one there."
        )
    return np.diff([*starts, 1.0]), table / table.sum(1, keepdims=True)


def _in_force(changes: Mapping[float, Any], place: float) -> Any:
    """The last of `changes` up to `place`, 0 before the first."""
    return changes[max(before)] if (before := [each for each in changes if each <= place]) else 0.0


def budgets_of(names: tuple[str, ...], budgets: Mapping[str, Any]) -> np.ndarray:
    """(G,) the most trained tokens of each dataset in an epoch, infinite where `budgets` has none.

    Raises:
        DataError: a budget is no number of tokens, or for no dataset.
    """
    _check_names("dataset_max_tokens", budgets, names)
    for name, budget in budgets.items():
        if not _is_amount(budget) or budget < 1:
            raise DataError(f"dataset_max_tokens has {budget!r} for {name!r}, which is no number of tokens above 0.")
    return np.array([float(budgets.get(name, math.inf)) for name in names])


def _check_names(field: str, given: Mapping[str, Any], names: tuple[str, ...]) -> None:
    unknown = [name for name in given if name not in names]
    if unknown:
        raise DataError(
            f"{field} names {unknown[0]!r}{did_you_mean(unknown[0], names)}; the datasets are {', '.join(names)}."
        )


def _is_amount(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and 0 <= float(value) < math.inf


def mix_rows(
    lengths: np.ndarray,
    weights: np.ndarray | None = None,
    seed: int = 0,
    *,
    spans: Sequence[float] | np.ndarray = (1.0,),
    tokens: Sequence[np.ndarray] | None = None,
    by_tokens: bool = False,
    budgets: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which rows an epoch of a mixture holds, spread evenly over each stage.

    Args:
        lengths: (G,) rows of each dataset, laid end to end.
        weights: (S, G) the share of each stage that comes from each dataset; the epoch stays as long as all datasets
            together. A dataset with too few rows is repeated, and one with too many is sampled with `seed`. Each stage
            goes on in a dataset where the one before it ended. None: each row once.
        spans: (S,) the share of the epoch that each stage takes.
        tokens: of each dataset (L,) the trained tokens of its rows, for the last two.
        by_tokens: epochs, spans and weights are amounts of trained tokens, met to a row of each dataset; else of rows.
        budgets: (G,) the most trained tokens of each dataset. What they leave of a stage the other datasets fill by
            their weights, and where there is none, the stage is shorter.

    Returns:
        ``(order (N,), source (N,), drawn (S, G))``: indices into the datasets laid end to end, the dataset of each, and
        how many are of each in each stage. The k-th of n rows of a dataset is at (k + 1/2) / n of the stage. Rows of a
        single stage keep the order of their dataset; of several, `seed` decides it.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    first = np.cumsum(lengths) - lengths
    rows = [np.random.default_rng([seed, source]).permutation(length) for source, length in enumerate(lengths.tolist())]
    sizes = None if tokens is None else [part[order] for part, order in zip(tokens, rows, strict=True)]
    shares = None if weights is None else np.atleast_2d(weights)
    ends = _ends_of_stages(lengths, shares, spans, sizes, by_tokens, budgets)
    starts = np.concatenate([np.zeros_like(ends[:1]), ends[:-1]])
    picked, places = [], []
    for (stage, source), end in np.ndenumerate(ends):
        number = np.arange(int(starts[stage, source]), int(end))
        length = max(len(rows[source]), 1)
        part = rows[source][number % length]
        if len(ends) == 1:
            part = np.sort(number - number % length + part) % length  # each pass by itself
        picked.append(first[source] + part)
        places.append(stage + (np.arange(len(part)) + 0.5) / max(len(part), 1))
    order = np.argsort(np.concatenate(places), kind="stable")
    sources = np.repeat(np.tile(np.arange(len(lengths)), len(ends)), (ends - starts).ravel())
    return np.concatenate(picked).astype(np.int64)[order], sources[order], ends - starts


def _ends_of_stages(
    lengths: np.ndarray,
    shares: np.ndarray | None,
    spans: Sequence[float] | np.ndarray,
    tokens: Sequence[np.ndarray] | None,
    by_tokens: bool,
    budgets: np.ndarray | None,
) -> np.ndarray:
    """(S, G) how many rows of each dataset have been read at the end of each stage; arguments as for `mix_rows`, with
    `tokens` in the order in which rows are read.
    """
    most = np.full(len(lengths), np.inf)  # rows
    if tokens is not None and budgets is not None:
        most = np.array([_rows_within(part, budget) for part, budget in zip(tokens, budgets.tolist(), strict=True)])
    if shares is None:
        return np.array([np.minimum(lengths, most)], dtype=np.int64)
    sizes = tokens if tokens is not None and by_tokens else [np.ones(length, np.int64) for length in lengths.tolist()]
    room = budgets if by_tokens and budgets is not None else most
    total, used, ends = sum(int(part.sum()) for part in sizes), np.zeros(len(lengths)), []
    done = 0.0
    for span, share in zip(spans, shares, strict=True):
        amount = _filled(span * total, share, room - used)
        if not by_tokens:  # whole rows, and of all stages together as many as there are
            edges = np.cumsum([done, *amount])
            amount, done = np.minimum(np.diff(np.rint(edges)), room - used), edges[-1]
        used = used + amount
        ends.append([_rows_within(*each) for each in zip(sizes, used.tolist(), strict=True)])
    return np.array(ends, dtype=np.int64)


def _rows_within(sizes: np.ndarray, amount: float) -> float:
    """How many rows of (L,) `sizes`, read again and again, hold `amount` together at most."""
    if not len(sizes) or amount == math.inf:
        return math.inf
    ends = np.cumsum(sizes)
    passes, rest = divmod(amount, int(ends[-1]))
    return passes * len(sizes) + int(np.searchsorted(ends, rest, side="right"))


def _filled(amount: float, shares: np.ndarray, room: np.ndarray) -> np.ndarray:
    """(G,) `amount` divided by `shares`, of none more than its `room`; the others take what that leaves."""
    taken = np.zeros_like(shares)
    for _ in shares:  # each time one is full, or nothing is left
        wanting = shares * (taken < room)
        if wanting.any():
            taken = np.minimum(taken + (amount - taken.sum()) * wanting / wanting.sum(), room)
    return taken


def mix_datasets(
    parts: Mapping[str, Any],
    weights: Mapping[str, Any] | None = None,
    seed: int = 0,
    by_tokens: bool = False,
    budgets: Mapping[str, Any] | None = None,
) -> tuple[Any, Mixture | None]:
    """Prepared datasets as one, with a column ``source``.

    Args:
        parts: `datasets.Dataset` of ``input_ids`` and ``labels`` by name, or streams, or both.
        weights: for `stages_of`; a mixture with a stream in it needs them. budgets: for `budgets_of`.
        by_tokens: weights are shares of trained tokens.

    Returns:
        A `datasets.Dataset` and how it is made up; or an `IterableDataset`, which draws each row's dataset by its
        weight and ends when each has been read, and None.

    Raises:
        DataError: wrong weights or budgets, or what a stream cannot do.
    """
    names = tuple(parts)
    spans, given = (np.ones(1), None) if weights is None else stages_of(names, weights)
    most = None if budgets is None else budgets_of(names, budgets)
    if by_tokens and given is None:
        raise DataError("dataset_weights_of='tokens' says what dataset_weights are shares of; set these too.")
    if streams := [name for name, part in parts.items() if is_stream(part)]:
        if by_tokens or most is not None:
            field = "dataset_max_tokens" if most is not None else "dataset_weights_of='tokens'"
            raise DataError(
                f"{field} needs the tokens of {streams[0]!r}, a stream, before it is read. Read it whole; or leave "
                "dataset_max_tokens out, set 'rows', and divide its weight by the tokens of a mean row."
            )
        if given is None:
            raise DataError("A mixture with a stream needs dataset_weights, because a stream has no known length.")
        if len(spans) > 1:
            raise DataError(
                f"dataset_weights change at a share of the epoch, and {streams[0]!r} is a stream, which has no known "
                "length. Read it whole, or give each dataset one weight."
            )
        return _mix_streams(parts, given[0], seed), None
    import datasets

    lengths = np.array([len(part) for part in parts.values()])
    tokens = [trained_tokens(part) for part in parts.values()] if by_tokens or most is not None else None
    order, _, drawn = mix_rows(lengths, given, seed, spans=spans, tokens=tokens, by_tokens=by_tokens, budgets=most)
    for name, budget in (budgets or {}).items():
        if not drawn.sum(0)[names.index(name)]:
            raise DataError(
                f"dataset_max_tokens has {budget:,} tokens for {name!r}, and none of its rows came within them. "
                "Raise it, or leave the dataset out."
            )
    labelled = [
        part.add_column("source", np.full(len(part), number, dtype=np.int32))
        for number, part in enumerate(parts.values())
    ]
    mixed = datasets.concatenate_datasets(labelled).select(order)
    stages = tuple(map(tuple, drawn.tolist()))
    return mixed, Mixture(names, tuple(lengths.tolist()), tuple(drawn.sum(0).tolist()), stages)


def _mix_streams(parts: Mapping[str, Any], weights: np.ndarray, seed: int) -> Any:
    import datasets

    tokens = datasets.List(datasets.Value("int32"))
    features = datasets.Features({"input_ids": tokens, "labels": tokens, "source": datasets.Value("int32")})
    labelled = []
    for number, part in enumerate(parts.values()):
        stream = part if is_stream(part) else part.to_iterable_dataset()
        labelled.append(stream.map(functools.partial(_source, number), batched=True, features=features))
    return datasets.interleave_datasets(
        labelled, probabilities=weights.tolist(), seed=seed, stopping_strategy="all_exhausted"
    )


def _source(number: int, batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """The column ``source`` of a batch of rows."""
    return {"source": [number] * len(batch["input_ids"])}


def named_sets(dataset: Any, name: str = "eval") -> list[tuple[str, Any]]:
    """``[(name, dataset), ...]`` of a dict of datasets; one dataset is called `name`."""
    return list(dataset.items()) if isinstance(dataset, Mapping) else [(name, dataset)]


def representative(dataset: Any) -> Any:
    """One of several datasets as a placeholder until they are mixed; a stream if there is one."""
    parts = list(dataset.values()) if isinstance(dataset, Mapping) else [dataset]
    return next((part for part in parts if part is not None and is_stream(part)), parts[0])
