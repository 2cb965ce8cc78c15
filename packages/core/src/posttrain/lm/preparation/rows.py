"""What the preparations of single rows share: special tokens, chat templates, and the content that names a cache."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from posttrain.core.config import values_of
from posttrain.core.errors import DataError
from posttrain.core.models.special_tokens import tokenizer_of
from posttrain.lm.images.images import ImageReader
from posttrain.lm.images.vision import VisionProcessor
from posttrain.lm.text import chat_template, tokenization
from posttrain.lm.text.tokenization import is_fast

INT32_MAX = 2**31 - 1
NO_TOKENS = np.empty(0, dtype=np.int32)
NOT_INVOKED = "nothing to train on after alora_invocation_tokens, at which the adapter begins"


@dataclass
class RowPreparation:
    """Turns rows of a dataset into tokens. A subclass says what rows look like, and what becomes of one.

    Args:
        tokenizer: or the processor that holds it. max_length: tokens that a row may have, None for any number.
        truncation: the side of a long row that is kept, "keep_start" or "keep_end".
        eos_token: ends texts; the tokenizer's by default. Conversations end as in their template.
        chat_template_kwargs: variables for the chat template; a row's own column of that name takes precedence.
        invocation: tokens at which the model's adapter begins (aLoRA): nothing before them, and no row without them,
            changes the adapter.
    """

    tokenizer: Any
    max_length: int | None = None
    truncation: str = "keep_start"
    eos_token: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    invocation: Sequence[int] = ()

    #: What is known of each prepared row besides its tokens, and the Arrow type of each. The report counts these.
    facts: ClassVar[dict[str, str]] = {"row": "int64", "fault": "string", "truncated": "bool"}

    def __post_init__(self) -> None:
        # A processor (of a model that also sees) holds its tokenizer.
        self.tokenizer = tokenizer_of(self.tokenizer)
        self.eos_token_id = self.tokenizer.eos_token_id
        if self.eos_token is not None:
            self.eos_token_id = self.tokenizer.convert_tokens_to_ids(self.eos_token)
            if self.eos_token_id in (None, self.tokenizer.unk_token_id):
                raise ValueError(f"eos_token={self.eos_token!r} is not a token of the tokenizer")
        self.before, after = chat_template.special_tokens_around(self.tokenizer)
        has_end = self.eos_token_id is None or after[-1:] == [self.eos_token_id]
        self.after = after if has_end else [*after, self.eos_token_id]

    def __call__(self, rows: Sequence[Any], indices: Sequence[int]) -> Sequence[Any]:
        """Prepare a batch of rows, the dataset's `indices`. Rows that cannot be trained on carry their ``fault``."""
        raise NotImplementedError

    def columns_made(self, columns: Iterable[str] = ()) -> dict[str, str]:
        """The columns of a prepared row where the dataset has `columns`: "tokens", or their Arrow type."""
        raise NotImplementedError

    @property
    def token_columns(self) -> tuple[str, ...]:
        """The columns of tokens of a prepared row."""
        return tuple(name for name, kind in self.columns_made().items() if kind == "tokens")

    def columns_read(self, columns: list[str], name: str) -> list[str] | None:
        """Those of the `columns` of dataset `name` that are read; None for all. Raises a `DataError` where the columns
        fit no format.
        """
        raise NotImplementedError

    def values_of(self, draft: Any) -> Mapping[str, Any]:
        """The values of a prepared row by the names of columns, its `facts` included."""
        return vars(draft)

    def template_of(self, row: Mapping[str, Any]) -> chat_template.Template:
        """The chat template, with the tools and the variables of a row."""
        if not row.get("tools") and not row.get("chat_template_kwargs"):
            return self._plain_template
        own = {key: value for key, value in (row.get("chat_template_kwargs") or {}).items() if value is not None}
        return chat_template.Template(
            self.tokenizer, chat_template.to_tools(row.get("tools")), (self.chat_template_kwargs or {}) | own
        )

    @cached_property
    def _plain_template(self) -> chat_template.Template:
        return chat_template.Template(self.tokenizer, None, self.chat_template_kwargs)

    def around(self, ids: list[int], is_chat: bool) -> tuple[list[int], list[int], bool]:
        """(tokens to put before a text, tokens to put after it, whether it brings its own bos).

        A template writes its own bos and ends of turns; then the last value is whether `ids` begin with bos twice.
        """
        if is_chat:
            return [], [], chat_template.has_doubled_bos(self.tokenizer, ids)
        has_start = bool(self.before) and ids[: len(self.before)] == self.before
        has_end = bool(self.after) and ids[-len(self.after) :] == self.after
        return [] if has_start else self.before, [] if has_end else self.after, has_start

    def content(self) -> str:
        """Everything that affects the prepared rows, the tokenizer included, as a string to hash."""
        from datasets.fingerprint import Hasher

        tokenizer = self.tokenizer
        arguments = values_of(self)
        del arguments["tokenizer"]
        function = arguments.pop("formatting_func", None)
        if is_fast(tokenizer):
            backend = tokenizer.backend_tokenizer
            backend.no_truncation()
            backend.no_padding()
            vocabulary = backend.to_str()
        else:
            vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True)
        special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
        rendered_by = [tokenizer.chat_template, special, tokenization.REVISION]
        return Hasher.hash([vocabulary, *rendered_by, arguments, function])


def is_invoked(ids: Sequence[int] | np.ndarray, invocation: Sequence[int]) -> bool:
    """Whether an adapter that begins at the tokens `invocation` computes the last of `ids`: they stand before that."""
    wanted, read = np.asarray(invocation), np.asarray(ids)[:-1]
    if not len(wanted):
        return True
    return len(wanted) <= len(read) and bool((sliding_window_view(read, len(wanted)) == wanted).all(1).any())


class ReadsImages(RowPreparation):
    """Put before a preparation, it also takes rows with images.

    Args:
        vision: asks the processor. reader: reads images. drops_bad_images: a row with an image that cannot be read is
            dropped and counted, else an error. options: of the preparation.
    """

    def __init__(self, vision: VisionProcessor, reader: ImageReader, drops_bad_images: bool = False, **options: Any):
        self.vision, self.reader, self.drops_bad_images = vision, reader, drops_bad_images
        options["chat_template_kwargs"] = vision.template_kwargs(options.get("chat_template_kwargs"))
        super().__init__(vision.tokenizer, **options)


def check_row(row: Any) -> None:
    """Raise DataError if `row` is no dict."""
    if not isinstance(row, Mapping):
        raise DataError(f"the row is not a dict but of type {type(row).__name__}")


def whole_numbers(value: Any, name: str) -> np.ndarray:
    """(N,) int32 of the list of tokens or labels in column `name`. Raises a `DataError` where it is empty, or no list
    of whole numbers of 32 bits.
    """
    try:
        numbers = np.asarray(value)
    except ValueError:  # lists of several lengths
        numbers = np.empty((), dtype=object)
    if numbers.shape == (0,):
        raise DataError(f"{name} is empty")
    if numbers.ndim != 1 or numbers.dtype.kind not in "iub":
        raise DataError(f"{name} is not a list of whole numbers")
    if numbers.max() > INT32_MAX or numbers.min() < -INT32_MAX:
        raise DataError(f"{name} holds a number that no token has (beyond 32 bits)")
    return numbers.astype(np.int32)


def conversation(
    prompt: Sequence[chat_template.Message], completion: Sequence[chat_template.Message]
) -> list[chat_template.Message]:
    """The messages of both. A completion of the assistant's last message in the prompt is one message with it."""
    if not prompt[-1]["role"] == completion[0]["role"] == "assistant":
        return [*prompt, *completion]
    turn = completion[0] | {"content": prompt[-1]["content"] + completion[0]["content"]}
    return [*prompt[:-1], turn, *completion[1:]]
