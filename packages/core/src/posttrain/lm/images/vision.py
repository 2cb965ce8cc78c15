"""Rows with images: their text with the tokens of the images, and the tensors that the model sees.

What a family of models needs is decided by its processor's outputs alone. The processor says which text stands where an
image stood, so that what is trained on is known in the text without images. A tensor of a row is joined with those of
other rows along its first dimension, which counts images, patches or rows, and filled up with zeros in the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from posttrain.core.errors import DataError, require
from posttrain.core.models.wrapping import base_model, sees_images, setting
from posttrain.lm.images.blank_images import always_see
from posttrain.lm.images.image_positions import ImageExample, SeenPrompt
from posttrain.lm.images.images import IMAGE_COLUMNS, IMAGE_PARTS, VIDEO_COLUMNS, Video, images_of, videos_of
from posttrain.lm.loading.loading import CANNOT_SEE
from posttrain.lm.text.chat_template import PLACEHOLDER, Template
from posttrain.lm.text.layouts import template_of
from posttrain.lm.text.tokenization import Span

#: Attributes of processors and configs that hold the ids of image placeholders and their edges.
PLACEHOLDERS = tuple(
    (
        "image_token_id image_token_index video_token_id video_token_index vision_start_token_id vision_end_token_id "
        "boi_token_id eoi_token_id boi_token_index eoi_token_index"
    ).split()
)
#: Words around the image with which a model is tried.
WORDS = "The quick brown fox jumps over the lazy dog"
#: What a processor makes of a text that is not a number for each token.
NOT_OF_TOKENS = ("input_ids", "attention_mask", "text_replacement_offsets")
#: Tensors of images whatever the text is.
OF_IMAGES = ("pixel_values", "pixel_attention_mask", "image_sizes", "image_grid_thw", "spatial_shapes")


def check_processor(processor: Any) -> None:
    """Raise TypeError where `processor` cannot read images."""
    if not hasattr(processor, "image_processor"):
        raise TypeError(
            f"The rows have images, which a {type(processor).__name__} cannot read. Pass the model's processor as "
            "processing_class=, for example AutoProcessor.from_pretrained(...); a model of text alone has none, and "
            "is trained on rows without images."
        )


def check_model(model: torch.nn.Module) -> None:
    """Raise TypeError where `model` cannot see images."""
    config = setting(model, "config")
    if config is None or sees_images(config) or hasattr(model, "get_image_features"):
        return
    raise TypeError(CANNOT_SEE.format(type(model).__name__))


def image_token_id(model: Any) -> int | None:
    """The id in whose places `model` puts the features of images."""
    return setting(setting(model, "config"), "image_token_id", "image_token_index")


def place_images(row: Mapping[str, Any], fields: Iterable[str]) -> tuple[dict[str, Any], list[Any]]:
    """(`row` with contents in parts and images in no column; its images and videos, in the order in which they show).
    Raises a `DataError` where there are more images than places for them, or fewer.

    Args:
        row: with ``images`` or ``image``, and ``videos`` or ``video``, or with images in the parts of its messages:
            ``{"type": "image", "image": ...}`` (also under "url", "path" or "base64") or ``{"type": "image_url",
            "image_url": {"url": ...}}``. A part without one takes the next of the row's column. If no message has such
            a part, the images come before the text of the user's first message. Parts of the type "video" are the same
            for videos, see `Video.of`.
        fields: the columns of messages, in the order in which they are rendered.
    """
    given, videos = images_of(row), videos_of(row)
    row = {name: value for name, value in row.items() if name not in (*IMAGE_COLUMNS, *VIDEO_COLUMNS)}
    given_talks = {name: row[name] for name in fields if isinstance(row.get(name), (list, tuple))}
    talks: dict[str, list[Any]] = {name: list(map(_in_parts, talk)) for name, talk in given_talks.items()}
    if not talks:
        return row, [*given, *videos]
    waiting = {"image": given, "video": videos}
    messages = [message for talk in talks.values() for message in talk]
    kinds = {part["type"] for message in messages for part in _parts(message)}
    for kind, values in waiting.items():
        if values and kind not in kinds:
            _show_first(messages, len(values), kind)
    images: list[Any] = []
    taken = dict.fromkeys(waiting, 0)
    for message in messages:
        for place, part in enumerate(_parts(message)):
            if (kind := part["type"]) in waiting:
                values, number, own = waiting[kind], taken[kind], kind in part
                images.append(part[kind] if own else values[number] if number < len(values) else None)
                taken[kind] += not own
                message["content"][place] = {"type": kind}
    for kind, values in waiting.items():
        if taken[kind] != len(values):
            raise DataError(f"the row has {len(values)} {kind}s, and its messages have places for {taken[kind]}")
    return row | talks, images


def _in_parts(message: Any) -> Any:
    """A copy of `message` whose content is a list of parts, with an image of its own under "image"."""
    if not isinstance(message, Mapping) or "role" not in message:
        return message  # whoever reads messages says what is wrong
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    if not isinstance(content, (list, tuple)):
        return dict(message)
    return {**message, "content": [_part(part) for part in content]}


def _part(part: Any) -> Any:
    if not isinstance(part, Mapping):
        return {"type": "text", "text": part} if isinstance(part, str) else part
    part = {name: value for name, value in part.items() if value is not None}  # Arrow adds keys
    if part.get("type") == "video":
        value = next((part[name] for name in ("video", "frames", "url", "path") if name in part), None)
        return {"type": "video"} if value is None else {"type": "video", "video": Video.of(value, part.get("fps"))}
    if part.get("type") not in IMAGE_PARTS:
        return part
    for name in ("image", "url", "path", "image_url"):
        if name in part:
            value = part[name]
            return {"type": "image", "image": value["url"] if isinstance(value, Mapping) and "url" in value else value}
    return {"type": "image"} | ({"image": f"data:;base64,{part['base64']}"} if "base64" in part else {})


def _parts(message: Any) -> list[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list) or not all(isinstance(part, Mapping) and "type" in part for part in content):
        return []
    return content


def _show_first(messages: list[Any], number: int, kind: str) -> None:
    for message in messages:
        if isinstance(message, dict) and message.get("role") == "user" and isinstance(message.get("content"), list):
            message["content"] = [*({"type": kind} for _ in range(number)), *message["content"]]
            return
    raise DataError(f"the row has {number} {kind}s and no user message to put them in")


@dataclass
class Shown:
    """A text with the tokens of its images.

    text: what is tokenized. places: of each image, where its placeholder stood and what stands there now, in
    characters. tensors: the processor's, for this row's images. ids: tokens that stand for images, never trained on.
    kinds: of each input with a number for each token, the token ids whose number is not 0. pictured: the same for an
    engine that reads images itself, where one does. hidden: tokens of images that the text leaves out, where it serves
    to count them alone.
    """

    text: str
    places: list[tuple[Span, Span]] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    ids: frozenset[int] = frozenset()
    kinds: dict[str, dict[int, int]] = field(default_factory=dict)
    pictured: Any = None
    hidden: int = 0

    def position(self, place: int) -> int:
        """Where the character at `place` of the text without image tokens is now."""
        shift = 0
        for (start, stop), (_, end) in self.places:
            if start < place < stop:
                return end
            if place >= stop:
                shift = end - stop
        return place + shift

    def spans(self, spans: Sequence[Span] | None) -> list[Span] | None:
        """Spans of the text without image tokens, in this one."""
        return None if spans is None else [(self.position(start), self.position(stop)) for start, stop in spans]

    def numbers(self, ids: Sequence[int]) -> dict[str, list[int]]:
        """The inputs besides the tokens that have a number for each, such as ``token_type_ids``."""
        return {name: [kinds.get(token, 0) for token in ids] for name, kinds in self.kinds.items()}

    def prompt(self, ids: Sequence[int]) -> SeenPrompt:
        """The tokens `ids` of a prompt with these images."""
        return SeenPrompt(ids, self.numbers(ids), self.tensors)


class VisionProcessor:
    """What is asked of a processor of transformers, one row at a time.

    Args:
        processor: with a tokenizer and an image processor.
        model: whose config names further placeholders, or anything else that has the config; None without one.
    """

    def __init__(self, processor: Any, model: Any = None) -> None:
        check_processor(processor)
        self.processor, self.tokenizer = processor, processor.tokenizer
        named = {setting(holder, name) for holder in (processor, setting(model, "config")) for name in PLACEHOLDERS}
        self.placeholders = frozenset(number for number in named if isinstance(number, int))
        self.image_token_id = image_token_id(model)
        found = processor(text=["a"], add_special_tokens=False)
        #: Whether the processor reports which text it puts in the place of an image; None before one is shown.
        self.reports: bool | None = None
        #: Inputs besides the tokens with a number for each of them, such as ``token_type_ids``.
        self.token_inputs = tuple(name for name in found if name not in NOT_OF_TOKENS)

    @classmethod
    def of_run(cls, processor: Any, model: torch.nn.Module, args: Any) -> VisionProcessor:
        """What `processor` is asked by a trainer of `model` with these arguments.

        With several processes, or where the vision part alone is trained, `model` is shown a blank image whenever it
        is called without any; see `posttrain.lm.images.blank_images`.
        """
        found = cls(processor, base_model(model))
        if args.world_size > 1 or args.train_parts == "vision":
            always_see(model, found.blank())
        return found

    def template_kwargs(self, kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Variables for the chat template, with the processor's own template, which shows images."""
        template = template_of(self.processor)
        return ({"chat_template": template} if isinstance(template, str) else {}) | dict(kwargs or {})

    def end_tokens(self, kwargs: Mapping[str, Any] | None = None) -> set[int]:
        """The special tokens that end an assistant's turn in the chat template; none without a template."""
        if not self.template_kwargs(kwargs).get("chat_template"):
            return set()
        says = [{"role": role, "content": [{"type": "text", "text": PLACEHOLDER}]} for role in ("user", "assistant")]
        ending = Template(self.tokenizer, None, self.template_kwargs(kwargs)).render(says).rpartition(PLACEHOLDER)[2]
        ids = self.tokenizer(ending.strip(), add_special_tokens=False)["input_ids"]
        return {token for token in ids if token in self.tokenizer.added_tokens_decoder}

    def show(self, text: str, images: Sequence[Any]) -> Shown:
        """`text` with the tokens of its `images` (PIL, or a `Video` of them) in the places of their placeholders.
        Raises a `DataError` where it has more or fewer places for images, or the processor refused them.
        """
        videos = [one for one in images if isinstance(one, Video)]
        pictures = [one for one in images if not isinstance(one, Video)]
        self.check_places(text, image=pictures, video=videos)
        if videos and getattr(self.processor, "video_processor", None) is None:
            name = type(self.processor).__name__
            raise DataError(f"the row has a video, and this {name} reads none; give its frames as images")
        if not images:
            return Shown(text, ids=self.placeholders, kinds={name: {} for name in self.token_inputs})
        try:
            found = self.processor(
                text=[text],
                add_special_tokens=False,
                return_tensors="pt",
                return_text_replacement_offsets=True,
                **({"images": [pictures]} if pictures else {}),
                **(_as_frames(videos) if videos else {}),
            )
        except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
            raise DataError(f"the processor refused the images ({type(error).__name__}: {error})") from error
        ids = found["input_ids"][0]
        self.reports = "text_replacement_offsets" in found
        if self.reports:
            [offsets] = found["text_replacement_offsets"]
        else:
            offsets = self._replacements(text, found)
        kinds = {}
        for name in self.token_inputs:
            numbers = found[name][0]
            marked = numbers.nonzero().squeeze(1)
            kinds[name] = dict(zip(ids[marked].tolist(), numbers[marked].tolist(), strict=True))
        inputs = {*NOT_OF_TOKENS, *kinds}
        tensors = {name: value for name, value in found.items() if name not in inputs and torch.is_tensor(value)}
        text, places = replaced(text, [(place["span"], place["replacement"]) for place in offsets])
        return Shown(text, places, tensors, self._ids_in(offsets), kinds)

    def _replacements(self, text: str, found: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What a processor that does not report it has put in the place of each image: it lies between the pieces of
        `text`, and its tokens are those of the whole.
        """
        token, ids = self.processor.image_token, found["input_ids"][0].tolist()
        whole, pieces = self.tokenizer.decode(ids), text.split(token)
        offsets: list[dict[str, Any]] = []
        place = at = len(pieces[0])
        for number, piece in enumerate(pieces[1:], start=2):
            stop = whole.find(piece, at) if number < len(pieces) else len(whole) - len(piece)
            offsets.append({"span": (place, place + len(token)), "replacement": whole[at:stop]})
            place, at = place + len(token) + len(piece), stop + len(piece)
        is_whole = replaced(text, [(one["span"], one["replacement"]) for one in offsets])[0] == whole
        is_whole = is_whole and self.tokenizer(whole, add_special_tokens=False)["input_ids"] == ids
        if not is_whole or not {*found} <= {*NOT_OF_TOKENS, *self.token_inputs, *OF_IMAGES}:
            raise ValueError(
                f"{type(self.processor).__name__} does not report which text it puts in the place of an image "
                "(return_text_replacement_offsets), and it cannot be found in the tokens, so labels cannot be set for "
                "rows with images. Train a model whose processor reports it, such as Idefics3, or leave the images out."
            )
        return offsets

    def check_places(self, text: str, **shown: Sequence[Any]) -> None:
        """Raise DataError where `text` has not as many places as there are of what is `shown`, image= and video=."""
        for kind, values in shown.items():
            placeholder = getattr(self.processor, f"{kind}_token", None)
            if placeholder is not None and (count := text.count(placeholder)) != len(values):
                asked = f"the text has {count} places for {kind}s ({placeholder})"
                raise DataError(f"{asked}, and the row {len(values)} {kind}s")

    def blank(self) -> dict[str, torch.Tensor]:
        """The tensors of one small grey image."""
        return self._show_blank().tensors

    def example(self) -> ImageExample | None:
        """What a model can be tried with: a blank image between words; None if no word stands for an image."""
        if getattr(self.processor, "image_token", None) is None:
            return None
        shown = self._show_blank(WORDS, WORDS)
        ids, words = (self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (shown.text, WORDS))
        return ImageExample(shown.prompt(ids), words)

    def _show_blank(self, before: str = "", after: str = "") -> Shown:
        image = require("PIL.Image", "pillow", why="rows with images").new("RGB", (32, 32), (128, 128, 128))
        return self.show(before + self.processor.image_token + after, [image])

    def _ids_in(self, offsets: Sequence[Mapping[str, Any]]) -> frozenset[int]:
        """The special tokens among those that stand for images."""
        special = self.tokenizer.added_tokens_decoder
        found = self.tokenizer(list({place["replacement"] for place in offsets}), add_special_tokens=False)["input_ids"]
        return self.placeholders | {token for ids in found for token in ids if token in special}


def replaced(text: str, parts: Iterable[tuple[Span, str]]) -> tuple[str, list[tuple[Span, Span]]]:
    """(`text` with other `parts` in place of some spans of it, those spans and where the parts are now)."""
    pieces, places, end, length = [], [], 0, 0
    for (start, stop), part in parts:
        pieces += [text[end:start], part]
        first = length + start - end
        end, length = stop, first + len(part)
        places.append(((start, stop), (first, length)))
    return "".join([*pieces, text[end:]]), places


def _as_frames(videos: Sequence[Video]) -> dict[str, Any]:
    """The arguments of a processor for videos: all of the frames are shown."""
    facts = [
        {"total_num_frames": len(one.frames), "fps": one.fps, "frames_indices": list(range(len(one.frames)))}
        for one in videos
    ]
    options = {"do_sample_frames": False, "video_metadata": facts}
    return {"videos": [list(one.frames) for one in videos], "videos_kwargs": options}


class CountedBatch(dict):
    """A batch that also says what became of its rows, for a data report: arguments of the report's method.

    Attributes:
        entries: of each image tensor, how many of its entries each row has; None where rows do not lie one below the
            other, and the batch cannot be cut.
    """

    row_facts: dict[str, Any] | None = None
    entries: Mapping[str, Sequence[int]] | None = None

    def halves(self) -> tuple[CountedBatch, CountedBatch]:
        """The first and second half of the rows, each with its images; what became of them goes with the first. Raises
        a `ValueError` where it has one row, or cannot be cut.
        """
        if self.entries is None:
            raise ValueError("a batch of several completions of prompts with images cannot be cut by rows")
        if (rows := len(self["input_ids"])) < 2:
            raise ValueError("the batch has one row, and cannot be cut any more")
        middle = (rows + 1) // 2
        first, second = (self._part(slice(0, middle)), self._part(slice(middle, rows)))
        first.row_facts = self.take_facts()
        return first, second

    def _part(self, rows: slice) -> CountedBatch:
        assert self.entries is not None
        own = {name: value for name, value in self.items() if name not in self.entries}
        # Positions of three dimensions are (4, B, T), all else (B, T).
        part = CountedBatch({name: value[:, rows] if value.ndim == 3 else value[rows] for name, value in own.items()})
        part.entries = {name: counts[rows] for name, counts in self.entries.items()}
        for name, counts in self.entries.items():
            start = sum(counts[: rows.start])
            if number := sum(counts[rows]):
                part[name] = self[name][start : start + number]
        return part

    def take_facts(self) -> dict[str, Any] | None:
        """What became of the rows, the first time it is asked for."""
        facts, self.row_facts = self.row_facts, None
        return facts


def join_tensors(rows: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The image tensors of a batch, from those of its rows; rows without images have none.

    Each is joined along its first dimension. In the others, images of several sizes are filled up with zeros, and
    their own inputs (sizes, masks, positions) say what is real.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: join([row[name] for row in rows if name in row]) for name in names}


def join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors with as many dimensions, along the first, filled up with zeros in the others."""
    if len({tensor.shape[1:] for tensor in tensors}) == 1:
        return torch.cat(list(tensors))
    sizes = [max(size) for size in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    whole = tensors[0].new_zeros(sum(len(tensor) for tensor in tensors), *sizes)
    start = 0
    for tensor in tensors:
        whole[(slice(start, start + len(tensor)), *(slice(size) for size in tensor.shape[1:]))] = tensor
        start += len(tensor)
    return whole
