"""Counts the tokens that images become, by their sizes: no image is decoded."""

from __future__ import annotations

import copy
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from posttrain.core.errors import DataError, require
from posttrain.lm.images.images import ROW_NUMBER
from posttrain.lm.images.vision import Shown, VisionProcessor, replaced

logger = logging.getLogger(__name__)

ROWS_AT_ONCE = 256
#: Sizes of blank images that must agree with a processor's own counts before these are taken.
CHECKED = 8


class Brief(NamedTuple):
    """What stands for an image: `text`, with one of each run of equal tokens, and how many tokens that leaves out."""

    text: str
    hidden: int


class ImageTokens:
    """Puts what stands for an image into a text, given nothing but sizes; in place of a `VisionProcessor`.

    The number of an image's tokens depends on its size alone. The processor is shown a blank image of each size that is
    met, once. That takes as long as preparing an image, so where the processor also counts tokens by size, its counts
    are taken after `CHECKED` sizes, if they differed from the blanks' by the same number, which are the tokens that
    frame an image. A run of the same token, of which an image may have thousands, is written once and counted.

    Args:
        vision: asks the processor.
    """

    def __init__(self, vision: VisionProcessor) -> None:
        self.vision, self._known = vision, dict[tuple[int, int], Brief]()
        self._counts = getattr(vision.processor, "_get_num_multimodal_tokens", None)
        self._frames: list[int] = []
        words = sorted(map(str, vision.tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
        self._runs = re.compile(rf"({'|'.join(map(re.escape, words))})\1+")

    def show(self, text: str, sizes: Sequence[tuple[int, int]]) -> Shown:
        """`text` with the tokens of images of these `sizes` (width, height) in the places of their placeholders. Raises
        a `DataError` where it has more or fewer places for images, or the processor refuses one of that size.
        """
        self.vision.check_places(text, image=sizes)
        if sizes and self.vision.reports is None:
            self._of_size(sizes[0])
        if sizes and not self.vision.reports:  # what stands for an image may then depend on the text around it
            return self.vision.show(text, [_blank(size) for size in sizes])
        images = [self._of_size(size) for size in sizes]
        spans = [found.span() for found in re.finditer(re.escape(self.vision.processor.image_token), text)]
        text, places = replaced(text, zip(spans, (image.text for image in images), strict=True))
        return Shown(text, places, ids=self.vision.placeholders, hidden=sum(image.hidden for image in images))

    def _of_size(self, size: tuple[int, int]) -> Brief:
        if size not in self._known:
            is_checked = len(self._frames) >= CHECKED and len(set(self._frames)) == 1
            self._known[size] = self._counted(size) if is_checked else self._of_blank(size)
        return self._known[size]

    def _of_blank(self, size: tuple[int, int]) -> Brief:
        text = self.vision.show(self.vision.processor.image_token, [_blank(size)]).text
        hidden = sum(len(run[0]) // len(run[1]) - 1 for run in self._runs.finditer(text))
        brief = Brief(self._runs.sub(r"\1", text), hidden)
        if self._counts is not None and len(self._frames) < CHECKED:
            tokens = len(self.vision.tokenizer(brief.text, add_special_tokens=False)["input_ids"]) + brief.hidden
            self._frames.append(tokens - self._count(size))
        return brief

    def _counted(self, size: tuple[int, int]) -> Brief:
        try:
            return Brief(self.vision.processor.image_token, self._count(size) + self._frames[0] - 1)
        except (ValueError, ZeroDivisionError) as error:
            raise DataError(f"the processor refused the images ({type(error).__name__}: {error})") from error

    def _count(self, size: tuple[int, int]) -> int:
        assert self._counts is not None
        return int(self._counts(image_sizes=[size[::-1]])["num_image_tokens"][0])


def _blank(size: tuple[int, int]) -> Any:
    return require("PIL.Image", "pillow", why="rows with images").new("RGB", size)


def row_lengths(dataset: Any, prepare: Any, lengths: Callable[[Sequence[Any], Sequence[int]], list[int]]) -> list[int]:
    """Tokens of each row of `dataset`, at least 1. Texts are tokenized, and of images the first bytes are read. Raises
    a `DataError` where an image cannot be opened, and such rows are not to be dropped.

    Args:
        dataset: rows by index, numbered by `posttrain.lm.images.images.numbered`.
        prepare: ``(rows, numbers) -> drafts``, with the attributes ``vision``, ``reader`` and ``max_length``. It is
            asked without a maximum length, and with `ImageTokens` in place of its processor.
        lengths: ``(drafts, numbers) -> tokens of each row``.
    """
    brief, started = copy.copy(prepare), time.perf_counter()
    brief.vision, brief.reader, brief.max_length = ImageTokens(prepare.vision), prepare.reader.size, None
    found: list[int] = []
    for start in range(0, len(dataset), ROWS_AT_ONCE):
        rows = [dict(dataset[i]) for i in range(start, min(start + ROWS_AT_ONCE, len(dataset)))]
        numbers = [row.pop(ROW_NUMBER) for row in rows]
        found += [max(tokens, 1) for tokens in lengths(brief(rows, numbers), numbers)]
    seconds = time.perf_counter() - started
    logger.info("%d rows with images were measured in %.1f s: %d tokens at most.", len(found), seconds, max(found))
    return found
