"""Reads images from whatever a row holds: PIL images, arrays, bytes, paths, URLs and what `datasets` stores.

Images are read one row at a time, in the processes that make batches, and never before a run.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import urllib.parse
import urllib.request
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from posttrain.core.config import opt
from posttrain.core.data import samplers
from posttrain.core.data.samplers import has_places, transforms_rows
from posttrain.core.errors import DataError, require

#: Columns of a row that hold its images.
IMAGE_COLUMNS = ("images", "image")
#: Columns of a row that hold its videos.
VIDEO_COLUMNS = ("videos", "video")
#: The key under which `NumberedRows` adds the number of a row.
ROW_NUMBER = "row_number"
#: Rows of a list that are searched for images.
ROWS_LOOKED_AT = 1000
#: The number of the orientation in EXIF data, and its values that exchange width and height.
ORIENTATION, LYING = 0x0112, (5, 6, 7, 8)
#: Bytes of a remote image, at most, and how long to wait for it.
REMOTE_BYTES, REMOTE_SECONDS = 64 * 2**20, 30


@dataclass
class ImageArguments:
    """How images of rows are read, and what of the model that sees them is trained. Text alone does not need it."""

    bad_images: str = opt(
        "error",
        "A row whose image is missing, broken, empty or too large: stop with its number, or drop the row and count it.",
        choices=("error", "drop"),
    )
    max_image_pixels: int = opt(
        89_478_485, "Width times height that an image may have; larger ones are bad images and are not decoded.", min=1
    )
    fetch_remote_images: bool = opt(
        False, "Fetch images given as http(s) URLs, while batches are made. Off, such a URL is a bad image."
    )
    train_parts: str | None = opt(
        None,
        "What of a vision-language model is trained, or gets adapters: the decoder of text with its head, the vision "
        "tower with its projector, or both. None: all weights, or the modules that peft_config names; where it names "
        "none, the linear layers of the language part.",
        choices=("language", "vision", "both"),
    )


class ImageError(DataError):
    """An image of a row cannot be read."""


@dataclass(frozen=True)
class Video:
    """A video as its frames.

    Attributes:
        frames: images, in order. fps: how many there are of a second of the video.
    """

    frames: Sequence[Any]
    fps: float = 2.0

    @classmethod
    def of(cls, value: Any, fps: float | None = None) -> Video:
        """A video of a row: a list of frames, an array (frames, height, width, channels), or a dict with "frames" and
        "fps". Raises an `ImageError` where it is something else, such as a file.
        """
        if isinstance(value, Video):
            return value
        if isinstance(value, Mapping) and "frames" in value:
            value, fps = value["frames"], value.get("fps") or fps
        is_array = getattr(value, "ndim", None) == 4
        if not is_array and (not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray))):
            named = f"the video {value}" if isinstance(value, (str, os.PathLike)) else "a video"
            raise ImageError(
                f"{named} is of type {type(value).__name__}; files are not decoded here: give the frames, as a list of "
                "images"
            )
        if not len(value):
            raise ImageError("a video has no frames")
        return cls(list(value), cls.fps if fps is None else float(fps))


@dataclass(frozen=True)
class ImageReader:
    """Reads one image.

    Args:
        max_pixels: width times height that an image may have.
        fetch_remote: whether http(s) URLs are fetched.
    """

    max_pixels: int = 89_478_485
    fetch_remote: bool = False

    @classmethod
    def of(cls, args: Any) -> ImageReader:
        """The reader that the fields of `ImageArguments` describe."""
        return cls(args.max_image_pixels, args.fetch_remote_images)

    def __call__(self, value: Any) -> Any:
        """`value` as a decoded PIL image in RGB; a `Video` with its frames so. Raises an `ImageError` with the reason.

        Args:
            value: a PIL image; an array (height, width) or (height, width, channels) of bytes; encoded bytes; a path;
                a URL (file, data, or http(s) where that is allowed); or a dict with "bytes" or "path", as `datasets`
                stores images.
        """
        if isinstance(value, Video):
            return replace(value, frames=read_images(value.frames, self, "frame {} of a video"))
        image_ops = require("PIL.ImageOps", "pillow", why="rows with images")
        image, name, opened = self._checked(value)
        try:
            image.load()
        except (OSError, SyntaxError, ValueError, EOFError, MemoryError) as error:
            raise ImageError(f"{name} is truncated or damaged ({error})") from error
        return (image_ops.exif_transpose(image) if opened else image).convert("RGB")

    def size(self, value: Any) -> tuple[int, int]:
        """(width, height) of what `value` is read to, from its first bytes: nothing is decoded. Raises an `ImageError`
        as for reading, but for images that are truncated or damaged behind their first bytes, and a `ValueError` where
        it is a video.
        """
        if isinstance(value, Video):
            raise ValueError(
                "A row has a video, whose tokens are known when its frames are read. Leave out packing, "
                "max_batch_tokens and train_sampling_strategy='group_by_length' for rows with videos."
            )
        image, _, opened = self._checked(value)
        width, height = image.size
        # A PNG may have its orientation behind the pixels, which would be decoded to find it.
        knows = opened and (image.format != "PNG" or "exif" in image.info)
        lies = knows and image.getexif().get(ORIENTATION, 1) in LYING
        if opened and not isinstance(value, io.IOBase):
            image.close()
        return (height, width) if lies else (width, height)

    def _checked(self, value: Any) -> tuple[Any, str, bool]:
        """(image of a size that is allowed, not decoded yet; its name in messages; whether it was opened here)."""
        image_module = require("PIL.Image", "pillow", why="rows with images")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", image_module.DecompressionBombWarning)  # the size is checked below
            given = isinstance(value, image_module.Image)
            image, name = (value, "the image") if given else self._opened(value, image_module)
        width, height = image.size
        if not width or not height:
            raise ImageError(f"{name} is empty: {width} x {height} pixels")
        if width * height > self.max_pixels:
            raise ImageError(
                f"{name} has {width} x {height} pixels, more than max_image_pixels={self.max_pixels}, and was not "
                "decoded"
            )
        return image, name, not given

    def _opened(self, value: Any, image_module: Any) -> tuple[Any, str]:
        """(image, not decoded yet; its name in messages)."""
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().numpy()
        if hasattr(value, "__array_interface__") and not isinstance(value, (bytes, bytearray)):
            return self._of_array(value, image_module), "the array"
        source, name = self._source(value)
        try:
            return image_module.open(source), name
        except image_module.DecompressionBombError as error:
            raise ImageError(f"{name} is too large ({error}), and was not decoded") from error
        except FileNotFoundError as error:
            raise ImageError(f"{name} does not exist (looked from {os.getcwd()})") from error
        except (OSError, SyntaxError, ValueError, EOFError) as error:
            raise ImageError(f"{name} is not an image that can be opened ({error})") from error

    def _of_array(self, value: Any, image_module: Any) -> Any:
        if value.dtype.kind not in "ub" or value.dtype.itemsize != 1 or value.ndim not in (2, 3):
            raise ImageError(
                f"an array of {value.dtype} and shape {value.shape} is no image; give bytes (uint8) of (height, width, "
                "channels)"
            )
        if 0 in value.shape:
            raise ImageError(f"the array is empty: {value.shape[1]} x {value.shape[0]} pixels")
        try:
            return image_module.fromarray(value)
        except (TypeError, ValueError) as error:
            raise ImageError(f"an array of shape {value.shape} is no image ({error})") from error

    def _source(self, value: Any) -> tuple[Any, str]:
        """(file or bytes, its name in messages)."""
        if isinstance(value, Mapping):
            if value.get("bytes"):
                return io.BytesIO(value["bytes"]), f"the image {value.get('path') or 'in bytes'}"
            if not value.get("path"):
                raise ImageError("the image has neither bytes nor a path")
            value = value["path"]
        if isinstance(value, (bytes, bytearray, memoryview)):
            if not len(value):
                raise ImageError("the image has 0 bytes")
            return io.BytesIO(value), "the image in bytes"
        if isinstance(value, io.IOBase):
            return value, "the image in an open file"
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, str):
            raise ImageError(
                f"an image is of type {type(value).__name__}; give a PIL image, an array, bytes, a path or a URL"
            )
        return self._of_text(value)

    def _of_text(self, text: str) -> tuple[Any, str]:
        scheme = text[:8].lower().partition(":")[0]
        if scheme == "data":
            try:
                return io.BytesIO(base64.b64decode(text.partition(",")[2], validate=True)), "the image in a data URL"
            except binascii.Error as error:
                raise ImageError(f"a data URL is not valid base64 ({error})") from error
        if scheme in ("http", "https"):
            if not self.fetch_remote:
                raise ImageError(
                    f"{text} is remote. Download the images, or set fetch_remote_images=True to fetch them while "
                    "batches are made"
                )
            return self._fetched(text), text
        if scheme == "file":
            text = urllib.request.url2pathname(urllib.parse.urlsplit(text).path)
        if not text:
            raise ImageError("the image's path is empty")
        if Path(text).is_dir():
            raise ImageError(f"{text} is a folder")
        return text, f"the image {text}"

    def _fetched(self, url: str) -> io.BytesIO:
        try:
            with urllib.request.urlopen(url, timeout=REMOTE_SECONDS) as answer:
                found = answer.read(REMOTE_BYTES + 1)
        except (OSError, ValueError) as error:
            raise ImageError(f"{url} cannot be fetched ({error})") from error
        if len(found) > REMOTE_BYTES:
            raise ImageError(f"{url} has more than {REMOTE_BYTES >> 20} MiB")
        return io.BytesIO(found)


def has_images(dataset: Any) -> bool:
    """Whether rows of `dataset`, or of the first of a dict of them, have images or videos: in a column, or in their
    messages.
    """
    if isinstance(dataset, dict):
        dataset = next(iter(dataset.values()), None)
    if dataset is None or isinstance(dataset, (dict, str)) or type(dataset).__name__ == "DataFrame":
        return False  # a warning or an error about the dataset itself follows
    if isinstance(dataset, list):  # of rows with several sets of columns
        return any(isinstance(row, Mapping) and _has_images(row) for row in dataset[:ROWS_LOOKED_AT])
    columns = samplers.columns_of(dataset)
    if {*IMAGE_COLUMNS, *VIDEO_COLUMNS}.intersection(columns):
        return True
    if not has_places(dataset) or not len(dataset):
        return False
    if hasattr(dataset, "select_columns"):  # stored images would be decoded
        rest = [name for name in columns if name not in stored_images(dataset)]
        dataset = dataset.select_columns(rest) if rest else [{}]
    return isinstance(first := dataset[0], Mapping) and _has_images(first)


def _has_images(row: Mapping[str, Any]) -> bool:
    if any(name in row for name in (*IMAGE_COLUMNS, *VIDEO_COLUMNS)):
        return True
    for name in ("messages", "prompt", "completion", "chosen", "rejected", "conversations"):
        for message in row[name] if isinstance(row.get(name), (list, tuple)) else ():
            if isinstance(message, Mapping) and isinstance(parts := message.get("content"), (list, tuple)):
                if any(isinstance(part, Mapping) and part.get("type") in (*IMAGE_PARTS, "video") for part in parts):
                    return True
    return False


#: Types of a message's parts that show an image.
IMAGE_PARTS = ("image", "image_url")


def images_of(row: Mapping[str, Any]) -> list[Any]:
    """What the column of images holds, as a list; nothing read yet."""
    given = next((row[name] for name in IMAGE_COLUMNS if row.get(name) is not None), None)
    if given is None:
        return []
    return list(given) if isinstance(given, Sequence) and not isinstance(given, (str, bytes, bytearray)) else [given]


def videos_of(row: Mapping[str, Any]) -> list[Video]:
    """What the column of videos holds: ``videos``, a list of them, or ``video``, one. Raises an `ImageError` where a
    video is given as something else than its frames.
    """
    several, one = (row.get(name) for name in VIDEO_COLUMNS)
    if several is not None and (not isinstance(several, Sequence) or isinstance(several, (str, bytes))):
        raise ImageError(f"the column videos holds one {type(several).__name__}, and not a list of videos")
    if several is None:
        several = [] if one is None else [one]
    return [Video.of(video) for video in several]


def stored_images(dataset: Any) -> list[str]:
    """Columns of a `datasets.Dataset` that hold images, which reading a row would decode."""
    return [name for name, feature in (getattr(dataset, "features", None) or {}).items() if _holds_image(feature)]


def _holds_image(feature: Any) -> bool:
    if type(feature).__name__ == "Image":
        return True
    if isinstance(feature, Mapping):
        return any(map(_holds_image, feature.values()))
    if isinstance(feature, (list, tuple)):
        return any(map(_holds_image, feature))
    inner = getattr(feature, "feature", None)
    return inner is not None and _holds_image(inner)


def columns_of(*datasets: Any) -> tuple[str, ...]:
    """`ROW_NUMBER` and the columns of the `datasets`, or of dicts of several; of a list, those of its first row."""
    found = [ROW_NUMBER]
    for dataset in datasets:
        for part in dataset.values() if isinstance(dataset, Mapping) else [dataset]:
            first = part[0] if isinstance(part, list) and part else {}
            found += samplers.columns_of(part) or (first if isinstance(first, Mapping) else ())
    return tuple(dict.fromkeys(found))


class NumberedRows(Dataset):
    """The rows of a dataset with their number, and with stored images as they are stored, not decoded.

    So that a broken image is named by its row, and that whoever makes the batch decodes it.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._stored = [] if transforms_rows(dataset) else stored_images(dataset)
        self._rest = dataset
        if self._stored:
            rest = [name for name in dataset.column_names if name not in self._stored]
            self._rest = dataset.select_columns(rest) if rest else None
            self._images = dataset.select_columns(self._stored).with_format("arrow")

    @property
    def column_names(self) -> list[str]:
        return samplers.columns_of(self.dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = {} if self._rest is None else dict(self._rest[index])
        if self._stored:
            row |= self._images[[int(index)]].to_pylist()[0]
        return row | {ROW_NUMBER: int(index)}


def numbered(dataset: Any) -> Any:
    """`dataset` as `NumberedRows`; a stream as it is."""
    sized = has_places(dataset) and not isinstance(dataset, Mapping)
    return NumberedRows(dataset) if sized and not isinstance(dataset, NumberedRows) else dataset


def read_images(values: Iterable[Any], reader: Callable[[Any], Any], name: str = "image {}") -> list[Any]:
    """What `reader`, an `ImageReader` or its `size`, makes of each; an error says which of several it is by `name`."""
    images = []
    for place, value in enumerate(values):
        try:
            images.append(reader(value))
        except ImageError as error:
            raise ImageError(f"{name.format(place + 1)}: {error}") from error
    return images


def name_of(value: Any) -> str:
    """Where an image of a row comes from: its path or URL, or its kind."""
    if isinstance(value, Mapping):
        value = value.get("path") or value.get("bytes")
    if isinstance(value, str):
        return "data URL" if value[:5].lower() == "data:" else value
    kinds = {"bytes": "bytes", "bytearray": "bytes", "ndarray": "array", "Tensor": "array"}
    return str(value) if hasattr(value, "__fspath__") else kinds.get(type(value).__name__, "PIL image")


def described(value: Any, shown: Any) -> str:
    """Where an image of a row comes from and its size, or how many frames a video has; `shown` is what was read."""
    if isinstance(shown, Video):
        return f"a video of {len(shown.frames)} frames, {shown.frames[0].width} x {shown.frames[0].height}"
    return f"{name_of(value)}, {shown.width} x {shown.height}"


def fault_of(error: DataError, row: int, drops_bad_images: bool) -> str:
    """Why the row of that number is dropped, going by the `error` that reading it raised. Raises a `DataError` where an
    image cannot be read, and such rows are not to be dropped.
    """
    if isinstance(error, ImageError) and not drops_bad_images:
        raise DataError(f"Row {row}: {error}. Correct the row, or set bad_images=drop.") from error
    return str(error)
