"""Prepares, packs and collates rows with images, while batches are made; lengths are found without decoding one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from posttrain.core.data.collators import IGNORE_INDEX, pad_rows
from posttrain.core.data.pipeline import to_device
from posttrain.core.data.samplers import is_stream
from posttrain.core.errors import ConfigError, DataError, require
from posttrain.core.evaluation.eval_loop import eval_mode
from posttrain.lm.attention.document_positions import DocumentPositions, invocation_tokens
from posttrain.lm.images import image_tokens
from posttrain.lm.images.images import ROW_NUMBER, ImageReader, fault_of, numbered, read_images
from posttrain.lm.images.vision import CountedBatch, VisionProcessor, check_processor, join_tensors, place_images
from posttrain.lm.preparation.pipeline import counts_of
from posttrain.lm.preparation.rows import NO_TOKENS, ReadsImages
from posttrain.sft.collators import SFTCollator
from posttrain.sft.config import SFTConfig
from posttrain.sft.dataset import shuffled
from posttrain.sft.packing import Packing, pack
from posttrain.sft.rows import Draft, Preparation, preparation_options

#: Columns of a row that the collator reads; `SFTTrainer` adds those of the datasets.
COLUMNS = (
    *"images image videos video messages conversations prompt completion text tools chat_template_kwargs".split(),
    ROW_NUMBER,
)
#: The key of a packed row, under which the rows in it are.
PACKED = "packed_rows"
PADDED = "Rows with images are padded. With packing=True it goes over each document alone."
#: The columns of messages, in the order in which they are rendered.
TALKS = ("messages", "conversations", "prompt", "completion")


def check_config(args: Any, processor: Any) -> None:
    """Raise ConfigError for settings that do not support images, TypeError without an image processor."""
    check_processor(processor)
    problems = []
    if (args.packing or args.eval_packing) and args.packing_strategy != "bfd":
        problems.append(
            f"packing_strategy={args.packing_strategy!r} splits rows, and images cannot be split; set "
            "packing_strategy=bfd"
        )
    if args.too_long == "split":
        problems.append("too_long='split' is not supported for rows with images; set truncate, drop or error")
    if problems:
        raise ConfigError(type(args).__name__, problems)


class VisionPreparation(ReadsImages, Preparation):
    """Turns rows with and without images into tokens, labels and image tensors; arguments as for `ReadsImages`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.end_tokens |= self.vision.end_tokens(self.chat_template_kwargs)

    def _read(self, row: Any, index: int) -> list[Draft]:
        try:
            row, given = place_images(row, TALKS) if isinstance(row, Mapping) else (row, [])
            images = read_images(given, self.reader)
        except DataError as error:
            return [Draft(index, fault=fault_of(error, index, self.drops_bad_images))]
        return [self._show(draft, images) for draft in super()._read(row, index)]

    def _show(self, draft: Draft, images: Sequence[Any]) -> Draft:
        if images and draft.ids is not NO_TOKENS:
            draft.fault = "the row has images and input_ids; give its messages or its text instead"
        if draft.fault or draft.ids is not NO_TOKENS:
            return draft
        try:
            draft.shown = self.vision.show(draft.text, images)
        except DataError as error:
            draft.fault = str(error)
            return draft
        draft.text, draft.spans = draft.shown.text, draft.shown.spans(draft.spans)
        return draft

    def _label(self, draft: Draft, encoding: Any) -> None:
        super()._label(draft, encoding)
        draft.labels[np.isin(draft.ids, list(draft.shown.ids))] = IGNORE_INDEX

    def _fit(self, draft: Draft) -> list[Draft]:
        """The row, cut where no token of an image is lost; else it has a fault, or is an error."""
        most = self.max_length
        if most is not None and len(draft.ids) > most and draft.shown.tensors:
            cut = draft.ids[most:] if self.truncation == "keep_start" else draft.ids[:-most]
            if self.too_long == "truncate" and np.isin(cut, list(draft.shown.ids)).any():
                raise DataError(
                    f"Row {draft.row} has {len(draft.ids)} tokens, and max_length={most} would cut off tokens of its "
                    "images. Set a larger max_length, max_length=None, too_long=drop, or let the processor make "
                    "smaller images."
                )
        return super()._fit(draft)


@dataclass
class VisionCollator:
    """Rows with and without images -> a batch.

    A row has ``images`` (or one ``image``): PIL images, arrays, bytes, paths, URLs or what a Hub dataset stores; and
    ``messages``, a ``prompt`` and a ``completion`` (texts or messages), or a ``text`` with the processor's
    placeholders. Parts of messages may hold images themselves, see `posttrain.lm.images.vision.place_images`. A row of
    `PackedRows` holds several such rows.

    Gives ``input_ids``, ``labels`` and ``attention_mask``, each (B, T), padded on the right, and the processor's image
    tensors, joined along their first dimension. Labels are -100 at padding, at tokens of images and where the
    preparation says so. Packed rows have ``position_ids`` in place of the mask, (B, T), or (4, B, T) where those of
    images have three dimensions; they begin anew with each document, whose first label is -100. Rows that cannot be
    trained on are left out, and counted in the batch's `row_facts`; if none is left, there is one of a single token
    without a label.

    Args:
        prepare: makes tokens, labels and image tensors of rows.
        positions: numbers the documents of packed rows.
        pad_to_multiple_of: round T up to a multiple of this.
        padding_free: all rows of a batch become one.
        one_row: all packed rows of a batch become one, for attention that separates documents in one row alone.
        seq_lengths: packed batches also hold ``seq_lengths`` (B, S), the tokens of each document, filled up with 0, for
            `posttrain.lm.attention.segments`.
    """

    prepare: VisionPreparation
    positions: DocumentPositions
    pad_to_multiple_of: int | None = None
    padding_free: bool = False
    one_row: bool = False
    seq_lengths: bool = False

    def __call__(self, rows: list[dict[str, Any]]) -> CountedBatch:
        is_packed = PACKED in rows[0]
        bins = [self._prepared(row[PACKED]) for row in rows] if is_packed else [self._prepared(rows)]
        kept = [[draft for draft in drafts if not draft.fault] for drafts in bins]
        lines = [line for line in kept if line] if is_packed else [[draft] for draft in kept[0]]
        batch = self.lay_out(lines, packed=is_packed or self.padding_free)
        batch.row_facts = counts_of([draft for drafts in bins for draft in drafts], self.prepare)
        return batch

    def _prepared(self, rows: Sequence[Mapping[str, Any]]) -> list[Draft]:
        numbers = [int(row.get(ROW_NUMBER, place)) for place, row in enumerate(rows)]
        bare = [{name: value for name, value in row.items() if name != ROW_NUMBER} for row in rows]
        return self.prepare(bare, numbers)

    def lay_out(self, lines: list[list[Draft]], packed: bool) -> CountedBatch:
        """The batch of prepared documents, those of each row in a list, before rows are joined to one."""
        if not lines:
            end = np.array([self.prepare.eos_token_id or 0], dtype=np.int32)
            lines = [[Draft(-1, ids=end, labels=np.full_like(end, IGNORE_INDEX))]]
        if self.padding_free or (packed and self.one_row):
            lines = [[draft for line in lines for draft in line]]
        rows = []
        for line in lines:
            parts = zip(*((draft.ids, draft.labels) for draft in line), strict=True)
            ids, labels = (np.concatenate(part) for part in parts)
            lengths = {"seq_lengths": [len(draft.ids) for draft in line]} if packed else {}
            rows.append({"input_ids": ids, "labels": labels, **lengths})
        pad, multiple = self.prepare.tokenizer.pad_token_id, self.pad_to_multiple_of
        batch = CountedBatch(SFTCollator(pad, multiple, seq_lengths=self.seq_lengths)(rows))
        seen = [[draft.shown.prompt(draft.ids.tolist()) for draft in line] for line in lines]
        for name in self.prepare.vision.token_inputs:
            numbers = [[n for one in line for n in one.numbers.get(name, [0] * len(one.ids))] for line in seen]
            batch[name] = pad_rows(numbers, 0, pad_to_multiple_of=multiple)
        if packed and self.positions.dimensions > 1:
            axes = [torch.cat([self.positions(one) for one in line], 1) for line in seen]
            padding = [torch.arange(batch["input_ids"].shape[1] - row.shape[1]).expand(len(row), -1) for row in axes]
            batch["position_ids"] = torch.stack([torch.cat(both, 1) for both in zip(axes, padding, strict=True)], 1)
        images = join_tensors([draft.shown.tensors for line in lines for draft in line])
        batch.entries = {
            name: [sum(len(draft.shown.tensors.get(name, ())) for draft in line) for line in lines] for name in images
        }
        batch.update(images)
        return batch

    def of_tokens(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """A packed batch of rows of ``input_ids`` whose ``seq_lengths`` are the tokens of each document."""
        lines = []
        for row in rows:
            parts = np.split(np.array(row["input_ids"], dtype=np.int32), np.cumsum(row["seq_lengths"])[:-1])
            lines.append([Draft(-1, ids=part, labels=part.copy()) for part in parts])
        return self.lay_out(lines, packed=True)


def preparation(vision: VisionProcessor, args: Any, formatting_func: Any = None) -> VisionPreparation:
    """The preparation of rows with images that `args`, an `SFTConfig`, sets."""
    options = preparation_options(args) | {"formatting_func": formatting_func}
    return VisionPreparation(vision, ImageReader.of(args), args.bad_images == "drop", **options)


def vision_collator(
    processor: Any, model: torch.nn.Module, args: Any, formatting_func: Any, pad_to_multiple_of: int | None
) -> VisionCollator:
    """The collator of an `SFTTrainer` with these arguments, for rows with images."""
    prepare = preparation(VisionProcessor.of_run(processor, model, args), args, formatting_func)
    prepare.invocation = invocation_tokens(model)
    return VisionCollator(prepare, DocumentPositions(model), pad_to_multiple_of, args.padding_free)


def row_lengths(dataset: Any, prepare: VisionPreparation) -> list[int]:
    """Tokens of each row of `dataset` as `prepare` makes batches of it, see `image_tokens.row_lengths`."""
    if isinstance(dataset, PackedRows):
        return dataset.packing.lengths.tolist()

    def lengths(drafts: Sequence[Draft], numbers: Sequence[int]) -> list[int]:
        tokens = dict.fromkeys(numbers, 0)
        for draft in drafts:  # a row may have several
            tokens[draft.row] += _length(draft, prepare)
        return [tokens[number] for number in numbers]

    return image_tokens.row_lengths(dataset, prepare, lengths)


def _length(draft: Draft, prepare: VisionPreparation) -> int:
    """Tokens of a draft with brief images; 0 where the row will be dropped."""
    if draft.fault:
        return 0
    length = len(draft.ids) + draft.shown.hidden
    most = prepare.max_length
    if most is None or length <= most or prepare.too_long == "error":
        return length
    return most if prepare.too_long == "truncate" else 0


class PackedRows(Dataset):
    """Bins of whole rows: item i is ``{"packed_rows": [row, ...]}``.

    Args:
        rows: by index. packing: which of them are in each bin.
    """

    column_names = [PACKED]

    def __init__(self, rows: Any, packing: Packing) -> None:
        self.rows, self.packing = rows, packing

    def __len__(self) -> int:
        return len(self.packing)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {PACKED: [self.rows[row] for row, _, _ in self.packing[int(index)]]}


def ready_rows(dataset: Any, args: SFTConfig, prepare: VisionPreparation, packing: bool, name: str = "train") -> Any:
    """Rows with images, which are prepared while batches are made: numbered, shuffled and packed as `args` sets. Raises
    a `DataError` where it is a dict of datasets, and as `pack_rows`.
    """
    if isinstance(dataset, Mapping):
        raise DataError(
            "Rows with images are used without preparation, and datasets are mixed only after preparation. Pass one "
            "dataset."
        )
    if isinstance(dataset, PackedRows):
        return dataset
    dataset = numbered(dataset)
    if args.shuffle_dataset and name == "train":
        dataset = shuffled(dataset, args.seed)
    if not packing or args.max_length is None:
        return dataset
    return pack_rows(dataset, prepare, args.max_length, name)


def pack_rows(dataset: Any, prepare: VisionPreparation, capacity: int, name: str = "train") -> PackedRows:
    """The rows of `dataset` in bins of at most `capacity` tokens, see `posttrain.sft.packing.pack`. Raises a
    `DataError` where the data is a stream, and as `row_lengths` and `pack`.
    """
    if is_stream(dataset):
        raise DataError(
            f"{name}: packing rows with images needs the length of each row before the run, and the data is a stream. "
            "Give rows by index, or set packing=False."
        )
    packing = pack(np.array(row_lengths(dataset, prepare)), capacity)
    packing.tell(name)
    return PackedRows(dataset, packing)


def images_leak(model: torch.nn.Module, collate: VisionCollator) -> float:
    """The change of a document's logits when the image of the document before it in a packed row is at another place,
    relative to the largest logit. 0 if the model keeps them apart; transformers masks the images of Gemma 3 and 4 in
    sliding layers by the places of the first document's (5.23).

    Costs two forward passes of about 24 tokens and two images, without dropout, under the active autocast.
    """
    noise = require("PIL.Image", "pillow", why="rows with images").effect_noise((64, 64), 80).convert("RGB")
    vision = collate.prepare.vision
    shown = vision.show(vision.processor.image_token, [noise])
    image = vision.tokenizer(shown.text, add_special_tokens=False)["input_ids"]
    word = [next(token for token in range(5, 500) if token not in {*image, *shown.ids})]

    def document(before: int, after: int) -> Draft:
        ids = np.array(word * before + image + word * after, dtype=np.int32)
        return Draft(-1, ids=ids, labels=ids.copy(), shown=shown)

    last, device = document(3, 3), next(model.parameters()).device

    def logits(first: Draft) -> torch.Tensor:
        batch = to_device({**collate.lay_out([[first, last]], packed=True)}, device)
        batch.pop("labels")
        return model(**batch, use_cache=False).logits[0, len(first.ids) : len(first.ids) + len(last.ids)].float()

    with torch.no_grad(), eval_mode(model):
        one, other = logits(document(0, 6)), logits(document(6, 0))
    return float((one - other).abs().max() / one.abs().max().clamp_min(1e-12))
