"""Samplers that make the micro-batches of an epoch from the lengths of its rows, and the choice of a run's sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler, SequentialSampler

from posttrain.core.data.samplers import EpochSampler, LengthGroupedSampler, has_length, is_stream, row_lengths
from posttrain.core.errors import DataError


class EpochBatchSampler(EpochSampler):
    """Makes the `num_batches` batches of an epoch, on all processes, from the `lengths` of the rows in tokens: lists of
    indices, those that all processes read at once after each other. What `make` is given, the numbers in `cut`, a
    resumed run may set otherwise; it then makes the rest of the epoch.
    """

    def __init__(self, lengths: torch.Tensor, num_batches: int, seed: int, *cut: int) -> None:
        super().__init__(num_batches, seed)
        self.lengths = lengths
        #: ``[*cut, batches before]`` of each way in which the rest of an epoch is cut.
        self.own_cut = [[*cut, 0]]

    def make(self, rows: torch.Tensor, generator: torch.Generator, *cut: int) -> Iterable[list[int]]:
        """The batches of `rows`, which come in a random order."""
        raise NotImplementedError

    def resume(self, epoch: int, cut: Any, given: int) -> int:
        [now] = self.own_cut
        cuts = cut if cut[-1][:-1] == now[:-1] else [*cut, [*now[:-1], given]]
        self._begun = {epoch: cuts} if len(cuts) > 1 else {}
        if self._begun:
            self.epoch = epoch
            self._num_begun = len(self.order())
        return given

    def order(self) -> list[list[int]]:  # type: ignore[override]  # of batches, where the base class has rows
        """The batches of this epoch."""
        generator = self.generator()
        batches: list[list[int]] = []
        rows = torch.randperm(len(self.lengths), generator=generator)
        for *cut, before in self.cut(self.epoch):
            if before:  # those that were read stay as they are
                rows = torch.tensor([row for batch in batches[before:] for row in batch], dtype=torch.long)
            batches[before:] = self.make(rows, generator, *cut) if len(rows) else ()
        return batches

    def longest_first(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` sorted by their lengths, equal ones as they come."""
        return rows[self.lengths[rows].argsort(descending=True, stable=True)]

    def __len__(self) -> int:
        return self._num_begun if self.epoch in self._begun else self.num_rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.order())


class TokenBatchSampler(EpochBatchSampler):
    """Micro-batches of at most `max_tokens` tokens each (rows times the longest row), padding included, in a random
    order. Raises a `DataError` where a row is longer; `lengths` are those of the rows in tokens.

    Rows are sorted by their lengths, equal ones in a random order, and cut into batches; each batch is padded to its
    longest row. `world_size` neighbouring batches, which hold about as many tokens, form a round: each process gets one
    of them, so that no process waits long for another. The rounds are shuffled; the one with the longest row comes
    first, so that a run that does not fit into memory fails at once. All epochs have as many batches, and every process
    gets as many.
    """

    def __init__(self, lengths: Sequence[int], max_tokens: int, seed: int, world_size: int = 1) -> None:
        tokens = torch.as_tensor(lengths)
        if len(lengths) and (longest := int(tokens.max())) > max_tokens:
            raise DataError(
                f"max_batch_tokens={max_tokens} is less than row {int(tokens.argmax())} has, {longest} tokens. "
                f"Set max_batch_tokens to {longest} or more, or a smaller max_length."
            )
        batches = _cut(tokens.sort(descending=True).values.tolist(), max_tokens, world_size)
        super().__init__(tokens, len(batches), seed, max_tokens, world_size)

    def make(self, rows: torch.Tensor, generator: torch.Generator, *cut: int) -> Iterable[list[int]]:
        max_tokens, size = cut
        rows = self.longest_first(rows)
        made = torch.split(rows, _cut(self.lengths[rows].tolist(), max_tokens, size))
        rounds = [0, *(torch.randperm(max(-(-len(made) // size) - 1, 0), generator=generator) + 1).tolist()]
        return [one.tolist() for turn in rounds for one in made[turn * size : (turn + 1) * size]]


class BalancedBatchSampler(EpochBatchSampler):
    """The rows of each optimizer step in micro-batches that cost about as much: of long rows few, of short ones many. A
    step has `num_rows` rows in `num_parts` micro-batches, on all processes; rows that do not fill one are left out with
    `drop_last`.

    Rows are shuffled. Those of a step are sorted by their `lengths`, in tokens, and cut where the dearest micro-batch
    costs least. The dearest come first, so that what the processes compute at once costs about as much. n rows, the
    longest of L tokens, cost n * L * (1 + L / 1000), as in the BatchRebalanceSampler of transformers: they are padded,
    and attention grows with the square.
    """

    def __init__(
        self, lengths: Sequence[int], num_rows: int, num_parts: int, seed: int, drop_last: bool = False
    ) -> None:
        steps, rest = divmod(len(lengths), num_rows)
        num_batches = steps * num_parts + (0 if drop_last else min(num_parts, rest))
        self.drop_last = drop_last
        super().__init__(torch.as_tensor(lengths), num_batches, seed, num_rows, num_parts)

    def make(self, rows: torch.Tensor, generator: torch.Generator, *cut: int) -> Iterable[list[int]]:
        num_rows, num_parts = cut
        for part in torch.split(rows, num_rows):
            if self.drop_last and len(part) < num_rows:
                return
            step = self.longest_first(part)
            made = torch.split(step, _level(_costs(self.lengths[step]).tolist(), num_parts))
            dearest_first = sorted(made, key=lambda rows: len(rows) * int(_costs(self.lengths[rows[0]])), reverse=True)
            yield from (rows.tolist() for rows in dearest_first)


def _costs(tokens: torch.Tensor) -> torch.Tensor:
    """What each row costs that is padded to so many `tokens`, in thousandths."""
    return tokens * (1000 + tokens)


def _level(costs: list[int], num_parts: int) -> list[int]:
    """How many rows each of `num_parts` batches takes for the dearest batch to cost least, as `_cut`."""
    num_parts = min(num_parts, len(costs))
    least, enough = costs[0], costs[0] * len(costs)
    while least < enough:
        middle = (least + enough) // 2
        if len(_cut(costs, middle, 1)) <= num_parts:
            enough = middle
        else:
            least = middle + 1
    return _cut(costs, enough, num_parts)


def _cut(costs: list[int], limit: int, multiple: int) -> list[int]:
    """Rows of each batch, all at the cost of its first, `limit` at most; a `multiple` of batches if there are rows."""
    sizes, start = [], 0
    while start < len(costs):
        sizes.append(min(limit // max(costs[start], 1), len(costs) - start))
        start += sizes[-1]
    while len(sizes) % multiple and max(sizes) > 1:
        widest = max(range(len(sizes)), key=sizes.__getitem__)
        half = sizes[widest] // 2
        sizes[widest : widest + 1] = [sizes[widest] - half, half]
    return sizes


def make_train_sampler(
    dataset: Any,
    strategy: str,
    seed: int,
    lengths: Callable[[Any], Sequence[int]] = row_lengths,
    size: tuple[int, int, int] = (1, 1, 1),
    drop_last: bool = False,
) -> Sampler[int] | None:
    """The sampler for `dataset`, by one of `STRATEGIES`; None for a stream, which has its own order. Those of
    `BY_LENGTH` ask ``lengths(dataset)``. The `size` of an optimizer step is rows of a micro-batch, micro-batches on a
    process, processes; with `drop_last`, "batch_rebalance" leaves out the rows that do not fill one.
    """
    if not has_length(dataset) or is_stream(dataset):
        return None
    rows, accumulation, processes = size
    if strategy == "sequential":
        return SequentialSampler(dataset)
    if strategy == "group_by_length":
        return LengthGroupedSampler(lengths(dataset), rows * accumulation, seed)
    if strategy == "batch_rebalance":
        parts = accumulation * processes
        return BalancedBatchSampler(lengths(dataset), rows * parts, parts, seed, drop_last)
    return EpochSampler(len(dataset), seed)


def token_batches(
    dataset: Any, lengths: Callable[[Any], list[int]], max_tokens: int, seed: int, world_size: int
) -> TokenBatchSampler:
    """The batches of `dataset` that hold `max_tokens` tokens at most. Raises a `DataError` where the data is a stream,
    or its rows have no known lengths, or one is too long.
    """
    if is_stream(dataset):
        raise DataError(
            "max_batch_tokens needs the length of each row before training, and the training data is a stream. Give "
            "rows by index, or set per_device_train_batch_size instead."
        )
    return TokenBatchSampler(lengths(dataset), max_tokens, seed, world_size)
