"""Prepares one row: finds the trained spans, tokenizes it and makes its labels.

Labels are aligned with the inputs (the model shifts them, not the data) and -100 at tokens without a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from posttrain.core.errors import DataError, did_you_mean
from posttrain.lm.images.vision import Shown
from posttrain.lm.preparation.rows import (
    NO_TOKENS,
    NOT_INVOKED,
    RowPreparation,
    check_row,
    conversation,
    is_invoked,
    whole_numbers,
)
from posttrain.lm.text import chat_template, tokenization, turn_closers
from posttrain.lm.text.chat_template import require_calls

FORMATS = ("tokenized", "prompt_completion", "language_modeling")
NOTHING_SHOWN = Shown("")


class FormattingError(DataError):
    """The user's ``formatting_func`` raised an error, which is a bug and not a faulty row."""


@dataclass
class Draft:
    """A row in preparation: a text with the spans to train on (None: all) and what is shown in it, or given tokens."""

    row: int
    text: str = ""
    spans: list[chat_template.Span] | None = None
    is_chat: bool = False
    ids: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    labels: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    fault: str = ""
    truncated: bool = False
    split: bool = False
    is_piece: bool = False
    doubled_bos: bool = False
    cut: bool = False
    ends: bool = False
    trained: int = 0
    shown: Shown = field(default_factory=lambda: NOTHING_SHOWN)


def preparation_options(args: Any) -> dict[str, Any]:
    """The arguments of `Preparation` that `args`, an `SFTConfig`, sets."""
    return {
        "text_field": args.dataset_text_field,
        "max_length": args.max_length,
        "truncation": args.truncation_mode,
        "too_long": args.too_long,
        "completion_only_loss": args.completion_only_loss,
        "assistant_only_loss": args.assistant_only_loss,
        "train_on": args.train_on,
        "eos_token": args.eos_token,
        "chat_template_kwargs": args.chat_template_kwargs,
    }


@dataclass
class Preparation(RowPreparation):
    """Turns raw rows into tokens and labels: text, messages (also ShareGPT's), prompt and completion, or tokens.

    Args:
        text_field: the column of texts.
        too_long: how a row longer than `max_length` is handled: "truncate", "drop", "split" into rows (each begins with
            the last token of the one before, which it is not trained on), or "error".
        completion_only_loss: train on completions only; None: if there are completions.
        assistant_only_loss: train on the assistant's messages only; the same as ``train_on="assistant"``.
        train_on: the messages of a conversation to train on, see `posttrain.lm.text.chat_template.message_choice`.
        formatting_func: makes a text, a list of texts or a conversation of a row.
    """

    text_field: str = "text"
    too_long: str = "truncate"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    train_on: str | Sequence[str] | None = None
    formatting_func: Callable[[dict[str, Any]], Any] | None = None

    facts: ClassVar[dict[str, str]] = RowPreparation.facts | {
        "split": "bool",
        "doubled_bos": "bool",
        "cut": "bool",
        "ends": "bool",
        "trained": "int32",
    }

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length={self.max_length} must be >= 2: one token to read and one to predict")
        if self.train_on is None and self.assistant_only_loss:
            self.train_on = "assistant"
        super().__post_init__()
        self.end_tokens = chat_template.end_tokens(self.tokenizer, self.eos_token_id)
        self.is_space: dict[int, bool] = {}
        self.takes_batches: bool | None = None

    def columns_made(self, columns: Iterable[str] = ()) -> dict[str, str]:
        return {"input_ids": "tokens", "labels": "tokens"}

    def columns_read(self, columns: list[str], name: str) -> list[str] | None:
        """As the base's. Raises a `DataError` where the columns fit no format, or not the configured loss."""
        if self.formatting_func is not None:
            return None
        known = ["text" if c == self.text_field else c for c in columns if c != "text" or c == self.text_field]
        try:
            kind = chat_template.detect_format(known, among=FORMATS)
        except DataError as error:
            if self.text_field != "text" and self.text_field not in columns:
                raise DataError(
                    f"{name} has no column {self.text_field!r}, the one that dataset_text_field names. It has "
                    f"{', '.join(columns)}{did_you_mean(self.text_field, columns, '.')}"
                ) from None
            raise DataError(f"{name}: {error} The column of texts is named by dataset_text_field.") from None
        if kind == "tokenized" and {"seq_lengths", "position_ids"} & set(columns):
            raise DataError(
                f"{name}: the rows are packed already (they have seq_lengths or position_ids). "
                'Set dataset_kwargs={"skip_prepare_dataset": True}.'
            )
        if kind == "language_modeling" and self.completion_only_loss:
            raise DataError(
                f"{name}: completion_only_loss=True needs the columns prompt and completion; found {sorted(columns)}. "
                "For conversations set assistant_only_loss=True."
            )
        wanted = {
            "tokenized": {"input_ids", "labels", "completion_mask", "assistant_masks"},
            "prompt_completion": {"prompt", "completion", "tools", "chat_template_kwargs"},
            "language_modeling": {"messages", "conversations", self.text_field, "tools", "chat_template_kwargs"},
        }
        return [column for column in columns if column in wanted[kind]]

    def values_of(self, draft: Draft) -> Mapping[str, Any]:
        return vars(draft) | {"input_ids": draft.ids}

    def __call__(self, rows: Sequence[Any], indices: Sequence[int]) -> list[Draft]:
        """Prepare a batch of rows, the dataset's `indices`. Rows that cannot be trained on carry their `fault`."""
        drafts = [draft for row, index in zip(rows, indices, strict=True) for draft in self._read(row, index)]
        for draft in drafts:
            draft.fault = draft.fault or tokenization.unreadable(draft.text)
        texts = [draft for draft in drafts if draft.ids is NO_TOKENS and not draft.fault]
        encodings = chat_template.encode_texts(self.tokenizer, [d.text for d in texts], [d.spans for d in texts])
        for draft, encoding in zip(texts, encodings, strict=True):
            self._label(draft, encoding)
        fitted = []
        for draft in drafts:
            fitted += [draft] if draft.fault else self._fit(draft)
        for draft in fitted:
            if not draft.fault:
                self._judge(draft)
        return fitted

    def _read(self, row: Any, index: int) -> list[Draft]:
        try:
            check_row(row)
            function = self.formatting_func
            formatted = [row] if function is None else self._format(function, row, index)
        except FormattingError:
            raise
        except DataError as error:
            return [Draft(index, fault=str(error))]
        drafts = []
        for part in formatted:
            try:
                drafts.append(self._read_one(part, index))
            except DataError as error:
                drafts.append(Draft(index, fault=str(error)))
        return drafts

    def _format(self, function: Callable[..., Any], row: Mapping[str, Any], index: int) -> list[dict[str, Any]]:
        """The rows that the user's `function` makes of one: a text, a conversation, or a list of texts."""
        if self.takes_batches is None:
            self.takes_batches = _reads_batches(function, row)
        given = {key: [value] for key, value in row.items()} if self.takes_batches else dict(row)
        try:
            result = function(given)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            name = getattr(function, "__name__", type(function).__name__)
            raise FormattingError(
                f"formatting_func {name} failed on row {index} ({type(error).__name__}: {error}). It was given the "
                f"columns {', '.join(row)}."
            ) from error
        if isinstance(result, list) and result and not isinstance(result[0], Mapping):
            return [{self.text_field: text} for text in result]
        return [{"messages" if isinstance(result, list) else self.text_field: result}]

    def _read_one(self, row: Mapping[str, Any], index: int) -> Draft:
        if self.formatting_func is None and "input_ids" in row:
            return self._read_tokens(row, index)
        if "prompt" in row and "completion" in row:
            return self._read_completion(row, index)
        for name in ("messages", "conversations"):
            if name in row and not isinstance(row.get(self.text_field), str):
                return self._read_chat(row[name], name, row, index)
        text = row.get(self.text_field)
        if isinstance(text, list):
            return self._read_chat(text, self.text_field, row, index)
        self._needs_no_messages()
        return Draft(index, text=_text(text, self.text_field))

    def _read_chat(self, value: Any, name: str, row: Mapping[str, Any], index: int) -> Draft:
        messages, template = chat_template.to_messages(value, name), self.template_of(row)
        chosen = chat_template.message_choice(value, self.train_on)
        require_calls(template, messages, chosen)
        if chosen is None:
            return Draft(index, template.render(messages), is_chat=True)
        return Draft(index, *template.trained_spans(messages, chosen), is_chat=True)

    def _needs_no_messages(self) -> None:
        if self.train_on not in (None, "all"):
            option = "assistant_only_loss=True" if self.assistant_only_loss else f"train_on={self.train_on!r}"
            raise DataError(f"{option} needs conversations, and the row is a text")

    def _read_completion(self, row: Mapping[str, Any], index: int) -> Draft:
        prompt, completion = row["prompt"], row["completion"]
        completion_only = self.completion_only_loss is not False
        if not isinstance(prompt, list) and not isinstance(completion, list):
            self._needs_no_messages()
            text = _text(prompt, "prompt", may_be_empty=True) + _text(completion, "completion")
            return Draft(index, text, [(len(prompt), len(text))] if completion_only else None)
        asked = chat_template.to_messages(prompt, "prompt")
        answer = chat_template.to_messages(completion, "completion")
        messages = conversation(asked, answer)
        chosen = chat_template.message_choice([*prompt, *completion], self.train_on)
        if chosen and len(messages) < len(chosen):  # one of the prompt and of the completion
            del chosen[len(asked) - 1]
        template = self.template_of(row)
        first_learned = len(messages) - len(completion) if completion_only else 0
        learned = [i >= first_learned for i in range(len(messages))]
        require_calls(template, messages, [a and (chosen is None or chosen[i]) for i, a in enumerate(learned)])
        if chosen is None:
            text = template.render(messages)
            text += turn_closers.after(template.turn_closers, messages) if completion_only else ""
            spans = [(0, len(text))]
        else:
            text, spans = template.trained_spans(messages, chosen)
        if completion_only:
            start = template.prompt_length(asked, text, answer[0]["role"])
            spans = [(max(start, a), b) for a, b in spans if b > start]
        return Draft(index, text, spans, is_chat=True)

    def _read_tokens(self, row: Mapping[str, Any], index: int) -> Draft:
        ids = whole_numbers(row["input_ids"], "input_ids")
        given = row.get("labels")
        labels = ids.copy() if given is None else whole_numbers(given, "labels")
        for name, wanted in (("completion_mask", self.completion_only_loss is not False), ("assistant_masks", True)):
            if wanted and given is None and row.get(name) is not None:
                mask = whole_numbers(row[name], name)
                if len(mask) != len(ids):
                    raise DataError(f"{name} and input_ids differ in length")
                labels[mask == 0] = -100
        if len(labels) != len(ids):
            raise DataError("labels and input_ids differ in length")
        return Draft(index, ids=ids, labels=labels)

    def _label(self, draft: Draft, encoding: chat_template.Encoding) -> None:
        before, after, draft.doubled_bos = self.around(encoding.ids, draft.is_chat)
        dropped = int(draft.doubled_bos and draft.is_chat)
        draft.cut = encoding.cut
        draft.ids = np.array([*before, *encoding.ids[dropped:], *after], dtype=np.int32)
        draft.labels = draft.ids.copy()
        if encoding.mask is not None:
            draft.labels[: len(before)] = -100
            draft.labels[len(before) : len(draft.ids) - len(after)][~encoding.mask[dropped:]] = -100

    def _fit(self, draft: Draft) -> list[Draft]:
        """The row, truncated to the maximum length as configured."""
        length, most = len(draft.ids), self.max_length
        if most is None or length <= most:
            return [draft]
        if self.too_long == "error":
            raise DataError(
                f"Row {draft.row} has {length} tokens, more than max_length={most}. Raise max_length, or set "
                "too_long to what becomes of such rows: truncate, drop or split."
            )
        if self.too_long == "drop":
            draft.fault = f"longer than max_length={most}"
            return [draft]
        if self.too_long == "split":  # a piece begins with the last token of the one before, so that all are predicted
            pieces = [
                Draft(draft.row, ids=draft.ids[i : i + most], labels=draft.labels[i : i + most], is_piece=True)
                for i in range(0, length - 1, most - 1)
            ]
            pieces[0].split, pieces[0].doubled_bos, pieces[0].cut = True, draft.doubled_bos, draft.cut
            return pieces
        kept = slice(0, most) if self.truncation == "keep_start" else slice(length - most, length)
        draft.ids, draft.labels, draft.truncated = draft.ids[kept], draft.labels[kept], True
        return [draft]

    def _judge(self, draft: Draft) -> None:
        """Count the trained tokens, and look whether the last of them is one to stop at."""
        positions = np.flatnonzero(draft.labels[1:] != -100) + 1  # nothing predicts a row's first token
        draft.trained = len(positions)
        if not len(positions):
            where = " is left after truncation" if draft.truncated else " in a piece of a row that was split"
            draft.fault = "nothing to train on" + (where if draft.truncated or draft.is_piece else "")
            return
        if not is_invoked(draft.ids[: positions[-1] + 1], self.invocation):
            draft.fault = NOT_INVOKED
            return
        last = len(positions) - 1
        while last > 0 and self._is_white_space(int(draft.ids[positions[last]])):  # "<|im_end|>\n"
            last -= 1
        draft.ends = int(draft.ids[positions[last]]) in self.end_tokens

    def _is_white_space(self, token: int) -> bool:
        if token not in self.is_space:
            self.is_space[token] = self.tokenizer.decode([token]).isspace()
        return self.is_space[token]


def _reads_batches(function: Callable[..., Any], row: Mapping[str, Any]) -> bool:
    """Whether a user's `function` expects a batch, a dict of lists, as in older trainers."""
    try:
        if not isinstance(function(dict(row)), list):
            return False
    except (LookupError, TypeError, AttributeError, ValueError):
        pass
    try:
        result = function({key: [value] for key, value in row.items()})
    except (LookupError, TypeError, AttributeError, ValueError):
        return False
    return isinstance(result, list) and len(result) == 1 and isinstance(result[0], str)


def _text(value: Any, name: str, may_be_empty: bool = False) -> str:
    if value is None:
        raise DataError(f"{name} is null")
    if not isinstance(value, str):
        raise DataError(f"{name} is not a text but of type {type(value).__name__}")
    if not value and not may_be_empty:
        raise DataError(f"{name} is empty")
    return value
