"""Lengths of rows with images, found without decoding one, and packed rows with images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from posttrain.core.data.pipeline import to_device
from posttrain.core.data.samplers import is_stream
from posttrain.core.errors import DataError, require
from posttrain.lm.images import image_tokens
from posttrain.lm.images.images import numbered
from posttrain.sft.config import SFTConfig
from posttrain.sft.dataset import shuffled
from posttrain.sft.packing import Packing, pack
from posttrain.sft.rows import Draft
from posttrain.sft.vision import PACKED, VisionCollator, VisionDraft, VisionPreparation

PADDED = "Rows with images are padded. With packing=True it goes over each document alone."


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
    length = len(draft.ids) + (draft.shown.hidden if isinstance(draft, VisionDraft) else 0)
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
    """Rows with images, which are prepared while batches are made: numbered, shuffled and packed as `args` sets.

    Raises:
        DataError: it is a dict of datasets; as for `pack_rows`.
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
    """The rows of `dataset` in bins of at most `capacity` tokens, see `posttrain.sft.packing.pack`.

    Raises:
        DataError: the data is a stream; as for `row_lengths` and `pack`.
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

    def document(before: int, after: int) -> VisionDraft:
        ids = np.array(word * before + image + word * after, dtype=np.int32)
        return VisionDraft(-1, ids=ids, labels=ids.copy(), shown=shown)

    last, device = document(3, 3), next(model.parameters()).device

    def logits(first: VisionDraft) -> torch.Tensor:
        batch = to_device({**collate.lay_out([[first, last]], packed=True)}, device)
        batch.pop("labels")
        return model(**batch, use_cache=False).logits[0, len(first.ids) : len(first.ids) + len(last.ids)].float()

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            one, other = logits(document(0, 6)), logits(document(6, 0))
    finally:
        model.train(was_training)
    return float((one - other).abs().max() / one.abs().max().clamp_min(1e-12))
