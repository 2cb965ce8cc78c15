"""Describes the segments of a flattened row and which tokens attend to each other.

Packed documents are independent segments. A prompt is one segment, and its completions are segments that continue it,
so the prompt is stored once. `posttrain.lm.attention.varlen_attention` implements the attention.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from posttrain.core.data.host_copies import host_copy, know, on_host, send


@dataclass(frozen=True)
class Segments:
    """The segments of one flattened row, in order.

    A token attends to its own segment up to itself and to all segments that this one continues, recursively.

    Args:
        lengths: tokens of each segment, at least 1.
        parents: the index of the earlier segment that each continues; -1 at the start of a document.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.parents) or not self.lengths:
            raise ValueError(
                f"{len(self.lengths)} lengths and {len(self.parents)} parents; each segment needs one of both."
            )
        for i, (length, parent) in enumerate(zip(self.lengths, self.parents, strict=True)):
            if length < 1:
                raise ValueError(f"Segment {i} has {length} tokens; leave empty segments out.")
            if not -1 <= parent < i:
                raise ValueError(
                    f"Segment {i} continues segment {parent}, which must be an earlier one, or -1 for none."
                )

    @classmethod
    def documents(cls, lengths: Iterable[int]) -> Segments:
        """Documents that do not attend to each other."""
        lengths = tuple(map(int, lengths))
        return cls(lengths, (-1,) * len(lengths))

    @classmethod
    def groups(cls, groups: Iterable[tuple[int, Sequence[int]]]) -> Segments:
        """Of each ``(prompt length, completion lengths)``: the prompt, then its completions, each of which continues
        it.
        """
        lengths: list[int] = []
        parents: list[int] = []
        for prompt, completions in groups:
            parents += [-1, *[len(lengths)] * len(completions)]
            lengths += [int(prompt), *map(int, completions)]
        return cls(tuple(lengths), tuple(parents))

    @functools.cached_property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each segment begins in the row."""
        return tuple(accumulate(self.lengths[:-1], initial=0))

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """The position of each segment's first token in its document: how many tokens it continues."""
        offsets: list[int] = []
        for parent in self.parents:
            offsets.append(0 if parent < 0 else offsets[parent] + self.lengths[parent])
        return tuple(offsets)

    def ancestors(self, segment: int) -> list[int]:
        """What `segment` continues, from its document's beginning on."""
        found = []
        while (segment := self.parents[segment]) >= 0:
            found.append(segment)
        return found[::-1]

    def position_ids(self) -> torch.Tensor:
        """(1, N) positions: 0 at a document's beginning, and on from a parent's end."""
        lengths = torch.tensor(self.lengths)
        first = torch.tensor(self.offsets) - (lengths.cumsum(0) - lengths)
        return (torch.arange(self.num_tokens) + torch.repeat_interleave(first, lengths)).unsqueeze(0)

    def segment_ids(self) -> torch.Tensor:
        """(N,) the number of each token's segment."""
        return torch.repeat_interleave(torch.tensor(self.lengths))

    def reach(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(N,) and (N,) int32, by which a kernel decides who sees whom: token i sees token j where
        ``number[j] <= number[i] < end[j]``.

        Tokens are numbered so that those that continue a segment follow it: each is seen by itself and by a range.
        """
        sizes = list(self.lengths)  # of each segment with all that continues it
        for i, parent in reversed(list(enumerate(self.parents))):
            if parent >= 0:
                sizes[parent] += sizes[i]
        free, first = {-1: 0}, []
        for i, parent in enumerate(self.parents):
            first.append(free[parent])
            free[parent] += sizes[i]
            free[i] = first[i] + self.lengths[i]
        ids = self.segment_ids()
        at, size = torch.tensor(first, dtype=torch.int32), torch.tensor(sizes, dtype=torch.int32)
        moved = at - torch.tensor(self.starts, dtype=torch.int32)
        return torch.arange(self.num_tokens, dtype=torch.int32) + moved[ids], (at + size)[ids]

    def dense_mask(self, window: int | None = None) -> torch.Tensor:
        """(N, N) bool: whether token i sees token j, by definition. For tests, and for models that take masks.
        `window`: a token sees this many positions back, its own counted; None for all.
        """
        positions, ids = self.position_ids()[0], self.segment_ids()
        sees = torch.eye(len(self.lengths), dtype=torch.bool)  # of segments: itself, and what it continues
        for i, parent in enumerate(self.parents):
            if parent >= 0:
                sees[i] |= sees[parent]
        distance = positions[:, None] - positions[None, :]
        mask = sees[ids[:, None], ids[None, :]] & (distance >= 0)
        return mask if window is None else mask & (distance < window)

    def model_inputs(self, shape: Sequence[int], device: torch.device | str | None = None) -> dict[str, Any]:
        """The inputs of a forward besides ``input_ids`` of `shape`, (B, T) with B * T tokens row after row.

        ``position_ids`` are of that shape. ``attention_mask`` is one element: models use a four-dimensional mask as it
        is and build none.
        """
        rows, width = shape
        if rows * width != self.num_tokens:
            raise ValueError(
                f"The segments have {self.num_tokens} tokens, and input_ids of {tuple(shape)} {rows * width}."
            )
        positions = send(self.position_ids().view(rows, width), device or "cpu")
        return {"position_ids": positions, "attention_mask": torch.zeros(1, 1, 1, 1, device=device), "segments": self}


def with_segments(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A packed batch, whose ``seq_lengths`` (B, S) are the tokens of each row's documents and 0, as
    `Segments.model_inputs` has it. The rest of a row is one more document. Positions of several axes, (A, B, T), are
    those of the batch. A batch without ``seq_lengths`` is returned unchanged.
    """
    batch = dict(batch)
    if "seq_lengths" in batch:
        rows, width = batch["input_ids"].shape
        documents = [[*row, width - sum(row)] for row in on_host(batch.pop("seq_lengths")).tolist()]
        segments = Segments.documents(length for row in documents for length in row if length)
        positions = batch.get("position_ids")
        batch |= segments.model_inputs((rows, width), batch["input_ids"].device)
        if positions is not None and positions.ndim == 3:
            batch["position_ids"] = positions
    return batch


def without_padding(batch: Mapping[str, Any], ignore_index: int = -100) -> dict[str, Any]:
    """A batch padded on the right as one row without padding: for a model that reads segments, the same sum of losses.

    On the CPU the tokens with which all documents begin, such as a system prompt, are in the row once, see
    `shared_beginning`.

    Args:
        batch: ``input_ids`` and ``labels``, each (B, T), with ``attention_mask`` (B, T), or packed, with
            ``position_ids`` and ``seq_lengths``, as for `with_segments`. ``sources`` (B, T), a number for each token,
            may be there too.

    Returns:
        ``input_ids`` and ``labels`` (and ``sources``) of (1, N), where N counts tokens that are no padding, and
        `Segments.model_inputs`. The label of each row's first token, which nothing predicts, is `ignore_index`. A batch
        that holds anything else, or whose rows do not begin with a token, comes back as `with_segments` has it.
    """
    batch = dict(batch)
    kinds = {"input_ids", "labels"} | ({"sources"} & set(batch))
    if set(batch) == kinds | {"position_ids", "seq_lengths"}:
        documents = on_host(batch["seq_lengths"]).tolist()
    elif set(batch) == kinds | {"attention_mask"} and batch["attention_mask"].ndim == 2:
        documents = on_host(batch["attention_mask"]).sum(1, keepdim=True).tolist()
    else:
        return with_segments(batch)
    lengths = torch.tensor([sum(row) for row in documents])
    shown = torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]
    if not lengths.all() or not torch.equal(shown, on_host(batch.get("attention_mask", shown)).bool()):
        return with_segments(batch)
    places = shown.reshape(-1).nonzero().squeeze(1)
    rows = {name: _at(batch[name], places) for name in sorted(kinds)}
    segments = Segments.documents(length for row in documents for length in row if length)
    labels, first = rows["labels"], torch.arange(len(lengths)) * shown.shape[1]
    unpredicted = torch.isin(places, first)
    copy = host_copy(labels)
    labels = labels.masked_fill(send(unpredicted, labels.device), ignore_index)
    rows["labels"] = know(labels, None if copy is None else copy.masked_fill(unpredicted, ignore_index))
    ids = rows["input_ids"]
    if ids.is_cpu and (shared := shared_beginning(ids[0], rows["labels"][0] != ignore_index, segments.lengths)):
        own = segments.position_ids()[0] >= shared
        own[:shared] = True
        kept = own.nonzero().squeeze(1)
        segments = Segments.groups([(shared, [length - shared for length in segments.lengths])])
        rows = {name: row[:, kept] for name, row in rows.items()}
        ids = rows["input_ids"]
    return {**rows, **segments.model_inputs(ids.shape, ids.device)}


#: The part of a row's tokens that sharing must save: attention to a shared beginning takes a step of its own.
WORTH_SHARING = 1 / 8


def shared_beginning(ids: torch.Tensor, labelled: torch.Tensor, lengths: Sequence[int]) -> int:
    """How many tokens all documents of a row begin with and need to be there once; 0 where too little is saved.

    The token that predicts a document's first label stays its own, and so does at least one token.

    Args:
        ids: (N,) the documents, one after another. labelled: (N,) bool, whether a token has a label.
        lengths: tokens of each document.
    """
    count, sizes = len(lengths), torch.tensor(lengths)
    starts = sizes.cumsum(0) - sizes
    width = int(sizes.min()) - 1
    if count < 2 or width < 1 or (count - 1) * width < WORTH_SHARING * len(ids):
        return 0
    first = starts[:, None] + torch.arange(width + 1)
    alike = (ids[first[:, :width]] == ids[:width]).all(0) & ~labelled[first[:, 1:]].any(0)
    shared = int(alike.int().cumprod(0).sum())
    return shared if (count - 1) * shared >= WORTH_SHARING * len(ids) else 0


def _at(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """(1, N) those elements of the (B, T) `rows`; what the host knows of them it knows of the result."""
    copy = host_copy(rows)
    found = rows.reshape(-1)[send(places, rows.device)][None]
    return know(found, None if copy is None else copy.reshape(-1)[places][None])
