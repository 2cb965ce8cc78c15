"""Mixes several datasets: computes the rows of each in an epoch or in the run, and their order.

The order is a function of the datasets' lengths, the weights and the seed and is computed before training, so a mixture
behaves and resumes like a single dataset. With a stream in it, the next dataset is chosen row by row. Rows carry the
number of their dataset in the column ``source``.
"""

from __future__ import annotations

import copy
import math
import numbers
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from posttrain.core.data.samplers import is_stream
from posttrain.core.errors import DataError, did_you_mean
from posttrain.sft.packing import ROWS_PER_WINDOW, trained_tokens

SPLITS = {"train", "test", "validation"}


@dataclass(frozen=True)
class Mixture:
    """How one epoch is made up, or the run where weights change over it or tokens are limited.

    names: of the datasets; ``source`` counts them from 0. rows: rows that each has. drawn: rows of it that are read.
    stages: rows of each in each stage, one stage where no weight changes. epochs: as many rows as so many epochs have.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    drawn: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]
    epochs: float = 1

    def lines(self) -> list[str]:
        """The mixture as sentences for the log."""
        total, of = sum(self.drawn), "an epoch" if self.epochs == 1 else f"in {self.epochs:.4g} epochs"
        lines = [
            f"  {name}: {drawn:,} rows {of} ({drawn / total:.1%}), each of its {rows:,} rows {drawn / rows:.2f} times"
            for name, rows, drawn in zip(self.names, self.rows, self.drawn, strict=True)
        ]
        for number, stage in enumerate(self.stages if len(self.stages) > 1 else (), 1):
            listed = ", ".join(f"{count:,} rows of {name}" for name, count in zip(self.names, stage, strict=True))
            lines.append(f"  stage {number} of {len(self.stages)}: {listed}")
        return lines


def check_parts(parts: Mapping[str, Any], name: str = "train") -> None:
    """Reject a dict that is not one of datasets to mix. Raises a `DataError` where it is empty, or holds the splits of
    one dataset.
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
    """The stages of a run, between which a weight changes. `weights`: by name, a number, or ``{share of the run: weight
    from there on}``; before the first it is 0. Returns ``(spans (S,), shares (S, G))``: the share of the run that each
    stage takes, and in each stage the weight of each dataset divided by their sum. Raises a `DataError` where a weight
    is missing, is for no dataset or is no weight, or a stage has none above 0.
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
                f"dataset_weights has {given!r} for {name!r}; a weight changes at shares of the run, from 0 to below "
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
        raise DataError(f"dataset_weights has no weight above 0 at {empty[0]:g} of the run; give a dataset one there.")
    return np.diff([*starts, 1.0]), table / table.sum(1, keepdims=True)


def _in_force(changes: Mapping[float, Any], place: float) -> Any:
    """The last of `changes` up to `place`, 0 before the first."""
    return changes[max(before)] if (before := [each for each in changes if each <= place]) else 0.0


def budgets_of(names: tuple[str, ...], budgets: Mapping[str, Any]) -> np.ndarray:
    """(G,) the most trained tokens of each dataset, infinite where `budgets` has none. Raises a `DataError` where a
    budget is no number of tokens, or is for no dataset.
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
    epochs: float = 1,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which rows a mixture holds, spread evenly over each stage.

    Args:
        lengths: (G,) rows of each dataset, laid end to end.
        weights: (S, G) the share of each stage that comes from each dataset; an epoch stays as long as all datasets
            together. A dataset with too few rows is repeated, and one with too many is sampled with `seed`. Each stage
            goes on in a dataset where the one before it ended. None: each row once.
        spans: (S,) the share of the whole that each stage takes.
        tokens: of each dataset (L,) the trained tokens of its rows, for the last two.
        by_tokens: epochs, spans and weights are amounts of trained tokens, met to a row of each dataset; else of rows.
        budgets: (G,) the most trained tokens of each dataset. What they leave of a stage the other datasets fill by
            their weights, and where there is none, the stage is shorter.
        epochs: of how many epochs the whole is.

    Returns:
        ``(order (N,), source (N,), drawn (S, G))``: indices into the datasets laid end to end, the dataset of each, and
        how many are of each in each stage. The k-th of n rows of a dataset is at (k + 1/2) / n of the stage. Rows of a
        single stage keep the order of their dataset; of several stages or epochs, `seed` decides it for each pass.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    first = np.cumsum(lengths) - lengths

    def reading(source: int, turn: int) -> np.ndarray:
        """The rows of a dataset in the order of a pass over it."""
        return np.random.default_rng([seed, source, turn]).permutation(int(lengths[source]))

    def number_within(source: int, sizes: np.ndarray, amount: float) -> float:
        """How many rows of a dataset, pass after pass, hold `amount` of their (L,) `sizes` together at most."""
        if not len(sizes) or amount == math.inf:
            return math.inf
        passes, rest = divmod(amount, int(sizes.sum()))
        ends = np.cumsum(sizes[reading(source, int(passes))])
        return passes * len(sizes) + int(np.searchsorted(ends, rest, side="right"))

    shares = None if weights is None else np.atleast_2d(weights)
    ends = _ends_of_stages(lengths, shares, spans, tokens, by_tokens, budgets, epochs, number_within)
    starts = np.concatenate([np.zeros_like(ends[:1]), ends[:-1]])
    picked, places = [], []
    for (stage, source), end in np.ndenumerate(ends):
        start, length = int(starts[stage, source]), max(int(lengths[source]), 1)
        turns = range(start // length, -(-int(end) // length))
        passes = [reading(source, turn) + turn * length for turn in turns]
        part = np.concatenate([lengths[:0], *passes])[start - turns.start * length :][: int(end) - start]
        if len(ends) == 1 and epochs == 1:
            part = np.sort(part)  # each pass by itself
        picked.append(first[source] + part % length)
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
    epochs: float,
    number_within: Callable[[int, np.ndarray, float], float],
) -> np.ndarray:
    """(S, G) how many rows of each dataset have been read at the end of each stage; arguments as for `mix_rows`.
    `number_within`: how many rows of a dataset hold an amount of their sizes together at most.
    """
    most = np.full(len(lengths), np.inf)  # rows
    if tokens is not None and budgets is not None:
        most = np.array([number_within(g, tokens[g], budget) for g, budget in enumerate(budgets.tolist())])
    if shares is None:
        return np.array([np.minimum(np.rint(lengths * epochs), most)], dtype=np.int64)
    sizes = tokens if tokens is not None and by_tokens else [np.ones(length, np.int64) for length in lengths.tolist()]
    room = budgets if by_tokens and budgets is not None else most
    total, used, ends = epochs * sum(int(part.sum()) for part in sizes), np.zeros(len(lengths)), []
    done = 0.0
    for span, share in zip(spans, shares, strict=True):
        amount = _filled(span * total, share, room - used)
        if not by_tokens:  # whole rows, and of all stages together as many as there are
            edges = np.cumsum([done, *amount])
            amount, done = np.minimum(np.diff(np.rint(edges)), room - used), edges[-1]
        used = used + amount
        ends.append([number_within(g, sizes[g], each) for g, each in enumerate(used.tolist())])
    return np.array(ends, dtype=np.int64)


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
    by_tokens: bool = False,
    budgets: Mapping[str, Any] | None = None,
    seed: int = 0,
    epochs: float = 1,
) -> tuple[Any, Mixture]:
    """Prepared datasets as one, with a column ``source``, and how it is made up. Raises a `DataError` for wrong weights
    or budgets.

    Args:
        parts: `datasets.Dataset` of ``input_ids`` and ``labels`` by name. weights: for `stages_of`.
        by_tokens: weights are shares of trained tokens. budgets: for `budgets_of`. epochs: of how many the rows are.
    """
    import datasets

    names = tuple(parts)
    spans, given, most = _amounts(names, weights, by_tokens, budgets)
    lengths = np.array([len(part) for part in parts.values()])
    tokens = [trained_tokens(part) for part in parts.values()] if by_tokens or most is not None else None
    for place, name in enumerate(names if given is not None else ()):
        if not lengths[place] or (by_tokens and tokens is not None and not tokens[place].any()):
            raise _nothing_in(name, "trained tokens" if lengths[place] else "rows")
    how: dict[str, Any] = {"spans": spans, "tokens": tokens, "by_tokens": by_tokens, "budgets": most, "epochs": epochs}
    order, _, drawn = mix_rows(lengths, given, seed, **how)
    for name, budget in (budgets or {}).items():
        if not drawn.sum(0)[names.index(name)]:
            raise _none_within(budget, name)
    labelled = [
        part.add_column("source", np.full(len(part), number, dtype=np.int32))
        for number, part in enumerate(parts.values())
    ]
    mixed = datasets.concatenate_datasets(labelled).select(order)
    stages = tuple(map(tuple, drawn.tolist()))
    return mixed, Mixture(names, tuple(lengths.tolist()), tuple(drawn.sum(0).tolist()), stages, epochs)


def _nothing_in(name: str, what: str) -> DataError:
    return DataError(f"The dataset {name!r} of the mixture has no {what}, so its weight cannot be met; leave it out.")


def _none_within(budget: float, name: str) -> DataError:
    return DataError(
        f"dataset_max_tokens has {budget:,.0f} tokens for {name!r}, and none of its rows came within them. Raise it, "
        "or leave the dataset out."
    )


def _amounts(
    names: tuple[str, ...], weights: Mapping[str, Any] | None, by_tokens: bool, budgets: Mapping[str, Any] | None
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """(spans, shares, budgets) of `stages_of` and `budgets_of`."""
    if by_tokens and weights is None:
        raise DataError("dataset_weights_of='tokens' says what dataset_weights are shares of; set these too.")
    spans, shares = (np.ones(1), None) if weights is None else stages_of(names, weights)
    return spans, shares, None if budgets is None else budgets_of(names, budgets)


class MixedStream(IterableDataset[dict[str, Any]]):
    """Rows of prepared streams by their weights, with the column ``source``; of some parts, the rows may be known.

    The next row is of the dataset that has given the least for its weight since that changed: (k + 1/2) / weight after
    k rows or trained tokens. One that has ended is read again. Without `rows`, an epoch ends when each was read. Raises
    a `DataError` for wrong weights or budgets, or no weights.

    Args:
        parts, weights, by_tokens, budgets: as for `mix_datasets`.
        rows: of the run, where a weight changes over it or tokens are limited; else None.
        pack: makes packed rows, of `capacity` tokens at most, of the columns of some rows.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        weights: Mapping[str, Any] | None,
        by_tokens: bool = False,
        budgets: Mapping[str, Any] | None = None,
        rows: int | None = None,
        pack: Callable[[dict[str, list[Any]]], dict[str, list[Any]]] | None = None,
        capacity: int = 1,
    ) -> None:
        if weights is None:
            raise DataError("A mixture with a stream needs dataset_weights, because a stream has no known length.")
        self._names = tuple(parts)
        spans, shares, most = _amounts(self._names, weights, by_tokens, budgets)
        self._shares: Any = shares
        self._is_of_run, self._by_tokens, self._pack, self._capacity = rows is not None, by_tokens, pack, capacity
        #: What is read, under the name by which a shuffle buffer is found in it.
        self.ex_iterables = [part if is_stream(part) else part.to_iterable_dataset() for part in parts.values()]
        self._distributed, *others = (part._distributed for part in self.ex_iterables)
        if any(other != self._distributed for other in others):
            raise DataError(
                f"Of the datasets {', '.join(self._names)} some are split over the processes (split_dataset_by_node), "
                "others not, or otherwise. Split all of them, or none, which lets the trainer deal rows."
            )
        share = 1 if self._distributed is None else 1 / self._distributed.world_size  # of this process
        self._most = np.full(len(parts), math.inf) if most is None else most * share
        self._ends = [math.inf] if rows is None else np.rint(np.cumsum(spans) * rows * share).tolist()
        counts = {name: [0] * len(parts) for name in ("used", "trained", "is_full", "passes")}
        self._start: dict[str, Any] = {"parts": [{} for _ in parts], "stage": 0, "place": 0, "given": 0, **counts}
        self._state = self._start
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """The place of the next row."""
        return copy.deepcopy(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration begin at the place of `state`."""
        self._start = self._state = copy.deepcopy(state)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        at = copy.deepcopy(self._start)
        readers: dict[int, Iterator[Any]] = {}
        given, at["given"] = at["given"], 0
        while True:
            for number in readers:
                at["parts"][number] = self.ex_iterables[number].state_dict()
            self._state = copy.deepcopy(at)
            rows = [] if self._is_of_run and self.epoch else self._window(at, readers)
            if not rows:
                return
            columns = {name: [row[name] for row in rows] for name in rows[0]}
            columns = columns if self._pack is None else self._pack(columns)
            made = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
            at["place"] += len(made)
            for number in range(given, len(made)):
                self._state["given"] = number + 1
                yield made[number]
            given = 0

    def _window(self, at: dict[str, Any], readers: dict[int, Iterator[Any]]) -> list[dict[str, Any]]:
        """The rows that are packed together, all of one stage; none at the end. `at` and `readers` move on."""
        rows: list[dict[str, Any]] = []
        size = 0
        while len(rows) < ROWS_PER_WINDOW and at["stage"] < len(self._ends):
            end, shares = self._ends[at["stage"]], self._shares[at["stage"]].tolist()
            wanting = [number for number, share in enumerate(shares) if share > 0 and not at["is_full"][number]]
            if not wanting or size >= (end - at["place"]) * self._capacity:
                if rows:
                    break
                at |= {"stage": at["stage"] + 1, "place": max(at["place"], end), "used": [0] * len(shares)}
                continue
            number = min(wanting, key=lambda each: (at["used"][each] + 0.5) / shares[each])
            row = self._next(number, at, readers)
            if row is None:
                at["stage"] = len(self._ends)
                break
            trained = sum(label != -100 for label in row["labels"][1:])
            if at["trained"][number] + trained > self._most[number]:
                if not at["trained"][number]:
                    raise _none_within(self._most[number], self._names[number])
                at["is_full"][number] = 1
                continue
            at["trained"][number] += trained
            at["used"][number] += trained if self._by_tokens else 1
            rows.append(row | {"source": number})
            size += 1 if self._pack is None else len(row["input_ids"])
        for number, count in Counter(row["source"] for row in rows if self._by_tokens).items():
            if not at["trained"][number] and (at["passes"][number] or count > ROWS_PER_WINDOW // 2):
                raise _nothing_in(self._names[number], "trained tokens")  # it would get all places
        return rows

    def _next(self, number: int, at: dict[str, Any], readers: dict[int, Iterator[Any]]) -> dict[str, Any] | None:
        """The next row of a dataset, in its next pass where one has ended; None at the end of the epoch."""
        part = self.ex_iterables[number]
        for _ in range(2):
            if number not in readers:
                part.load_state_dict(at["parts"][number])
                part.set_epoch(self.epoch + at["passes"][number])
                readers[number] = iter(part)
            row: dict[str, Any] | None = next(readers[number], None)
            if row is not None:
                return row
            readers.pop(number)
            at["parts"][number] = {}
            at["passes"][number] += 1
            if not self._is_of_run and all(at["passes"]):
                return None
        raise DataError(
            f"The dataset {self._names[number]!r} of the mixture gives no rows when it is read from its start, so its "
            "weight cannot be met. Leave it out, give more rows (each process needs some), or a stream that can be "
            "read again: one made by datasets.IterableDataset.from_generator of a function, not of an open iterator."
        )


def named_sets(dataset: Any, name: str = "eval") -> list[tuple[str, Any]]:
    """``[(name, dataset), ...]`` of a dict of datasets; one dataset is called `name`."""
    return list(dataset.items()) if isinstance(dataset, Mapping) else [(name, dataset)]


def representative(dataset: Any) -> Any:
    """One of several datasets as a placeholder until they are mixed; a stream if there is one."""
    parts = list(dataset.values()) if isinstance(dataset, Mapping) else [dataset]
    return next((part for part in parts if part is not None and is_stream(part)), parts[0])
