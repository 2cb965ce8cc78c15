"""Tokenizes texts with a mask of trained tokens, without duplicating special tokens."""

from __future__ import annotations

import itertools
import os
import re
import reprlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from posttrain.core.errors import DataError

REVISION = 2
"""Part of the names of caches of prepared rows.

Raised when the same row under the same settings becomes other tokens.
"""

Span = tuple[int, int]
"""Where something starts and stops in a text, in characters."""


class Encoding(NamedTuple):
    """A text as tokens.

    ids: the token ids. mask: True where a token is trained on, None for everywhere. cut: the text was tokenized in
    parts because a token would have crossed the edge of a span.
    """

    ids: list[int]
    mask: np.ndarray | None
    cut: bool


def is_fast(tokenizer: Any) -> bool:
    """Whether `tokenizer` is one of the library tokenizers, which knows where each token stands in the text."""
    return bool(getattr(tokenizer, "is_fast", False))


def encode_texts(
    tokenizer: Any, texts: Sequence[str], spans: Sequence[list[Span] | None] | None = None
) -> list[Encoding]:
    """Tokenize texts, without special tokens around them, in one call.

    Args:
        tokenizer: fast (all texts at once on all threads) or slow.
        texts: N texts.
        spans: for each text the sorted spans to train on; None for all of it.

    Where a token would cross the edge of a span, the parts between the edges are tokenized separately, so that a
    prompt's tokens are those of generation. If that changes the text (tokenizers that add a space before each text), it
    stays whole and the crossing token is trained on.
    """
    marks_of: Sequence[Any] = spans or [None] * len(texts)
    if not is_fast(tokenizer):
        whole = tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        return [
            Encoding(ids, None, False) if marks is None else _encode_pieces(tokenizer, text, marks, ids)
            for text, marks, ids in zip(texts, marks_of, whole, strict=True)
        ]
    bare = [i for i, marks in enumerate(marks_of) if marks is None]
    results: list[Any] = [None] * len(texts)
    for i, encoding in zip(bare, encode_fast(tokenizer, [texts[i] for i in bare], positions=False), strict=True):
        results[i] = Encoding(encoding.ids, None, False)
    marked = [i for i, marks in enumerate(marks_of) if marks is not None]
    for i, encoding in zip(marked, encode_fast(tokenizer, [texts[i] for i in marked]), strict=True):
        mask, crossing = np.zeros(len(encoding.ids), dtype=bool), False
        for start, stop in marks_of[i]:
            first, crosses_start = token_at(encoding, start, len(texts[i]))
            last, crosses_stop = token_at(encoding, stop, len(texts[i]))
            mask[first : last + crosses_stop] = True
            crossing |= crosses_start or crosses_stop
        whole = Encoding(encoding.ids, mask, False)
        results[i] = _encode_pieces(tokenizer, texts[i], marks_of[i], *whole[:2]) if crossing else whole
    return results


def encode_fast(tokenizer: Any, texts: list[str], positions: bool = True) -> list[Any]:
    backend = tokenizer.backend_tokenizer
    # An earlier call of the tokenizer may have left its truncation or padding on.
    backend.no_truncation()
    backend.no_padding()
    if not positions:
        return _encode(backend.encode_batch_fast, texts)
    # The post-processor of GPT-2 and Llama-3 takes white space out of the positions, such as a turn's first line break.
    with _without_processor:  # two threads would each put back what they found, and one of them nothing
        processor, backend.post_processor = backend.post_processor, None
        try:
            return _encode(backend.encode_batch, texts)
        finally:
            backend.post_processor = processor


def _encode(encode: Callable[..., list[Any]], texts: list[str]) -> list[Any]:
    try:
        return encode(texts, add_special_tokens=False) if texts else []
    except TypeError:
        explain_unreadable(texts)
        raise


_without_processor = threading.Lock()


def _renew_lock() -> None:
    global _without_processor
    _without_processor = threading.Lock()


if hasattr(os, "register_at_fork"):  # another thread may have it as a worker is forked
    os.register_at_fork(after_in_child=_renew_lock)


def unreadable(text: str) -> str:
    """Why no tokenizer can read `text`: it has half of a surrogate pair, which UTF-8 does not have. Empty: all can."""
    if text.isascii() or re.search("[\ud800-\udfff]", text) is None:
        return ""
    return (
        "a text holds half of a surrogate pair, which is no character; repair such texts by "
        "text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
    )


def explain_unreadable(texts: Iterable[Any]) -> None:
    """Say that a tokenizer cannot read one of `texts`, after it failed on them; return if all hold characters alone.
    Raises a `DataError` where one cannot be read, see `unreadable`.
    """
    for text in texts:
        if isinstance(text, str) and (fault := unreadable(text)):
            raise DataError(f"{fault}. The text is {reprlib.repr(text)}")


def token_at(encoding: Any, position: int, length: int) -> tuple[int, bool]:
    """The token that holds the character at `position`, and whether the token began before it."""
    while position < length:
        token = encoding.char_to_token(position)
        if token is not None:
            return token, encoding.token_to_chars(token)[0] < position
        position += 1  # a character that the tokenizer's normalizer removed
    return len(encoding.ids), False


def _encode_pieces(
    tokenizer: Any, text: str, spans: list[Span], whole: list[int], mask: np.ndarray | None = None
) -> Encoding:
    edges = sorted({0, len(text), *(edge for span in spans for edge in span)})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    encoded = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces]
    ids = [token for piece in encoded for token in piece]
    if ids == whole or tokenizer.decode(ids) == tokenizer.decode(whole):
        inside = [any(start <= a and b <= stop for start, stop in spans) for a, b in itertools.pairwise(edges)]
        return Encoding(ids, np.repeat(inside, [len(piece) for piece in encoded]), ids != whole)
    if mask is None:
        raise DataError("this slow tokenizer has no offsets to find the trained tokens; use its fast version")
    return Encoding(whole, mask, True)


def special_tokens_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before (bos) and after (eos) a text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    ids = tokenizer("a")["input_ids"]
    for start in range(len(ids) - len(bare) + 1):
        if ids[start : start + len(bare)] == bare:
            return ids[:start], ids[start + len(bare) :]
    return [], []


def has_doubled_bos(tokenizer: Any, ids: Sequence[int]) -> bool:
    """Whether the tokens begin with bos twice: the template writes one and the tokenizer adds another."""
    return len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id
