"""Packs several documents into one row, so that batches hold little padding.

Each document has its own positions, by which attention separates documents, and its first label is -100, so that no
document predicts the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from posttrain.core.errors import DataError
from posttrain.core.evaluation.eval_loop import eval_mode
from posttrain.core.models.wrapping import base_model, has_virtual_tokens
from posttrain.lm.attention.flash_attention import plain_attention
from posttrain.lm.preparation.pipeline import cache_location
from posttrain.sft.collators import SFTCollator

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)

STRATEGIES = ("bfd", "bfd_split", "wrapped")
BINS_PER_BATCH = 256
#: Rows of a stream that are packed together: enough to fill bins, few enough to begin soon and to be read again on
# resume.
ROWS_PER_WINDOW = 1000


@dataclass(frozen=True)
class Packing:
    """The assignment of rows, or pieces of rows, to bins.

    rows, starts, stops: (P,) each piece is ``row[start:stop]``. Pieces of one bin are adjacent. bounds: (N + 1,) bin i
    holds the pieces ``bounds[i]:bounds[i + 1]``. capacity: tokens that fit into a bin.
    """

    rows: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    bounds: np.ndarray
    capacity: int

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, i: int) -> list[tuple[int, int, int]]:
        """The parts of rows in bin `i` as (row, start, stop)."""
        if not 0 <= i < len(self):
            raise IndexError(i)
        pieces = slice(self.bounds[i], self.bounds[i + 1])
        return list(
            zip(self.rows[pieces].tolist(), self.starts[pieces].tolist(), self.stops[pieces].tolist(), strict=True)
        )

    @property
    def lengths(self) -> np.ndarray:
        """(N,) the tokens of each bin."""
        ends = np.cumsum(np.concatenate([[0], self.stops - self.starts]))[self.bounds]
        return np.diff(ends)

    @property
    def fill(self) -> float:
        """The share of all bins' capacity that holds tokens."""
        return float((self.stops - self.starts).sum() / max(1, len(self) * self.capacity))

    def tell(self, name: str) -> None:
        """Write to the log how full the bins of the dataset `name` are."""
        logger.info("%s: packed into %s rows, %.1f%% full.", name, f"{len(self):,}", 100 * self.fill)


def pack(lengths: np.ndarray, capacity: int, strategy: str = "bfd") -> Packing:
    """Distribute rows over bins of `capacity` tokens. Returns the bins, in the order of their first row; deterministic.
    Raises a `ValueError` for an unknown strategy or a capacity below 1, and a `DataError` for "bfd" and a row that fits
    no bin.

    Args:
        lengths: (R,) tokens of each row. Rows of no tokens are left out.
        capacity: tokens of a bin.
        strategy: "bfd": best fit, longest first (Johnson 1974, "Fast algorithms for bin packing"): rows stay whole, and
            each goes where it leaves the least space. "bfd_split": the same, after cutting longer rows into pieces of
            `capacity`. "wrapped": rows end to end, cut every `capacity` tokens.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if strategy not in STRATEGIES:
        raise ValueError(f"packing strategy {strategy!r} is not one of {', '.join(STRATEGIES)}")
    if capacity < 1:
        raise ValueError(f"capacity={capacity} must be >= 1")
    if strategy == "bfd" and len(lengths) and lengths.max() > capacity:
        row = int(lengths.argmax())
        raise DataError(
            f"Row {row} has {lengths[row]} tokens and fits no bin of {capacity}. Truncate the rows to {capacity} "
            'first, raise max_length, or set packing_strategy="bfd_split", which cuts them.'
        )
    first = np.cumsum(lengths) - lengths if strategy == "wrapped" else np.zeros_like(lengths)
    rows, starts, stops = _cut(lengths, first, capacity)
    if strategy == "wrapped":
        bins = (first[rows] + starts) // capacity
    else:
        bins = _best_fit(stops - starts, capacity)
        # Bins are ordered by their first piece to preserve the order of the dataset.
        _, first_piece, bins = np.unique(bins, return_index=True, return_inverse=True)
        bins = np.argsort(np.argsort(first_piece))[bins]
    order = np.argsort(bins, kind="stable")
    count = int(bins.max()) + 1 if len(bins) else 0
    bounds = np.concatenate([[0], np.cumsum(np.bincount(bins, minlength=count))])
    return Packing(rows[order], starts[order], stops[order], bounds, capacity)


def _cut(lengths: np.ndarray, first: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut concatenated rows from position `first` on at multiples of `capacity`: (P,) rows, starts and stops."""
    begin, end = first // capacity, -(-(first + lengths) // capacity)
    counts = np.where(lengths > 0, end - begin, 0)
    rows = np.repeat(np.arange(len(lengths)), counts)
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    edge = (begin[rows] + nth) * capacity - first[rows]
    return rows, np.maximum(edge, 0), np.minimum(edge + capacity, lengths[rows])


def _best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """(P,) the bin of each piece under best fit, longest first.

    Pieces of one length are placed together, with the result of placing them one by one: the fullest bin that still
    fits one takes as many as fit. In `rooms`, bit r is set if a bin with r free tokens exists, so a shift finds the
    fullest bin that fits.
    """
    bins = np.empty(len(lengths), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    cuts = np.flatnonzero(np.diff(lengths[order])) + 1
    by_room: dict[int, list[int]] = {}
    rooms, num_bins = 0, 0
    for group in np.split(order, cuts) if len(order) else []:
        length, placed = int(lengths[group[0]]), 0
        while placed < len(group):
            missing = len(group) - placed
            fitting = rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                per_bin = room // length
                needed = -(-missing // per_bin)
                used, by_room[room] = by_room[room][:needed], by_room[room][needed:]
                if not by_room[room]:
                    rooms &= ~(1 << room)
            else:
                room, per_bin = capacity, capacity // length
                used = list(range(num_bins, num_bins - (-missing // per_bin)))
                num_bins += len(used)
            targets = np.repeat(used, per_bin)[:missing]
            bins[group[placed : placed + len(targets)]] = targets
            placed += len(targets)
            in_last = len(targets) - (len(used) - 1) * per_bin  # the last bin may take fewer than it could
            for members, pieces in ((used[:-1], per_bin), (used[-1:], in_last)):
                left = room - pieces * length
                if members and left:
                    by_room.setdefault(left, []).extend(members)
                    rooms |= 1 << left
    return bins


def pack_stages(lengths: np.ndarray, stages: Sequence[int], capacity: int, strategy: str = "bfd") -> Packing:
    """As `pack`, of rows in stages, whose bins follow one another.

    Args:
        stages: rows of each stage.
    """
    first = np.cumsum([0, *stages])
    parts = [pack(part, capacity, strategy) for part in np.split(lengths, first[1:-1])]
    done = np.cumsum([0, *(len(part.rows) for part in parts)])
    return Packing(
        np.concatenate([part.rows + start for part, start in zip(parts, first[:-1], strict=True)]),
        np.concatenate([part.starts for part in parts]),
        np.concatenate([part.stops for part in parts]),
        np.concatenate([[0], *(part.bounds[1:] + start for part, start in zip(parts, done[:-1], strict=True))]),
        capacity,
    )


def trained_tokens(dataset: Dataset) -> np.ndarray:
    """(R,) the labels of each row of a prepared dataset that the loss predicts: not a row's first."""
    counts = [np.zeros(0, dtype=np.int64)]
    for values, offsets in _TokenRows(dataset.with_format("arrow")[:]).columns["labels"]:
        trained = values != -100
        trained[offsets[:-1]] = False
        before = np.concatenate([[0], np.cumsum(trained)])
        counts.append(before[offsets[1:]] - before[offsets[:-1]])
    return np.concatenate(counts)


def pack_dataset(
    dataset: Dataset, capacity: int, strategy: str = "bfd", name: str = "train", stages: Sequence[int] = ()
) -> Dataset:
    """Pack a prepared dataset. Returns rows of ``input_ids``, ``labels`` (-100 at each document's first token) and
    ``seq_lengths``, the tokens of each document, with ``sources``, the source of each document, where `dataset` has it.
    They are kept in datasets' cache next to `dataset`, if that is on disk.

    Args:
        dataset: rows of ``input_ids`` and ``labels``, and of ``source`` where several datasets are mixed.
        capacity: tokens of a packed row; usually ``max_length``.
        strategy: see `pack`. Under "bfd_split" and "wrapped" rows should not have been truncated before.
        name: of the dataset, for the log. stages: rows of each of its stages, if it has several, which stay apart.
    """
    from datasets import Dataset

    tokens = _TokenRows(dataset.with_format("arrow")[:])
    packing = pack_stages(tokens.lengths, stages or (len(dataset),), capacity, strategy)
    packing.tell(name)
    features = _packed_features(tokens.sources is not None)
    cache_file, fingerprint = cache_location(dataset, "packed", capacity, strategy, *stages)
    bins = Dataset.from_dict({"bin": np.arange(len(packing))})
    return bins.map(
        lambda batch: tokens.gather(packing, batch["bin"]),
        batched=True,
        batch_size=BINS_PER_BATCH,
        remove_columns=["bin"],
        features=features,
        cache_file_name=cache_file,
        keep_in_memory=cache_file is None,
        new_fingerprint=fingerprint,
        desc="Packing",
    )


def pack_columns(columns: dict[str, list], capacity: int, strategy: str = "bfd") -> dict[str, list]:
    """The columns of `pack_dataset` for the rows of a stream that are packed together, given by their columns."""
    import pyarrow as pa

    kinds = {"source": pa.int32()}
    tokens = _TokenRows(pa.table({n: pa.array(columns[n], kinds.get(n, pa.list_(pa.int32()))) for n in columns}))
    packing = pack(tokens.lengths, capacity, strategy)
    if not len(packing):
        return {name: [] for name in _packed_features(tokens.sources is not None)}
    return tokens.gather(packing, list(range(len(packing)))).to_pydict()


def pack_stream(stream: IterableDataset, capacity: int, strategy: str = "bfd") -> IterableDataset:
    """Pack a prepared stream, `ROWS_PER_WINDOW` rows at a time, because its length is unknown.

    Arguments and rows are those of `pack_dataset`. The last packed row of each window is less full than the others.
    """
    return stream.map(
        lambda columns: pack_columns(columns, capacity, strategy),
        batched=True,
        batch_size=ROWS_PER_WINDOW,
        remove_columns=stream.column_names,
        features=_packed_features("source" in stream.column_names),
    )


def _packed_features(has_sources: bool):
    from datasets import Features, List, Value

    columns = ("input_ids", "labels", "seq_lengths", *(("sources",) if has_sources else ()))
    return Features({name: List(Value("int32")) for name in columns})


def documents_leak(
    model: torch.nn.Module, length: int = 8, collate: Callable[[list[dict]], dict] | None = None
) -> float:
    """The change of a document's logits when another packed one changes, relative to the largest logit.

    0 if the model separates documents. In transformers, attention does so only if ``position_ids`` reach the mask;
    recurrent, state-space and convolution layers do not, and neither do BLOOM, MPT, OPT and GPT-OSS (transformers
    5.23). Costs three forward passes of ``4 * length`` tokens, without dropout, under the active autocast.

    Args:
        collate: makes the batch of two packed rows, as in training; by default positions alone, (2, T). Attention may
            handle one packed row correctly, but not two.
    """
    collate = SFTCollator(pad_token_id=0) if collate is None else collate
    device = next(model.parameters()).device
    vocab_size = base_model(model).config.get_text_config().vocab_size
    documents = [[token % vocab_size for token in range(1 + i * length, 1 + (i + 1) * length)] for i in range(4)]

    def logits(changed: tuple[int, ...]) -> list[torch.Tensor]:
        """(length, V) of each of the four documents, where those of these numbers are read backwards."""
        texts = [text[::-1] if i in changed else text for i, text in enumerate(documents)]
        rows = [{"input_ids": texts[i] + texts[i + 1], "seq_lengths": [length] * 2} for i in (0, 2)]
        batch = {name: value for name, value in collate(rows).items() if name != "labels"}
        batch = {n: value.to(device) if isinstance(value, torch.Tensor) else value for n, value in batch.items()}
        batch.pop("seq_lengths", None)
        found = model(**batch, use_cache=False).logits
        found = found[:, : 2 * length].flatten(0, 1) if len(found) > 1 else found[0, : 4 * length]
        return list(found.float().split(length))

    try:
        with torch.no_grad(), eval_mode(model):
            before, odd, second = logits(()), logits((0, 2)), logits((1,))
    except TypeError:  # the model takes no positions
        return 1.0
    pairs = [(before[1], odd[1]), (before[3], odd[3]), (before[2], second[2]), (before[3], second[3])]
    largest = max(float(part.abs().max()) for part in before)
    return max(float((a - b).abs().max()) for a, b in pairs) / max(largest, 1e-12)


def refuse_leaks(
    model: torch.nn.Module,
    device: torch.device,
    collate: Callable[[list[dict]], dict],
    images_leak: Callable[[torch.nn.Module], float] | None = None,
) -> None:
    """Raise if documents of packed rows, laid out by `collate`, attend to each other in `model`, or if `images_leak`
    finds that their images affect each other.

    Weights that are not on `device` yet, such as those sharded later, are tested with the model's plain attention,
    because flash attention needs the device.
    """
    if has_virtual_tokens(model):
        raise ValueError(
            "The virtual tokens of this adapter are at the start of a row, so only the first of several documents "
            "would see them. Set packing=False and padding_free=False, or train an adapter in the layers, such as "
            "peft.LoraConfig."
        )
    with plain_attention(model) if next(model.parameters()).device.type != device.type else nullcontext():
        leak = documents_leak(model, collate=collate)
        of_images = images_leak(model) if images_leak is not None and leak < 1 else 0.0
    exact = next(model.parameters()).dtype == torch.float32 and not torch.is_autocast_enabled(device.type)
    allowed = 1e-4 if exact else 5e-3
    if leak <= allowed < of_images:
        raise ValueError(
            f"{type(base_model(model)).__name__} lets the images of a packed row's documents affect each other (logits "
            f"differ by {of_images:.2g} with the place of another document's image). Set packing=False and "
            "padding_free=False."
        )
    if not leak <= allowed:  # nor where it is no number
        raise ValueError(
            f"{type(base_model(model)).__name__} lets the documents of a packed row attend to each other (logits "
            f"differ by {leak:.2g} from those of a document alone). Set packing=False and padding_free=False, or "
            "load the model with attn_implementation='sdpa' or 'flash_attention_2' if it supports them."
        )


class _TokenRows:
    """The token columns of an Arrow table as slices of flat arrays, read from disk only where they are used."""

    def __init__(self, table) -> None:
        self.columns = {name: self._flatten(table.column(name)) for name in ("input_ids", "labels")}
        self.lengths = np.concatenate([np.diff(offsets) for _, offsets in self.columns["input_ids"]] or [np.empty(0)])
        self.sources = table.column("source").to_numpy() if "source" in table.column_names else None

    @staticmethod
    def _flatten(column) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(chunk.values.to_numpy(), chunk.offsets.to_numpy()) for chunk in column.chunks if len(chunk)]

    def _pieces(self, name: str, packing: Packing, pieces: slice) -> list[np.ndarray]:
        chunks = self.columns[name]
        sizes = np.array([len(offsets) - 1 for _, offsets in chunks])
        chunk_of = np.searchsorted(np.cumsum(sizes), packing.rows[pieces], side="right")
        row_in_chunk = packing.rows[pieces] - (np.cumsum(sizes) - sizes)[chunk_of]
        result = []
        for chunk, row, start, stop in zip(
            chunk_of, row_in_chunk, packing.starts[pieces], packing.stops[pieces], strict=True
        ):
            values, offsets = chunks[chunk]
            result.append(values[offsets[row] + start : offsets[row] + stop])
        return result

    def gather(self, packing: Packing, bins: list[int]):
        """The table of the packed rows `bins`, which follow one another."""
        import pyarrow as pa

        bounds = packing.bounds[bins[0] : bins[-1] + 2]
        pieces = slice(bounds[0], bounds[-1])
        lengths = (packing.stops - packing.starts)[pieces].astype(np.int32)
        first = np.cumsum(lengths) - lengths
        ids = np.concatenate(self._pieces("input_ids", packing, pieces)).astype(np.int32)
        labels = np.concatenate(self._pieces("labels", packing, pieces)).astype(np.int32)
        labels[first] = -100
        documents = (bounds - bounds[0]).astype(np.int32)
        tokens = np.concatenate([first, [len(ids)]]).astype(np.int32)[documents]
        columns = {
            "input_ids": pa.ListArray.from_arrays(tokens, ids),
            "labels": pa.ListArray.from_arrays(tokens, labels),
            "seq_lengths": pa.ListArray.from_arrays(documents, lengths),
        }
        if self.sources is not None:
            columns["sources"] = pa.ListArray.from_arrays(
                documents, self.sources[packing.rows[pieces]].astype(np.int32)
            )
        return pa.table(columns)
