"""Collators for sources and targets, for models with and without an encoder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.core.data.collators import IGNORE_INDEX, pad_rows
from posttrain.core.data.samplers import has_places
from posttrain.core.errors import DataError

logger = logging.getLogger(__name__)


@dataclass
class PromptTargetCollator:
    """Rows of ``input_ids`` and ``labels`` -> a batch for a model without an encoder, which gets both in one row.

    Labels may be the target's tokens, which then follow the prompt's; or they may be aligned with the inputs, -100 over
    the prompt, as for causal language models. Unless `joined` is set, the collator compares them with the inputs to
    find out.

    Gives ``input_ids``, ``attention_mask`` and ``labels``, each (B, T), padded on the right; labels are -100 over the
    prompt and over padding.

    Args:
        pad_token_id: the id of padding; the model never sees it, so any id works.
        joined: True: ``input_ids`` hold prompt and target; False: the prompt alone; None: see above.
        unclear: the same for ambiguous rows; see `unclear_rows`.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None
    joined: bool | None = None
    unclear: bool | None = None

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        kinds = [is_joined(row) if self.joined is None else self.joined for row in rows]
        unclear = self._unclear(rows, kinds)
        joined = [self._join(row, unclear if kind is None else kind) for row, kind in zip(rows, kinds, strict=True)]
        ids = [row for row, _ in joined]
        labels = [row for _, row in joined if row is not None]
        options: dict[str, Any] = {"pad_to_multiple_of": self.pad_to_multiple_of}
        batch = {
            "input_ids": pad_rows(ids, self.pad_token_id, **options),
            "attention_mask": pad_rows([[1] * len(row) for row in ids], 0, **options),
        }
        if len(labels) == len(rows):
            batch["labels"] = pad_rows(labels, IGNORE_INDEX, **options)
        return batch

    def _unclear(self, rows: list[dict[str, Any]], kinds: list[bool | None]) -> bool:
        labelled = [kind for row, kind in zip(rows, kinds, strict=True) if row.get("labels") is not None]
        if self.unclear is not None or None not in labelled:
            return bool(self.unclear)
        if all(kind is None for kind in labelled):
            raise DataError(
                f"The labels of all {len(labelled)} rows of a batch are their input_ids: either prompts with a "
                "target that repeats them, or text that is learned whole. Set joined=False for the former, "
                "joined=True for the latter, as in Seq2SeqTrainer(data_collator=PromptTargetCollator(pad_token_id, "
                "joined=True))."
            )
        return False not in labelled

    def _join(self, row: dict[str, Any], joined: bool) -> tuple[list[int], list[int] | None]:
        ids = _plain(row["input_ids"])
        if row.get("labels") is None:
            return ids, None
        labels = _plain(row["labels"])
        if not joined:
            return ids + labels, [IGNORE_INDEX] * len(ids) + labels
        if len(ids) != len(labels):
            said = f"a row has {len(ids)} input_ids and {len(labels)} labels"
            raise DataError(f"{said}; joined=True needs equal lengths.")
        return ids, labels


def is_joined(row: Mapping[str, Any]) -> bool | None:
    """Whether the ``input_ids`` of a row include its target; None if ambiguous."""
    if row.get("labels") is None:
        return None
    ids, labels = _plain(row["input_ids"]), _plain(row["labels"])
    if len(ids) != len(labels) or any(b not in (a, IGNORE_INDEX) for a, b in zip(ids, labels, strict=True)):
        return False
    return True if IGNORE_INDEX in labels else None


def unclear_rows(dataset: Any, rows: int = 1000) -> bool | None:
    """The meaning of rows of `dataset` whose labels equal their inputs, for `PromptTargetCollator`.

    The first unambiguous one of up to `rows` rows decides; otherwise whole texts are trained. None for a stream, which
    is not read ahead.
    """
    if not has_places(dataset):
        return None
    for i in range(min(rows, len(dataset))):
        row = dataset[i]
        if not isinstance(row, Mapping) or "input_ids" not in row or row.get("labels") is None:
            return None
        if (kind := is_joined(row)) is not None:
            return kind
    return True


def _plain(values: Any) -> list[int]:
    return values.tolist() if hasattr(values, "tolist") else list(values)


class MasksPadding:
    """A collator whose labels are -100 where they were padded with the tokenizer's pad token.

    Trained on, padding would outweigh the text of short rows. The first of several at the end of a row is kept where
    the pad token is the eos token too: that one ends the text.
    """

    def __init__(self, collator: Callable[[list[Any]], Any], pad_token_id: int, is_eos: bool) -> None:
        self.collator, self.pad_token_id, self.is_eos = collator, pad_token_id, is_eos
        self._told = False

    def __call__(self, rows: list[Any]) -> Any:
        batch = self.collator(rows)
        labels = batch.get("labels") if hasattr(batch, "get") else None
        if not isinstance(labels, torch.Tensor) or labels.ndim != 2 or not labels.shape[1]:
            return batch
        is_end = (labels == self.pad_token_id) | (labels == IGNORE_INDEX)
        padding = is_end.flip(1).cumprod(1).flip(1).bool() & (labels == self.pad_token_id)
        if self.is_eos:
            padding[:, 1:] &= padding[:, :-1].clone()
            padding[:, 0] = False
        if padding.any():
            batch["labels"] = labels.masked_fill(padding, IGNORE_INDEX)
            if not self._told:
                self._told = True
                logger.warning(
                    "Labels were padded with the pad token (%d), which would be trained on; it is replaced by -100. "
                    "Pad them with DataCollatorForSeq2Seq, and tokenize without padding.",
                    self.pad_token_id,
                )
        return batch
