"""Prepares and collates rows with images, while batches are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from posttrain.core.data.collators import IGNORE_INDEX, round_up
from posttrain.core.data.images import ROW_NUMBER, ImageReader, fault_of, read_images
from posttrain.core.data.vision import CountedBatch, Shown, VisionProcessor, check_processor, join_tensors, place_images
from posttrain.core.errors import ConfigError, DataError
from posttrain.sft.report import FACTS
from posttrain.sft.rows import NO_TOKENS, Draft, Preparation, preparation_options

#: Columns of a row that the collator reads; `SFTTrainer` adds those of the datasets.
COLUMNS = (
    "images", "image", "videos", "video", "messages", "conversations", "prompt", "completion", "text", "tools",
    "chat_template_kwargs", ROW_NUMBER,
)  # fmt: skip
#: The columns of messages, in the order in which they are rendered.
TALKS = ("messages", "conversations", "prompt", "completion")


def check_config(args: Any, processor: Any) -> None:
    """Raise ConfigError for settings that do not support images, TypeError without an image processor."""
    check_processor(processor)
    problems = [
        f"{name}=True is not supported for rows with images; set {name}=False"
        for name in ("packing", "eval_packing", "padding_free", "predict_with_generate")
        if getattr(args, name, False)
    ]
    if args.too_long == "split":
        problems.append("too_long='split' is not supported for rows with images; set truncate, drop or error")
    if problems:
        raise ConfigError(type(args).__name__, problems)


@dataclass
class VisionDraft(Draft):
    """A row in preparation, with what stands for its images."""

    shown: Shown = field(default_factory=lambda: Shown(""))


class VisionPreparation(Preparation):
    """Turns rows with and without images into tokens, labels and image tensors; arguments as for `Preparation`.

    Args:
        vision: asks the processor. reader: reads images. drops_bad_images: a row with an image that cannot be read is
            dropped and counted, else an error.
    """

    def __init__(self, vision: VisionProcessor, reader: ImageReader, drops_bad_images: bool = False, **options: Any):
        self.vision, self.reader, self.drops_bad_images = vision, reader, drops_bad_images
        options["chat_template_kwargs"] = vision.template_kwargs(options.get("chat_template_kwargs"))
        super().__init__(vision.tokenizer, **options)
        self.end_tokens |= vision.end_tokens(self.chat_template_kwargs)

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
            shown = self.vision.show(draft.text, images)
        except DataError as error:
            draft.fault = str(error)
            return draft
        spans = shown.spans(draft.spans)
        return VisionDraft(draft.row, shown.text, spans, is_chat=draft.is_chat, shown=shown)

    def _label(self, draft: Draft, encoding: Any) -> None:
        super()._label(draft, encoding)
        if isinstance(draft, VisionDraft):
            draft.labels[np.isin(draft.ids, list(draft.shown.ids))] = IGNORE_INDEX

    def _fit(self, draft: Draft) -> list[Draft]:
        """The row, cut where no token of an image is lost; else it has a fault, or is an error."""
        most = self.max_length
        if isinstance(draft, VisionDraft) and most is not None and len(draft.ids) > most and draft.shown.tensors:
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
    placeholders. Parts of messages may hold images themselves, see `posttrain.core.data.vision.place_images`.

    Gives ``input_ids``, ``labels`` and ``attention_mask``, each (B, T), padded on the right, and the processor's image
    tensors, joined along their first dimension. Labels are -100 at padding, at tokens of images and where the
    preparation says so. Rows that cannot be trained on are left out, and counted in the batch's `row_facts`; if none
    is left, there is one of a single token without a label.

    Args:
        prepare: makes tokens, labels and image tensors of rows.
        pad_to_multiple_of: round T up to a multiple of this.
    """

    prepare: VisionPreparation
    pad_to_multiple_of: int | None = None

    def __call__(self, rows: list[dict[str, Any]]) -> CountedBatch:
        numbers = [int(row.get(ROW_NUMBER, place)) for place, row in enumerate(rows)]
        bare = [{name: value for name, value in row.items() if name != ROW_NUMBER} for row in rows]
        drafts = self.prepare(bare, numbers)
        kept = [draft for draft in drafts if not draft.fault]
        if not kept:
            end = np.array([self.prepare.eos_token_id or 0], dtype=np.int32)
            kept = [Draft(-1, ids=end, labels=np.full_like(end, IGNORE_INDEX))]
        width = round_up(max(len(draft.ids) for draft in kept), self.pad_to_multiple_of)
        ids = torch.full((len(kept), width), self.prepare.tokenizer.pad_token_id)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORE_INDEX)
        others = {name: torch.zeros_like(ids) for name in self.prepare.vision.token_inputs}
        for place, draft in enumerate(kept):
            length = len(draft.ids)
            ids[place, :length], mask[place, :length] = torch.from_numpy(draft.ids), 1
            labels[place, :length] = torch.from_numpy(draft.labels)
            if isinstance(draft, VisionDraft):
                for name, values in draft.shown.numbers(draft.ids.tolist()).items():
                    others[name][place, :length] = torch.tensor(values)
        tensors = [draft.shown.tensors if isinstance(draft, VisionDraft) else {} for draft in kept]
        images = join_tensors(tensors)
        batch = CountedBatch({"input_ids": ids, "attention_mask": mask, "labels": labels, **others, **images})
        batch.row_facts = _facts(drafts)
        batch.entries = {name: [len(row.get(name, ())) for row in tensors] for name in images}
        return batch


def vision_collator(
    processor: Any, model: torch.nn.Module, args: Any, formatting_func: Any, pad_to_multiple_of: int | None
) -> VisionCollator:
    """The collator of an `SFTTrainer` with these arguments, for rows with images."""
    prepare = VisionPreparation(
        VisionProcessor.of_run(processor, model, args),
        ImageReader.of(args),
        args.bad_images == "drop",
        **preparation_options(args),
        formatting_func=formatting_func,
    )
    return VisionCollator(prepare, pad_to_multiple_of)


def _facts(drafts: Sequence[Draft]) -> dict[str, Any]:
    """Columns `FACTS` of prepared rows and their lengths, for the data report."""
    facts = {name: np.array([getattr(draft, name) for draft in drafts]) for name in FACTS}
    return {"facts": facts, "lengths": np.array([len(draft.ids) for draft in drafts])}
