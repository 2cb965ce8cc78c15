"""Collators for supervised fine-tuning: padded, packed or padding-free batches."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from posttrain.core.config import set_among
from posttrain.core.data.collators import IGNORE_INDEX, flash_kwargs, pad_rows, round_up

logger = logging.getLogger(__name__)


@dataclass
class SFTCollator:
    """Prepared rows -> a batch.

    Plain rows give ``input_ids``, ``labels`` and ``attention_mask``, each (B, T), padded on the right.

    Packed rows (those with ``seq_lengths``, see `posttrain.sft.packing`) give ``input_ids``, ``labels`` and
    ``position_ids``, each (B, T). Positions restart at each document and NO attention mask: transformers separates
    documents by their positions, but only without a mask and with ``use_cache=False``. The padding at the end of a row
    is a separate document. `padding_free` does the same with all rows concatenated, (1, T).

    With `flash_kwargs` such batches are one row too, (1, T), and also hold the arguments of flash attention (see
    `posttrain.core.data.collators.flash_kwargs`). It separates documents by positions only within ONE row, and treats
    each of several rows as one document.

    Rows of several datasets, which have ``source`` (packed: ``sources`` of each document), also give ``sources`` (B,
    T), the number of each token's dataset.

    Labels are aligned with the inputs (the model shifts them) and -100 at padding and at each packed document's first
    token.

    Args:
        pad_token_id: the id of padding; the model never sees it, so any id works.
        pad_to_multiple_of: round T up to a multiple of this.
        padding_free: concatenate all rows. Needs attention that reads ``position_ids``.
        seq_lengths: such batches also hold ``seq_lengths`` (B, S), the tokens of each document, filled up with 0, for
            `posttrain.lm.attention.segments`.
        flash_kwargs: packed rows are laid out for flash attention.
        keep_rows: even then they stay (B, T), with documents given by ``cu_seq_lens_q`` alone.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None
    padding_free: bool = False
    seq_lengths: bool = False
    flash_kwargs: bool = False
    keep_rows: bool = False

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        documents = [row.get("seq_lengths") or [len(row["input_ids"])] for row in rows]
        columns: dict[str, tuple[list[Any], int]] = {
            "input_ids": ([row["input_ids"] for row in rows], self.pad_token_id),
            "labels": ([row.get("labels", row["input_ids"]) for row in rows], IGNORE_INDEX),
        }
        if "source" in rows[0] or "sources" in rows[0]:
            numbers = [row["sources"] if "sources" in row else [row["source"]] for row in rows]
            columns["sources"] = [np.repeat(*pair) for pair in zip(numbers, documents, strict=True)], 0
        is_packed = self.padding_free or "seq_lengths" in rows[0]
        if not is_packed:
            columns["attention_mask"] = [np.ones(length, dtype=np.int64) for (length,) in documents], 0
        elif self.padding_free or (self.flash_kwargs and not self.keep_rows):
            columns = {name: ([np.concatenate(values)], fill) for name, (values, fill) in columns.items()}
            documents = [[length for row in documents for length in row]]
        multiple = self.pad_to_multiple_of
        batch = {name: pad_rows(values, fill, pad_to_multiple_of=multiple) for name, (values, fill) in columns.items()}
        if not is_packed:
            return batch
        width = round_up(max(sum(row) for row in documents), multiple)
        batch["position_ids"] = torch.zeros_like(batch["input_ids"])
        whole: list[int] = []  # documents of the batch, padding among them
        for i, lengths in enumerate(documents):
            lengths = [*lengths, width - sum(lengths)]
            starts = np.cumsum(lengths) - lengths
            batch["position_ids"][i] = torch.from_numpy(np.arange(width) - np.repeat(starts, lengths))
            batch["labels"][i, starts[starts < width]] = IGNORE_INDEX
            whole += lengths
        if self.flash_kwargs:
            batch |= flash_kwargs(whole)
        return batch | ({"seq_lengths": pad_rows(documents, 0)} if self.seq_lengths else {})


NAME = "DataCollatorForLanguageModeling"  # of ours, of transformers and of trl


def mixes_texts(args: Any, data_collator: Any) -> str | None:
    """The argument that puts several texts into a row, whose borders `data_collator` would leave out; None: neither."""
    if not any(kind.__name__ == NAME for kind in type(data_collator).__mro__):
        return None
    return next(iter(set_among(args, "packing", "eval_packing", "padding_free")), None)


def collator_problems(args: Any, data_collator: Any) -> Iterator[str]:
    """That a collator of your own for rows of one text each would leave out where documents begin."""
    # The one that scripts often pass only pads rows and copies their tokens to labels.
    adds_nothing = type(data_collator).__name__ == NAME and not getattr(data_collator, "mlm", False)
    if (name := mixes_texts(args, data_collator)) and not adds_nothing:
        yield (
            f"{name}=True puts several texts into a row, and {type(data_collator).__name__} makes batches without "
            f"their borders. Leave data_collator out, for the trainer's own keeps them; or set {name}=False"
        )


def usable(args: Any, data_collator: Any) -> Any:
    """`data_collator`; None, and a warning, where the trainer's own does its work and keeps texts of a row apart."""
    if not (name := mixes_texts(args, data_collator)):
        return data_collator
    logger.warning(
        "%s is not used: %s=True puts several texts into a row, and only the trainer's own collator keeps them apart. "
        "Leave data_collator out.",
        type(data_collator).__name__,
        name,
    )
    return None
