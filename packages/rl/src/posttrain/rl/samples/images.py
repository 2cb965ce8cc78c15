"""Images of prompts in online training: from rows to the engine and to the micro-batches of a rollout.

Each prompt's images are read once, kept once in a rollout and its checkpoint, and encoded once in a forward.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from posttrain.core.errors import DataError
from posttrain.core.models.wrapping import base_model, sees
from posttrain.lm.images.image_features import ImageCopies
from posttrain.lm.images.image_positions import ImageExample, ImagePositions, SeenPrompt
from posttrain.lm.images.images import (
    IMAGE_COLUMNS,
    VIDEO_COLUMNS,
    ImageReader,
    has_images,
    images_of,
    read_images,
    videos_of,
)
from posttrain.lm.images.vision import CountedBatch, Shown, VisionProcessor, join_tensors, place_images
from posttrain.rl.generation.protocol import Pictured, Prompt
from posttrain.rl.samples.prompts import PromptCodec


def can_see(model: nn.Module | str, processor: Any) -> bool:
    """Whether the model and the processor that were passed read images."""
    return hasattr(processor, "image_processor") and (not isinstance(model, nn.Module) or sees(model))


def refuse_images(prompt: Any) -> None:
    """Raise DataError where `prompt` shows an image to a trainer that was set up for texts."""
    if has_images([{"prompt": prompt}]):
        raise DataError(
            "the prompt shows an image, and images are read where the dataset's first rows show one, or where "
            "processing_class is the model's processor. Pass AutoProcessor.from_pretrained(...)"
        )


class ImagePrompts:
    """Makes tokens of prompts with images; `positions` numbers theirs, where the model has several axes of them."""

    def __init__(self, processor: Any, model: nn.Module, reader: ImageReader, args: Any = None) -> None:
        self.reader, self.positions = reader, ImagePositions.of(model)
        self.vision = (
            VisionProcessor(processor, base_model(model))
            if args is None  # of a model that is not trained
            else VisionProcessor.of_run(processor, model, args)
        )

    @functools.cached_property
    def example(self) -> ImageExample | None:
        """What a model is tried with."""
        return self.vision.example()

    def encode(
        self, codec: PromptCodec, row: Mapping[str, Any], prompt: Any, tools: Any, keeps_images: bool = False
    ) -> tuple[list[int], Shown]:
        """(tokens, images) of a prompt; if `keeps_images`, for engines that read them again, see `Pictured`. Raises
        DataError where an image cannot be read, or has no place.
        """
        placed, values = _placed(row, prompt)
        images, found = read_images(values, self.reader), []

        def show(text: str) -> str:
            found.append(self.vision.show(text, images))
            return found[0].text

        ids, shown = codec.encode(placed, tools, show), found[0]
        if keeps_images:
            shown.pictured = Pictured(codec.encode(placed, tools), images, ids)
        return ids, shown

    def pictures(self, row: Mapping[str, Any], prompt: Any) -> list[Any]:
        """The images of a prompt as Pillow's, to show them; without videos."""
        return [one for one in read_images(_placed(row, prompt)[1], self.reader) if not isinstance(one, list)]

    def encode_completion(self, codec: PromptCodec, row: Mapping[str, Any], prompt: Any, completion: Any) -> list[int]:
        """The tokens of a completion that is given, as `PromptCodec.encode_completion`; its contents become parts."""
        placed, images = place_images({"completion": completion}, ("completion",))
        if images:
            raise DataError("a completion shows an image; only prompts may")
        return codec.encode_completion(_placed(row, prompt)[0], placed["completion"])


def _placed(row: Mapping[str, Any], prompt: Any) -> tuple[Any, list[Any]]:
    """(`prompt` with contents in parts, its images)."""
    given = {name: row[name] for name in (*IMAGE_COLUMNS, *VIDEO_COLUMNS) if name in row}
    placed, values = place_images({**given, "prompt": prompt}, ("prompt",))
    return placed["prompt"], values


def same_images(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two rows hold the same images and videos in their columns."""
    return row is other or all(of(row) == of(other) for of in (images_of, videos_of))


def pictured(ids: list[int], shown: Shown | None) -> Prompt:
    """The prompt `ids`, which may go on behind what was `shown`, for an engine that reads images itself."""
    if shown is None or shown.pictured is None or not shown.pictured.images:
        return ids
    prompt: Pictured = shown.pictured
    return Pictured([*prompt.ids, *ids[len(prompt.whole) :]], prompt.images, ids)


@dataclass(frozen=True)
class RolloutImages:
    """The images of the prompts of N completions.

    Attributes:
        prompts: of each completion, the number of its prompt.
        tokens: of each prompt, how many tokens stand for features of its images.
        tensors: the processor's, of all prompts, joined along their first dimension.
        entries: of each tensor, how many of its entries each prompt has.
        kinds: of each input with a number for each token, the token ids whose number is not 0.
    """

    prompts: list[int]
    tokens: list[int]
    tensors: dict[str, torch.Tensor]
    entries: dict[str, list[int]]
    kinds: dict[str, list[list[int]]]

    @classmethod
    def of(cls, shown: Sequence[Shown], ids: Sequence[Sequence[int]], token: int | None) -> RolloutImages:
        """Those of prompts with these tokens; `token` stands for a feature."""
        distinct: dict[int, int] = {}
        prompts = [distinct.setdefault(id(one), len(distinct)) for one in shown]
        first = [prompts.index(place) for place in range(len(distinct))]
        own = [shown[place] for place in first]
        tensors = join_tensors([one.tensors for one in own])
        kinds: dict[str, dict[int, int]] = {}
        for one in own:
            for name, numbers in one.kinds.items():
                kinds.setdefault(name, {}).update(numbers)
        return cls(
            prompts,
            [list(ids[place]).count(-1 if token is None else token) for place in first],
            tensors,
            {name: [len(one.tensors.get(name, ())) for one in own] for name in tensors},
            {name: sorted([token, number] for token, number in numbers.items()) for name, numbers in kinds.items()},
        )

    def inputs(self, batch: Mapping[str, Any], rows: Sequence[int], once: bool = True) -> dict[str, Any]:
        """What a model reads besides the ``input_ids``, (B, T), of a `batch` and their mask: the completions `rows`.

        Returns:
            ``image_inputs``, and if `once`, ``image_copies`` for `posttrain.lm.images.image_features.features_once`;
            else the images of a prompt stand there for each of its completions. Of one row with ``segments``, in which
            adjacent completions of a prompt stand behind one copy of it, ``image_inputs`` alone.
        """
        numbers = self._numbers(batch["input_ids"])
        if "segments" in batch:
            return {"image_inputs": CountedBatch(numbers | self._tensors(self.runs(rows)))}
        each = [self.prompts[row] for row in rows]
        used = list(dict.fromkeys(each)) if once else each
        tensors = self._tensors(used)
        inputs = {name: own * batch["attention_mask"] for name, own in numbers.items()} | tensors
        if not once:
            return {"image_inputs": CountedBatch(inputs)}
        entries = {name: tuple(self.entries[name][prompt] for prompt in used) for name in tensors}
        order = tuple(map(used.index, each))
        copies = ImageCopies(tuple(self.tokens[prompt] for prompt in used), order, entries)
        return {"image_inputs": CountedBatch(inputs), "image_copies": copies}

    def shared_layout(
        self, rows: Sequence[int], prompts: Sequence[torch.Tensor], positions: ImagePositions | None
    ) -> dict[str, Any]:
        """What `posttrain.rl.policy.logprobs.lay_out` must know to lay these rows behind one copy of their prompts."""
        keys = [self.prompts[row] for row in rows]
        shown = {key: prompt.tolist() for key, prompt in zip(keys, prompts, strict=True)}
        seen = [self.prompt(key, shown[key]) for key in self.runs(rows)]
        return {"keys": keys, "positions": None if positions is None else list(map(positions, seen))}

    def runs(self, rows: Sequence[int]) -> list[int]:
        """The prompts of the completions `rows`, in order; of adjacent ones of the same prompt once."""
        return [prompt for prompt, _ in groupby(self.prompts[row] for row in rows)]

    def prompt(self, number: int, ids: Sequence[int]) -> SeenPrompt:
        """The prompt of that number, with tokens `ids`."""
        numbers = {name: values.tolist() for name, values in self._numbers(torch.tensor(ids)).items()}
        return SeenPrompt(ids, numbers, self._tensors([number]))

    def _numbers(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {}
        for name, pairs in self.kinds.items():
            found[name] = torch.zeros_like(ids)
            for token, number in pairs:
                found[name][ids == token] = number
        return found

    def _tensors(self, prompts: Sequence[int]) -> dict[str, torch.Tensor]:
        """The image tensors of these prompts, one after the other; without those that they have no entries of."""
        found = {}
        for name, tensor in self.tensors.items():
            parts = tensor.split(self.entries[name])
            if any(len(parts[prompt]) for prompt in prompts):
                found[name] = torch.cat([parts[prompt] for prompt in prompts])
        return found
