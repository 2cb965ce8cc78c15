"""Recognises rows as people have them, by their columns, and gives them the columns that the trainers read.

Alpaca's (instruction, input, output), question and answer, query and response, pairs with a question, and others: a
layout is any prompt column with any answer column. ShareGPT's conversations need no change.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

#: {column that trainers read: names that others give it, the best first}.
NAMES = {
    "prompt": ("prompt", "instruction", "question", "query", "problem", "input"),
    "completion": ("completion", "output", "response", "answer", "solution"),
    "context": ("input", "context"),
    "system": ("system", "system_prompt"),
}
#: Columns that hold texts and nothing else; reward functions may read answers and solutions as numbers.
TEXTS = sorted({"text", "chosen", "rejected", *(n for names in NAMES.values() for n in names)} - {"answer", "solution"})
#: {format: the columns that its rows need}.
KINDS = {
    "prompt_completion": ("prompt", "completion"),
    "preference": ("prompt", "chosen", "rejected"),
    "unpaired_preference": ("prompt", "completion", "label"),
    "prompt_only": ("prompt",),
}
#: The kinds that trainers of preferences convert into each other.
PAIRED = ("preference", "unpaired_preference")
#: Columns that trainers read in place of a prompt.
WITHOUT_PROMPT = {"messages", "conversations", "text", "input_ids", "prompt_ids"}
#: Of rows that `canonical` leaves as they are.
PLAIN = (
    "the rows are plain texts, and the model has a chat template, which chat and most servers apply: it is trained "
    "without it. To train on conversations, set as_messages: true in the file of the run (--as_messages), or pass "
    "posttrain.lm.text.layouts.as_messages(dataset)."
)
_TEXTS = ("completion", "chosen", "rejected")
_TURN = re.compile(r"\n\n(Human|Assistant): ?")  # as in Anthropic's HH-RLHF


def find(columns: Iterable[str], kind: str) -> dict[str, str] | None:
    """{column that trainers read: the column that holds it} of a layout with these `columns`; None where nothing has to
    be changed, or nothing fits. `kind`: the format that the trainer reads, one of `KINDS`.
    """
    columns, found = list(columns), {}
    names = {name.strip().lower(): name for name in columns} | {name: name for name in columns}
    for wanted in KINDS[kind]:
        column = next((names[name] for name in NAMES.get(wanted, (wanted,)) if name in names), None)
        if column is None:
            return None
        found[wanted] = column
    if all(wanted == column for wanted, column in found.items()) or WITHOUT_PROMPT & set(columns):
        return None
    for extra in ("context", "system"):
        others = (names[name] for name in NAMES[extra] if name in names)
        column = next((name for name in others if name not in found.values()), None)
        found |= {extra: column} if column is not None else {}
    return found


def canonical(dataset: Any, tokenizer: Any, kinds: Sequence[str], name: str = "train") -> Any:
    """`dataset` with the columns that trainers read, where `find` recognises its layout; else as it is.

    Texts become messages where `tokenizer` has a chat template. Where rows are in those columns already and are plain
    texts, they stay plain texts, and a warning says so.

    Args:
        kinds: as for `find`, the first that fits. name: of the dataset, for the messages.
    """
    layout, chats = _layout(columns(dataset), kinds), template_of(tokenizer) is not None
    if sentence := how_read(dataset, tokenizer, kinds):
        logger.log(logging.INFO if layout else logging.WARNING, "%s: %s", name, sentence)
    if layout is None:
        return dataset
    return _mapped(dataset, functools.partial(_converted, layout, chats), layout.values())


def how_read(dataset: Any, tokenizer: Any, kinds: Sequence[str]) -> str:
    """What `canonical` does with `dataset`, as a sentence; "" where there is nothing to say."""
    names, chats = columns(dataset), template_of(tokenizer) is not None
    if layout := _layout(names, kinds):
        parts = ", ".join(f"{column} as {wanted}" for wanted, column in layout.items())
        return f"reads {parts}, {'in messages of the chat template' if chats else 'as plain text'}."
    unread = [name for name in NAMES["system"] if name in names]
    if unread and {"messages", "conversations"}.intersection(names):
        return f"does not read the column {unread[0]!r}. Put it into the conversations, as their first turn."
    return PLAIN if chats and any(_is_text(dataset, kind, names) for kind in kinds) else ""


def template_of(tokenizer: Any) -> Any | None:
    """The chat template of a tokenizer, or of a processor: a text, or several by name; None without one."""
    return getattr(tokenizer, "chat_template", None)


def _layout(columns: Sequence[str], kinds: Iterable[str]) -> dict[str, str] | None:
    return next(filter(None, (find(columns, kind) for kind in kinds)), None)


def as_messages(dataset: Any) -> Any:
    """`dataset` with prompts and completions that are texts as messages of a user and an assistant.

    Layouts that `find` recognises are read too, and dialogues of ``Human:`` and ``Assistant:`` are cut into turns.
    """
    names = columns(dataset)
    layout = _layout(names, ("preference", "unpaired_preference", "prompt_completion", "prompt_only"))
    layout = layout or {name: name for name in ("prompt", *_TEXTS) if name in names}
    return _mapped(dataset, functools.partial(_converted, layout, True), layout.values()) if layout else dataset


def rename_hint(columns: Iterable[str], wanted: Sequence[str]) -> str:
    """The argument that gives the first of `columns` the names that are `wanted`; "" where there are too few."""
    columns = list(columns)
    absent = [name for name in wanted if name not in columns]
    if absent == ["prompt"] and "messages" in columns:
        return " messages holds the answers too: give the turns before an answer as prompt."
    free = [name for name in columns if name not in wanted]
    if not absent or len(free) < len(absent):
        return ""
    renamed = json.dumps(dict(zip(free, absent, strict=False)), ensure_ascii=False)
    return f" On the command line: --rename_columns '{renamed}', with the columns that hold them."


def _converted(layout: Mapping[str, str], chats: bool, row: Mapping[str, Any]) -> dict[str, Any]:
    """The row in the columns that trainers read; those that are not part of `layout` stay."""
    made = {name: value for name, value in row.items() if name not in layout.values()}
    parts = {wanted: _as_text(row[column]) if wanted != "label" else row[column] for wanted, column in layout.items()}
    prompt = parts.get("prompt")
    if isinstance(prompt, str) and parts.get("context"):
        parts["prompt"] = prompt = f"{prompt}\n\n{parts['context']}"
    if isinstance(prompt, str) and parts.get("system") and not chats:
        parts["prompt"] = prompt = f"{parts['system']}\n\n{prompt}"
    answers = [name for name in _TEXTS if isinstance(parts.get(name), str)]
    if isinstance(prompt, str) and chats:
        parts["prompt"] = _turns(prompt, "user")
        if parts.get("system"):
            parts["prompt"] = [{"role": "system", "content": parts["system"]}, *parts["prompt"]]
    elif isinstance(prompt, str) and answers and not prompt[-1:].isspace():
        parts["prompt"] = prompt + "\n"  # question and answer are two lines
    for name in answers if chats else ():
        parts[name] = _turns(parts[name], "assistant")
    return made | {name: value for name, value in parts.items() if name not in ("context", "system")}


def _as_text(value: Any) -> Any:
    """A number as its text: CSV columns of numbers are read as numbers, and beside an empty cell as floats."""
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    return str(value) if isinstance(value, (int, float)) else value


def _turns(text: str, role: str) -> list[dict[str, str]]:
    """The messages of a text, of one `role` or of a dialogue in one text."""
    if not _TURN.match(text):
        return [{"role": role, "content": text}]
    parts = _TURN.split(text)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[who], "content": what.strip()} for who, what in zip(parts[::2], parts[1::2], strict=True)]


def columns(dataset: Any) -> list[str]:
    """The columns of `dataset`; none where its rows are no mappings, or cannot be looked at."""
    from posttrain.core.data.samplers import columns_of  # which imports torch, as help does not

    if known := columns_of(dataset):
        return list(known)
    first = _first(dataset)
    return list(first) if isinstance(first, Mapping) else []


def _first(dataset: Any) -> Any:
    from posttrain.core.data.samplers import has_places

    if isinstance(dataset, Mapping):  # several datasets by name
        return None
    if has_places(dataset):
        return dataset[0] if len(dataset) else None
    return next(iter(dataset), None) if _is_dataset(dataset) else None


def _is_dataset(dataset: Any) -> bool:
    """Whether it is one of `datasets`."""
    return hasattr(dataset, "map")


def _is_text(dataset: Any, kind: str, columns: Sequence[str]) -> bool:
    """Whether the first row holds a prompt, or a chosen completion, that is a text."""
    if kind == "prompt_completion" and not set(KINDS[kind]) <= set(columns):
        return False
    first = _first(dataset) if {"prompt", "chosen"} & set(columns) else None
    return isinstance(first, Mapping) and all(isinstance(first.get(n), str) for n in ("prompt", "chosen") if n in first)


class _Mapped:
    """Rows of a sequence, each converted when it is read."""

    def __init__(self, rows: Any, convert: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
        self.rows, self.convert = rows, convert

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.convert(self.rows[index])


def _mapped(dataset: Any, convert: Callable[[Mapping[str, Any]], dict[str, Any]], used: Iterable[str]) -> Any:
    if _is_dataset(dataset):
        return dataset.map(convert, remove_columns=list(used))
    return [convert(row) for row in dataset] if isinstance(dataset, list) else _Mapped(dataset, convert)
