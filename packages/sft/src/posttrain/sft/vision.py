"""Collates rows with images for vision-language models."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from posttrain.core.data.collators import IGNORE_INDEX, round_up
from posttrain.core.errors import ConfigError, DataError

COLUMNS = ("images", "image", "messages", "prompt", "completion", "text")
#: Attributes of processors and configs that hold the ids of image placeholders and their edges.
PLACEHOLDERS = (
    "image_token_id", "image_token_index", "video_token_id", "video_token_index", "vision_start_token_id",
    "vision_end_token_id", "boi_token_id", "eoi_token_id", "boi_token_index", "eoi_token_index",
)  # fmt: skip


def has_pictures(dataset: Any) -> bool:
    """Whether the rows of `dataset`, or of the first of a dict of them, have a column ``images`` or ``image``."""
    if isinstance(dataset, dict):
        dataset = next(iter(dataset.values()), None)
    columns = getattr(dataset, "column_names", None)
    if isinstance(dataset, (dict, str)):  # a warning about the dataset itself
        return False
    if columns is None and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and len(dataset):
        columns = dataset[0].keys() if isinstance(dataset[0], dict) else ()
    return bool({"images", "image"} & set(columns or ()))


def check_config(args: Any, processor: Any) -> None:
    """Raise ConfigError for settings that do not support images, TypeError without an image processor."""
    if not hasattr(processor, "image_processor"):
        raise TypeError(
            f"The rows have images, which a {type(processor).__name__} cannot read. Pass the model's processor as "
            "processing_class=, for example AutoProcessor.from_pretrained(...)."
        )
    problems = [
        f"{name}=True is not supported for rows with images; set {name}=False"
        for name in ("packing", "eval_packing", "padding_free", "predict_with_generate")
        if getattr(args, name, False)
    ]
    if args.assistant_only_loss:
        problems.append(
            "assistant_only_loss=True is not supported for rows with images; use prompt and completion instead"
        )
    if problems:
        raise ConfigError(type(args).__name__, problems)


def placeholder_ids(processor: Any, model: nn.Module) -> list[int]:
    """The ids of image placeholder tokens, which are never trained on."""
    config = getattr(model, "config", None)
    found = {getattr(holder, name, None) for holder, name in itertools.product((processor, config), PLACEHOLDERS)}
    return sorted(number for number in found if number is not None)


@dataclass
class VisionCollator:
    """Rows with images -> a batch.

    A row has ``images`` (or one ``image``): PIL images, paths, or decoded images of a Hub dataset; and ``messages``, or
    a ``prompt`` and a ``completion`` (texts or messages), or a ``text`` with the processor's placeholders. Messages
    whose content is a plain string get their images before the user's first message.

    Gives ``input_ids``, ``labels`` and ``attention_mask``, each (B, T), padded on the right, and the processor's image
    tensors. Labels are -100 at padding, at image placeholders, and, with completions, at the prompt.

    Args:
        processor: of transformers, with a tokenizer and an image processor.
        placeholders: ids that are never trained on.
        max_length: rows of more tokens are cut at the end; None: never.
        completion_only_loss: whether prompts are trained on too (False) or not (True, None).
        pad_to_multiple_of: round T up to a multiple of this.
    """

    processor: Any
    placeholders: Iterable[int]
    max_length: int | None = None
    completion_only_loss: bool | None = None
    pad_to_multiple_of: int | None = None

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        images = [_pictures(row) for row in rows]
        texts = [self._texts(row, len(pictures)) for row, pictures in zip(rows, images, strict=True)]
        rendered = not isinstance(
            rows[0].get("text", rows[0].get("prompt")), str
        )  # a template writes special tokens itself
        batch = self.processor(
            images=images if any(images) else None,
            text=[asked for asked, _ in texts],
            padding=True,
            padding_side="right",
            add_special_tokens=not rendered,
            return_tensors="pt",
        )
        tokenizer = self.processor.tokenizer
        answers = tokenizer([answer for _, answer in texts], add_special_tokens=False)["input_ids"]
        lengths = batch["attention_mask"].sum(1).tolist()
        whole = [length + len(answer) for length, answer in zip(lengths, answers, strict=True)]
        width = round_up(min(max(whole), self.max_length or max(whole)), self.pad_to_multiple_of)
        ids = torch.full((len(rows), width), tokenizer.pad_token_id)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORE_INDEX)
        stands = torch.tensor(list(self.placeholders))
        for i, (length, answer) in enumerate(zip(lengths, answers, strict=True)):
            row = torch.cat([batch["input_ids"][i, :length], torch.tensor(answer, dtype=torch.long)])
            if self.max_length is not None and torch.isin(row[self.max_length :], stands).any():
                raise DataError(
                    f"A row has {len(row)} tokens, and max_length={self.max_length} would cut off tokens of its "
                    "images. Set a larger max_length, max_length=None, or let the processor make smaller images."
                )
            row = row[: self.max_length]
            ids[i, : len(row)], mask[i, : len(row)] = row, 1
            labels[i, : len(row)] = row.masked_fill(torch.isin(row, stands), IGNORE_INDEX)
            if answer and self.completion_only_loss is not False:
                labels[i, :length] = IGNORE_INDEX
        for name, value in batch.items():  # token types, if the model needs them
            if (
                name not in ("input_ids", "attention_mask")
                and value.shape[:2] == batch["input_ids"].shape[:2]
                and value.ndim == 2
            ):
                batch[name] = torch.nn.functional.pad(value, (0, max(0, width - value.shape[1])))[:, :width]
        return {**batch, "input_ids": ids, "attention_mask": mask, "labels": labels}

    def _texts(self, row: dict[str, Any], pictures: int) -> tuple[str, str]:
        """The text with the images, and the completion, which is empty if there is one text."""
        end = self.processor.tokenizer.eos_token or ""
        if "text" in row:
            return row["text"] + ("" if row["text"].endswith(end) else end), ""
        if "messages" in row:
            return self._render(_with_pictures(row["messages"], pictures)), ""
        if "prompt" not in row or "completion" not in row:
            raise DataError(f"A row with images has {sorted(row)}; it needs messages, prompt and completion, or text.")
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str):
            return prompt, completion + ("" if completion.endswith(end) else end)
        prompt = _with_pictures(prompt, pictures)
        asked = self._render(prompt, add_generation_prompt=True)
        everything = self._render([*prompt, *_with_pictures(completion, 0)])
        if not everything.startswith(asked):
            raise DataError(
                "The chat template renders the prompt differently when the completion follows; use messages instead."
            )
        return asked, everything[len(asked) :]

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return self.processor.apply_chat_template(messages, tokenize=False, **options)


def _pictures(row: dict[str, Any]) -> list[Any]:
    given = row.get("images") if row.get("images") is not None else row.get("image")
    given = [] if given is None else given if isinstance(given, (list, tuple)) else [given]
    return [_opened(picture) for picture in given]


def _opened(picture: Any) -> Any:
    if isinstance(picture, dict):  # as datasets stores them
        picture = io.BytesIO(picture["bytes"]) if picture.get("bytes") else picture["path"]
    if isinstance(picture, (str, io.BytesIO)):
        from PIL import Image

        picture = Image.open(picture)
    return picture.convert("RGB") if hasattr(picture, "convert") else picture


def _with_pictures(messages: list[dict[str, Any]], pictures: int) -> list[dict[str, Any]]:
    """`messages` with contents as lists of parts, with image placeholders added if there are none."""
    parts = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message["content"], str)
        else message
        for message in messages
    ]
    if pictures and not any(part.get("type") == "image" for message in parts for part in message["content"]):
        first = next((i for i, message in enumerate(parts) if message["role"] == "user"), None)
        if first is None:
            raise DataError(f"A row has {pictures} images and no user message to put them in.")
        shown = [{"type": "image"}] * pictures
        parts[first] = {**parts[first], "content": [*shown, *parts[first]["content"]]}
    return parts
