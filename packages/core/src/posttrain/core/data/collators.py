"""Collators that turn a list of rows into a batch of tensors.

Padding is never recognised by its token id, because pad and eos are often the same token and the eos must be trained
on. Only `pad` and a few attributes of a tokenizer are used.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from posttrain.core.errors import DataError

IGNORE_INDEX = -100
"""The label that `torch.nn.functional.cross_entropy` leaves out."""

SPACE_MARKS = ("\u0120", "\u2581")
"""What byte-level and SentencePiece vocabularies write for the space before a word."""

Features = list[dict[str, Any]]
Batch = dict[str, Any]


def round_up(length: int, multiple: int | None) -> int:
    """The smallest multiple of `multiple` that is no smaller than `length`; `length` itself for None."""
    return length if not multiple else -(-length // multiple) * multiple


def pad_rows(
    rows: Sequence[Sequence[int] | np.ndarray],
    value: int,
    side: str = "right",
    pad_to_multiple_of: int | None = None,
    least: int = 0,
) -> torch.Tensor:
    """Rows of ragged length as one (B, T) long tensor, T the longest row or `least`, filled with `value` on `side`."""
    if side not in ("left", "right"):
        raise ValueError(f"side={side!r} is not one of left, right")
    length = max(least, *map(len, rows), 0)
    length = round_up(length, pad_to_multiple_of) if pad_to_multiple_of else length
    padded = np.full((len(rows), length), value, dtype=np.int64)
    for target, row in zip(padded, rows, strict=True):
        if len(row):
            target[slice(0, len(row)) if side == "right" else slice(-len(row), None)] = row
    return torch.from_numpy(padded)


def default_data_collator(features: Features, return_tensors: str = "pt") -> Batch:
    """Stack rows that already have equal shapes.

    A ``label`` (one number a row) or ``label_ids`` (several) becomes ``labels``: integers as long, others as float.
    Strings and columns that are None are left out; the first row sets the columns.
    """
    rows = [row if isinstance(row, Mapping) else _attributes(row) for row in features]
    batch = {}
    for name, first in rows[0].items():
        if first is None or isinstance(first, str):
            continue
        if name == "label_ids" and rows[0].get("label") is not None:
            continue
        target = "labels" if name in ("label", "label_ids") else name
        values = [row.get(name) for row in rows]
        if any(value is None for value in values):
            number = next(i for i, value in enumerate(values) if value is None)
            raise DataError(f"the column {name!r} is missing or null in row {number} of the batch.")
        try:
            batch[target] = _stack(values, is_label=target != name)
        except (ValueError, TypeError, RuntimeError) as error:
            raise DataError(
                f"the column {name!r} cannot be stacked into one tensor ({error}). Rows of several lengths need "
                "padding: pass the tokenizer as processing_class, or a data_collator that pads this column."
            ) from error
    return _as(return_tensors, batch)


def _attributes(row: Any) -> dict[str, Any]:
    if not hasattr(row, "__dict__"):
        raise DataError(f"a row is of type {type(row).__name__}; it must be a dict of columns.")
    return vars(row)


def _stack(values: list[Any], is_label: bool) -> torch.Tensor:
    if isinstance(values[0], torch.Tensor):
        stacked = torch.stack(values)
    elif isinstance(values[0], (np.ndarray, np.generic)):
        stacked = torch.from_numpy(np.stack(values))
    else:
        stacked = torch.tensor(values)  # Python's floats become float32, its ints long
    if is_label and (stacked.dim() == 1 or not isinstance(values[0], torch.Tensor)):
        return stacked.float() if stacked.is_floating_point() else stacked.long()
    return stacked


def _pad(tokenizer: Any, features: Features, **settings: Any) -> Batch:
    """``tokenizer.pad`` without its advice to call a fast tokenizer instead, which cannot be followed here."""
    if not all(isinstance(row, Mapping) for row in features):
        kind = next(type(row).__name__ for row in features if not isinstance(row, Mapping))
        raise DataError(f"a row is of type {kind}; it must be a dict of columns.")
    main_input = (getattr(tokenizer, "model_input_names", None) or ["input_ids"])[0]
    if main_input not in features[0]:
        raise DataError(
            f"the rows have no column {main_input!r}, which the tokenizer pads. Tokenize them first, for instance with "
            "dataset.map(lambda row: tokenizer(row['text']))."
        )
    advice = getattr(tokenizer, "deprecation_warnings", {})
    before = advice.get("Asking-to-pad-a-fast-tokenizer", False)
    advice["Asking-to-pad-a-fast-tokenizer"] = True
    try:
        return tokenizer.pad(features, **settings)
    except ValueError as error:
        raise DataError(f"{_unpadded(features, settings)}({error})") from error
    finally:
        advice["Asking-to-pad-a-fast-tokenizer"] = before


def _pad_inputs(collator: Any, features: Features, return_tensors: str) -> Batch:
    names = ("padding", "max_length", "pad_to_multiple_of")
    return _pad(
        collator.tokenizer, features, return_tensors=return_tensors, **{name: vars(collator)[name] for name in names}
    )


def _unpadded(features: Features, settings: dict[str, Any]) -> str:
    """Which columns cannot become a tensor, and what to do."""
    wrong = []
    for name in features[0]:
        values = [row.get(name) for row in features]
        lengths = {len(value) if isinstance(value, Sequence) else None for value in values}
        if any(value is None or isinstance(value, str) for value in values):
            wrong.append(f"{name!r} holds null or text, where numbers are needed")
        elif name.startswith("label") and len(lengths) > 1 and settings.get("padding") is True:
            wrong.append(
                f"{name!r} has several lengths, and only inputs are padded here; pass "
                "data_collator=DataCollatorForSeq2Seq(tokenizer) or DataCollatorForTokenClassification(tokenizer), "
                "which pad labels too"
            )
    return "; ".join(wrong) + ". " if wrong else "the tokenizer cannot pad these rows. "


def _as(return_tensors: str, batch: Batch) -> Batch:
    if return_tensors != "pt":
        batch.update({name: value.numpy() for name, value in batch.items() if isinstance(value, torch.Tensor)})
    return batch


@dataclass
class DataCollatorWithPadding:
    """Pad tokenized rows with the tokenizer; ``label`` and ``label_ids`` are renamed ``labels``.

    Args:
        tokenizer: pads on its own side with its own pad token.
        padding: True or "longest", "max_length", or False.
        max_length: the length for ``padding="max_length"``.
        pad_to_multiple_of: round the length up to a multiple of this.
        return_tensors: "pt" or "np".
    """

    tokenizer: Any
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def __call__(self, features: Features) -> Batch:
        batch = _pad_inputs(self, features, self.return_tensors)
        for name in ("label", "label_ids"):
            if name in batch:
                batch["labels"] = batch.pop(name)
        return batch


@dataclass
class DataCollatorForSeq2Seq:
    """Pad inputs with the tokenizer and labels with `label_pad_token_id`, on the tokenizer's side.

    Args:
        tokenizer: pads the inputs.
        model: if it has ``prepare_decoder_input_ids_from_labels``, the batch gets ``decoder_input_ids`` from it, unless
            the rows have theirs, which are padded.
        padding: True or "longest", "max_length", or False.
        max_length: the length of inputs and labels for ``padding="max_length"``.
        pad_to_multiple_of: round both lengths up to a multiple of this.
        label_pad_token_id: fills the labels; -100 is left out of the loss.
        return_tensors: "pt" or "np".
    """

    tokenizer: Any
    model: Any = None
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    label_pad_token_id: int = IGNORE_INDEX
    return_tensors: str = "pt"

    def __call__(self, features: Features, return_tensors: str | None = None) -> Batch:
        return_tensors = return_tensors or self.return_tensors
        name = "label" if "label" in features[0] else "labels"
        labels: list[Any] = [row.get(name) for row in features]
        fills = {"decoder_input_ids": self.tokenizer.pad_token_id, "decoder_attention_mask": 0}
        given = {key: [row[key] for row in features] for key in fills if key in features[0]}
        rest = [{key: value for key, value in row.items() if key != name and key not in given} for row in features]
        batch = _pad_inputs(self, rest, return_tensors)
        batch |= {key: pad_rows(rows, fills[key], self.tokenizer.padding_side) for key, rows in given.items()}
        if all(label is None for label in labels):
            return _as(return_tensors, batch)
        if self.padding in (False, "do_not_pad"):
            padded = torch.tensor([list(label) for label in labels], dtype=torch.long)
        else:
            least = (self.max_length if self.padding == "max_length" else None) or 0
            side, multiple = self.tokenizer.padding_side, self.pad_to_multiple_of
            padded = pad_rows(labels, self.label_pad_token_id, side, multiple, least)
            if least and padded.shape[1] > round_up(least, multiple):
                raise ValueError(
                    f"labels of {padded.shape[1]} tokens do not fit max_length={self.max_length}. Truncate them when "
                    "tokenizing, or raise max_length."
                )
        if "decoder_input_ids" not in given and hasattr(self.model, "prepare_decoder_input_ids_from_labels"):
            batch["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(labels=padded)
        batch["labels"] = padded
        return _as(return_tensors, batch)


@dataclass
class DataCollatorForLanguageModeling:
    """Pad rows, and make labels for masked (`mlm`) or causal language modeling.

    Masked: BERT, Devlin et al. 2018, https://arxiv.org/abs/1810.04805, section 3.1. A share `mlm_probability` of the
    tokens is predicted; of these `mask_replace_prob` are shown as the mask token, `random_replace_prob` as a random
    one, the others unchanged. Special tokens are never chosen.

    Causal: labels are those of a row, one for each token (as `posttrain.sft.SFTTrainer` makes them, -100 at a prompt),
    or else its inputs; -100 where the attention mask is 0. An eos that is also the pad token stays a label.

    Args:
        tokenizer: pads; masked modeling needs its ``mask_token``.
        whole_word_mask: choose words, all of whose tokens are predicted. Words follow from the column
            ``offset_mapping`` (a token that begins where the previous one ends belongs to its word), or else from the
            marks of the vocabulary: ``##`` within words, or a space mark at their start.
        pad_to_multiple_of: round the length up to a multiple of this.
        seed: draw from an own generator (plus the worker's id in a worker); None draws from torch's global one.
    """

    tokenizer: Any
    mlm: bool = True
    whole_word_mask: bool = False
    mlm_probability: float = 0.15
    mask_replace_prob: float = 0.8
    random_replace_prob: float = 0.1
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("mlm_probability", "mask_replace_prob", "random_replace_prob") if self.mlm else ():
            value = vars(self)[name]
            if value is None or not 0 <= value <= 1:
                raise ValueError(f"{name}={value!r} must be between 0 and 1")
        if self.mlm and self.mask_replace_prob + self.random_replace_prob > 1:
            raise ValueError(
                f"mask_replace_prob={self.mask_replace_prob} + random_replace_prob={self.random_replace_prob} "
                "must not exceed 1"
            )
        if self.mlm and self.tokenizer.mask_token is None:
            raise ValueError(
                "mlm=True needs a mask token, and this tokenizer has none. Set mlm=False for causal language modeling."
            )
        if self.whole_word_mask and not self.mlm:
            raise ValueError("whole_word_mask=True needs mlm=True, because mlm=False masks nothing. Set mlm=True.")
        self.generator: torch.Generator | None = None

    def __call__(self, features: list[Any], return_tensors: str | None = None) -> Batch:
        return _as(return_tensors or self.return_tensors, self.torch_call(features))

    def torch_call(self, features: list[Any]) -> Batch:
        """The batch as torch tensors; subclasses override it."""
        rows = [dict(row) if isinstance(row, Mapping) else {"input_ids": list(row)} for row in features]
        given: list[Any] = [row.pop("labels", None) for row in rows]
        offsets = [row.pop("offset_mapping", None) for row in rows]
        had_mask = "attention_mask" in rows[0]
        for row in rows:  # this mask separates padding from eos, so it is added if a row has none
            row.setdefault("attention_mask", [1] * len(row["input_ids"]))
        batch = _pad(self.tokenizer, rows, pad_to_multiple_of=self.pad_to_multiple_of, return_tensors="pt")
        padding = batch["attention_mask"] == 0
        if not had_mask and not isinstance(features[0], Mapping):
            del batch["attention_mask"]
        special = batch.pop("special_tokens_mask", None)
        if self.mlm:
            special = (self._special(batch["input_ids"]) if special is None else special).bool() | padding
            words = {"words": self._words(batch["input_ids"], padding, offsets)} if self.whole_word_mask else {}
            batch["input_ids"], batch["labels"] = self.torch_mask_tokens(
                batch["input_ids"], special_tokens_mask=special, **words
            )
        else:
            ids: list[Any] = [row["input_ids"] for row in rows]
            labels: list[Any] = [
                own if np.shape(own) == np.shape(row) else row for own, row in zip(given, ids, strict=True)
            ]
            side, length = self.tokenizer.padding_side, batch["input_ids"].shape[1]
            batch["labels"] = pad_rows(labels, IGNORE_INDEX, side, length).masked_fill(padding, IGNORE_INDEX)
        return batch

    def torch_mask_tokens(
        self, inputs: torch.Tensor, special_tokens_mask: torch.Tensor | None = None, words: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the tokens to predict. Override it to choose them differently.

        Args:
            inputs: (B, T) token ids.
            special_tokens_mask: (B, T) nonzero at special tokens and padding; asked of the tokenizer if None.
            words: (B, T) number of the word that each token belongs to; None draws tokens.

        Returns:
            The inputs to show and the labels, both (B, T).
        """
        special = self._special(inputs) if special_tokens_mask is None else special_tokens_mask
        if self.seed is not None and self.generator is None:
            worker = torch.utils.data.get_worker_info()
            self.generator = torch.Generator().manual_seed(self.seed + (worker.id if worker else 0))
        chosen = torch.bernoulli(torch.full(inputs.shape, float(self.mlm_probability)), generator=self.generator).bool()
        if words is not None:  # the draw of a word is that of its number
            chosen = chosen.gather(1, words)
        chosen &= ~special.bool()
        draw = torch.rand(inputs.shape, generator=self.generator)
        others = torch.randint(len(self.tokenizer), inputs.shape, generator=self.generator)
        masked = draw < self.mask_replace_prob
        random = ~masked & (draw < self.mask_replace_prob + self.random_replace_prob)
        shown = torch.where(chosen & random, others, inputs)
        shown = shown.masked_fill(chosen & masked, self.tokenizer.mask_token_id)
        return shown, inputs.masked_fill(~chosen, IGNORE_INDEX)

    def _special(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(B, T), 1 at special tokens, as the tokenizer knows them."""
        mask_of = self.tokenizer.get_special_tokens_mask
        return torch.tensor([mask_of(row, already_has_special_tokens=True) for row in input_ids.tolist()])

    def _words(self, input_ids: torch.Tensor, padding: torch.Tensor, offsets: list[Any]) -> torch.Tensor:
        """The number of each token's word in its row, (B, T), counted from 0."""
        continues = torch.zeros(input_ids.shape, dtype=torch.bool)
        for row, ids, padded, spans in zip(continues, input_ids, padding, offsets, strict=True):
            place = (~padded).nonzero().flatten()
            if spans is not None:
                ends, starts = torch.as_tensor(spans)[:-1, 1], torch.as_tensor(spans)[1:, 0]
                spans_text = torch.as_tensor(spans)[1:, 1] > starts  # special tokens span nothing
                row[place[1:]] = (ends == starts) & spans_text
                continue
            tokens = self.tokenizer.convert_ids_to_tokens(ids[place].tolist())
            marked = any(token[:1] in SPACE_MARKS for token in tokens)
            inside = [token.startswith("##") or (marked and token[:1] not in SPACE_MARKS) for token in tokens]
            row[place] = torch.tensor(inside, dtype=torch.bool)
        continues[:, 0] = False
        return (~continues).long().cumsum(1) - 1


def flash_kwargs(lengths: Iterable[int]) -> dict[str, Any]:
    """What transformers' flash attention takes for documents of these lengths in one row; empty ones are left out.

    ``cu_seq_lens_q`` and ``cu_seq_lens_k``: where each begins and the last ends, (documents + 1,) int32.
    ``max_length_q`` and ``max_length_k``: the longest, int.
    """
    lengths = [int(length) for length in lengths if length]
    borders = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    starts = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders.clone()}
    return starts | dict.fromkeys(("max_length_q", "max_length_k"), max(lengths, default=0))
