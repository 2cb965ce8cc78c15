"""Preferences over completions of prompts with images: prepared while batches are made.

The images of a prompt are in a batch once, whatever the number of its completions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from posttrain.core.data.batches import Filler
from posttrain.core.data.pipeline import check_dataset
from posttrain.core.data.samplers import columns_of, has_places
from posttrain.core.errors import ConfigError, DataError
from posttrain.lm.attention.document_positions import invocation_tokens
from posttrain.lm.images import image_tokens
from posttrain.lm.images.image_positions import ImagePositions
from posttrain.lm.images.images import ROW_NUMBER, ImageReader, NumberedRows, fault_of, numbered, read_images
from posttrain.lm.images.vision import (
    CountedBatch,
    Shown,
    VisionProcessor,
    check_model,
    check_processor,
    place_images,
)
from posttrain.lm.preparation.pipeline import counts_of
from posttrain.lm.preparation.rows import ReadsImages, check_row
from posttrain.rl.preference.batches import read_length, read_lengths
from posttrain.rl.preference.rows import PAIR, PreferencePreparation, Tokens, preparation_options, to_unpaired
from posttrain.rl.samples.images import RolloutImages

#: The key under which `WithOthers` adds another row.
OTHER_ROW = "other_row"
#: Columns of rows with images, besides those of the dataset.
COLUMNS = ("prompt", "completion", "label", OTHER_ROW)


def check_images(args: Any, processor: Any, model: nn.Module) -> None:
    """Raise ConfigError for settings that do not support images, TypeError for a processor or a model that does not."""
    check_processor(processor)
    check_model(model)
    reasons = {
        "precompute_ref_log_probs": "which are read while batches are made",
        "num_eval_samples": "whose prompts are not answered",
    }
    if given := [name for name in reasons if vars(args).get(name)]:
        said = "{}={!r} is not supported for vision datasets (rows with images), {}; leave it out"
        raise ConfigError(type(args).__name__, [said.format(name, vars(args)[name], reasons[name]) for name in given])


class Unpaired(Dataset):
    """Two rows of each pair, see `posttrain.rl.preference.rows.to_unpaired`; made when they are read."""

    def __init__(self, pairs: Any) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return 2 * len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return to_unpaired([self.pairs[index // 2]])[index % 2]


class WithOthers(Dataset):
    """Rows with the one whose completion serves for the KL of KTO, by numbers alone: nothing is read for the choice.

    That row is about half of the dataset away, past rows of the same prompt that stand together, and past a copy of
    the row in a dataset that was repeated. Each is taken once.

    Args:
        rows: the rows. each: how many of them, one after the other, have one prompt.
    """

    def __init__(self, rows: Any, each: int = 1) -> None:
        self.rows, self.each = rows, each

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        groups = len(self.rows) // self.each
        shift = groups // 2 + 1 if groups > 2 else 1
        return self.rows[index] | {OTHER_ROW: self.rows[(index + shift * self.each) % len(self.rows)]}


def rows_with_images(dataset: Any, kind: str, name: str) -> Any:
    """The rows of `dataset`, numbered; pairs as unpaired rows where `kind` is of those, each with another. Raise
    DataError if there are none, or unpaired ones where pairs are wanted.
    """
    if isinstance(dataset, (WithOthers, NumberedRows)):
        return dataset  # they are prepared
    check_dataset(dataset, f"{name}_dataset")
    dataset = numbered(dataset)
    columns = dataset[0] if (sized := has_places(dataset)) else columns_of(dataset)
    are_pairs = set(PAIR) <= set(columns)
    if kind == "unpaired_preference":
        return WithOthers(Unpaired(dataset), each=2) if are_pairs else WithOthers(dataset) if sized else dataset
    if columns and not are_pairs:
        raise DataError(
            f"{name}: rows with images need the columns chosen and rejected; found {', '.join(columns)}. Unpaired "
            "rows with images are not paired; train on them with KTOTrainer."
        )
    return dataset


class EmptyBatch(CountedBatch, Filler):
    """A batch none of whose rows can be trained on."""


class ImagePreparation(ReadsImages, PreferencePreparation):
    """Turns rows with and without images into tokens; arguments as for `ReadsImages`."""

    def _read(self, row: Any, index: int) -> list[Tokens]:
        try:
            check_row(row)
            if "prompt_ids" in row:
                raise DataError("the row has images and tokens; give its messages or texts instead")
            row, given = place_images(self.with_prompt(row), ("prompt",))
            row, more = place_images(row, self.names)
            if more:
                raise DataError("a completion shows an image; only prompts may")
            (draft,) = super()._read(row, index)
            return [draft if draft.fault else self._show(draft, given)]
        except DataError as error:
            return [Tokens(index, fault=fault_of(error, index, self.drops_bad_images))]

    def _show(self, draft: Tokens, given: Sequence[Any]) -> Tokens:
        """The draft with the tokens of the images that the row has `given`, which are read here."""
        images = read_images(given, self.reader)
        start = min(draft.starts)
        if any(text[:start] != draft.texts[0][:start] for text in draft.texts):
            raise DataError("the chat template renders the prompt differently before each completion")
        shown = self.vision.show(draft.texts[0][:start], images)
        draft.texts = [shown.text + text[start:] for text in draft.texts]
        draft.starts = [place + len(shown.text) - start for place in draft.starts]
        draft.shown = shown
        return draft

    def _fit(self, draft: Tokens) -> None:
        before = draft.prompt
        super()._fit(draft)
        if draft.prompt_cut and not draft.fault and draft.shown is not None and draft.shown.tensors:
            if draft.shown.ids & set(before[: len(before) - len(draft.prompt)]):
                draft.fault = f"max_length={self.max_length} would cut off tokens of its images"


class AnswerPreparation(ImagePreparation):
    """Prepares rows for their completions alone: no image is read, and a placeholder stands for it."""

    def _show(self, draft: Tokens, given: Sequence[Any]) -> Tokens:
        return draft


@dataclass
class ImageCollator:
    """Rows -> a batch of `collate`, with the image tensors of each prompt once, and how rows show them.

    Rows that cannot be trained on are left out, and counted in the batch's `row_facts`; if none is left, the batch
    counts for nothing.

    Args:
        prepare: makes tokens. collate: lays out prepared rows, one for each completion. once: whether the tensors are
            those of the prompts, under ``image_copies``; else they are repeated for each row, as any model takes them.
        answers: makes the completions of the rows under `OTHER_ROW`. positions: numbers the positions of prompts, where
            `collate` shares them and the model has several axes of them.
    """

    prepare: ImagePreparation
    collate: Callable[[list[dict[str, Any]]], dict[str, Any]]
    once: bool = True
    answers: AnswerPreparation | None = None
    positions: ImagePositions | None = None

    def __call__(self, rows: list[dict[str, Any]]) -> CountedBatch:
        numbers = [int(row.get(ROW_NUMBER, place)) for place, row in enumerate(rows)]
        drafts = self.prepare(rows, numbers)
        kept = [(draft, row) for draft, row in zip(drafts, rows, strict=True) if not draft.fault]
        made = [self._columns(draft) | draft.kept for draft, _ in kept]
        self._add_others(made, [row for _, row in kept])
        vision = self.prepare.vision
        nothing = Shown("", kinds={name: {} for name in vision.token_inputs})
        shown = [draft.shown or nothing for draft, _ in kept]
        if not kept:  # the shortest row that there is, which keeps the step and counts for nothing
            end = [self.prepare.tokenizer.eos_token_id or 0]
            names = ("prompt", "kl", *self.prepare.names)
            made, shown = [{f"{name}_ids": end for name in names} | {"label": True, "margin": 0.0}], [nothing]
        if self.positions is not None:
            for row, own in zip(made, shown, strict=True):
                row["positions"] = self.positions(own.prompt(row["prompt_ids"]))
        batch = (CountedBatch if kept else EmptyBatch)(self.collate(made))
        images = RolloutImages.of(shown, [row["prompt_ids"] for row in made], vision.image_token_id)
        for part in (batch, batch["kl"]) if "kl" in batch else (batch,):  # KTO's: with others' completions
            self._add_images(part, images, len(made))
        batch.row_facts = counts_of(drafts, self.prepare)
        return batch

    def _add_others(self, made: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
        """Under ``kl_ids`` the completion of the row under `OTHER_ROW`, whatever else is in the batch."""
        if self.answers is None or not getattr(self.collate, "with_kl", False):
            return
        others = [row[OTHER_ROW] for row in rows if OTHER_ROW in row]
        drafts = self.answers(others, [int(row[ROW_NUMBER]) for row in others])
        for row, draft in zip(made, drafts, strict=False):  # of a stream there are none
            if draft.completions:
                row["kl_ids"] = draft.completions[0]

    def _columns(self, draft: Tokens) -> dict[str, Any]:
        ids = {f"{name}_ids": ids for name, ids in zip(self.prepare.names, draft.completions, strict=True)}
        return {"prompt_ids": draft.prompt, **ids} | ({} if draft.label is None else {"label": draft.label})

    def _add_images(self, batch: dict[str, Any], images: RolloutImages, number: int) -> None:
        sides = 1 if "segments" in batch else len(batch["input_ids"]) // number  # one row has each prompt once
        once = self.once and self.prepare.vision.image_token_id is not None
        found = images.inputs(batch, [*range(number)] * sides, once)
        batch |= found.pop("image_inputs") | found


def row_lengths(
    dataset: Any, collate: Any, columns: Sequence[str], completions: int, shared: bool, flat: bool = False
) -> list[int]:
    """`read_lengths` of a `dataset` of prepared rows; or of numbered ones where `collate` is an `ImageCollator`, which
    prepares them: with the tokens of images, and without the completion that KTO lends a row for its KL.
    """
    if not isinstance(collate, ImageCollator):
        return read_lengths(dataset, columns, completions, shared, flat)
    most = collate.prepare.max_length

    def length(draft: Tokens) -> int:
        prompt = len(draft.prompt) + (draft.shown.hidden if draft.shown else 0)
        return 0 if draft.fault else read_length(prompt, list(map(len, draft.completions)), shared, flat, most)

    return image_tokens.row_lengths(dataset, collate.prepare, lambda drafts, numbers: list(map(length, drafts)))


def image_collator(
    processor: Any,
    model: nn.Module,
    args: Any,
    kind: str,
    collate: Callable[..., dict[str, Any]],
    once: bool,
    shared: bool = False,
) -> ImageCollator:
    """The collator of a trainer of preferences for rows with images. `collate` is that of prepared rows, and `shared`
    whether it lays prompts out once. For `once` see `ImageCollator`.
    """
    given = VisionProcessor.of_run(processor, model, args), ImageReader.of(args), args.bad_images == "drop"
    options = {"kind": kind, "invocation": invocation_tokens(model)} | preparation_options(args)
    prepare, answers = ImagePreparation(*given, **options), AnswerPreparation(*given, **options)
    return ImageCollator(prepare, collate, once, answers, ImagePositions.of(model) if shared else None)
