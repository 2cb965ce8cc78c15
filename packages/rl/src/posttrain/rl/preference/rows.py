"""Prepares one preference row: finds its prompt and tokenizes prompt and completions.

A *pair* has a prompt (or else the common beginning of both texts), a chosen and a rejected completion; a *triple* has a
reference completion too. An *unpaired* row has a prompt, a completion and a label, True for a good one. All may be
text, conversations or tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.core.errors import DataError
from posttrain.lm.images.vision import Shown
from posttrain.lm.text import chat_template, tokenization
from posttrain.lm.text.tool_calls import require_calls

PAIR = ("chosen", "rejected")
#: The columns of tokens that the rows of a format become.
TOKEN_COLUMNS = {
    "preference": ("prompt_ids", "chosen_ids", "rejected_ids"),
    "unpaired_preference": ("prompt_ids", "completion_ids", "label"),
    "triple_preference": ("prompt_ids", "chosen_ids", "rejected_ids", "reference_ids"),
}
#: The completions of a row of each format.
COMPLETIONS = {
    "preference": PAIR,
    "unpaired_preference": ("completion",),
    "triple_preference": (*PAIR, "reference"),
}
LONG = ("truncate", "drop", "error")
FAULTY = ("drop", "keep", "error")


def extract_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    """A pair with an implicit prompt, as one with an explicit prompt: what both completions begin with.

    Conversations are cut between messages, and texts after a space, so that no word is cut in two. A prompt that is
    there as a text while the completions are conversations that begin with it, is one with them.
    """
    chosen, rejected = row["chosen"], row["rejected"]
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError("one of chosen and rejected is a text and the other a conversation")
    if chosen is None or rejected is None:
        raise DataError(f"{'chosen' if chosen is None else 'rejected'} is null")
    if isinstance(chosen, str):
        length = len(os.path.commonprefix([chosen, rejected]))
        if length < max(len(chosen), len(rejected)):
            length = chosen.rfind(" ", 0, length) + 1 if " " in chosen[:length] else 0
        length = len(chosen[:length].rstrip(" "))  # tokenizers of most models put the space before a word
    else:
        chosen, rejected = (chat_template.to_messages(row[name], name) for name in PAIR)
        shorter = min(len(chosen), len(rejected))
        length = next((i for i in range(shorter) if chosen[i] != rejected[i]), shorter)
        if length == len(chosen) == len(rejected):  # all equal: the last message is the completion
            length -= 1
        if length < 1:
            raise DataError("chosen and rejected have no message in common, and there is no prompt")
    if not length and "prompt" in row and row["prompt"] is None:  # rows beside it have prompts
        raise DataError("prompt is null, and chosen and rejected do not begin with the same words")
    made = {**row, "prompt": chosen[:length], "chosen": chosen[length:], "rejected": rejected[length:]}
    if row.get("reference") is not None and row.get("prompt") is None:  # of a triple
        gold = row["reference"]
        gold = gold if isinstance(gold, str) else chat_template.to_messages(gold, "reference")
        if gold[:length] != made["prompt"]:
            raise DataError(
                "reference does not begin with the implicit prompt, what chosen and rejected have in common"
            )
        made["reference"] = gold[length:]
    return made


def to_unpaired(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Two rows of each pair: its chosen completion with the label True, its rejected one with False."""
    unpaired = []
    for row in rows:
        row = dict(row) if "prompt" in row else extract_prompt(row)
        rest = {name: value for name, value in row.items() if name not in PAIR}
        unpaired += [rest | {"completion": row[name], "label": name == "chosen"} for name in PAIR]
    return unpaired


def to_pairs(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Pairs good and bad completions of each prompt in order; unmatched ones are left out."""
    by_prompt: dict[str, tuple[dict[str, Any], dict[bool, list[Any]]]] = {}
    for row in rows:
        rest = {name: value for name, value in row.items() if name not in ("completion", "label")}
        _, verdicts = by_prompt.setdefault(repr(rest["prompt"]), (rest, {True: [], False: []}))
        verdicts[bool(row["label"])].append(row["completion"])
    return [
        rest | {"chosen": chosen, "rejected": rejected}
        for rest, verdicts in by_prompt.values()
        for chosen, rejected in zip(verdicts[True], verdicts[False], strict=False)
    ]


@dataclass
class Tokens:
    """A row in preparation: texts with the end of the prompt, or tokens; one completion or two."""

    index: int
    texts: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    is_chat: bool = False
    edges: list[int] = field(default_factory=list)
    """How many of the tokens of each text are the prompt's."""
    prompt: list[int] = field(default_factory=list)
    completions: list[list[int]] = field(default_factory=list)
    label: bool | None = None
    fault: str = ""
    """Why the row cannot be trained on; "" if it can."""
    oddity: str = ""
    """The row's fault; the user sets how it is handled."""
    truncated: bool = False
    prompt_cut: bool = False
    shown: Shown | None = None
    """What stands for the images of the prompt."""


@dataclass
class PreferencePreparation:
    """Turns raw rows into tokens; the arguments are those of `prepare_preferences`."""

    tokenizer: Any
    kind: str = "preference"
    max_length: int | None = None
    truncation: str = "keep_start"
    long_rows: str = "truncate"
    faulty_rows: str = "drop"
    chat_template_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, known in (("long_rows", LONG), ("faulty_rows", FAULTY), ("kind", tuple(TOKEN_COLUMNS))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(known)}")
        self.tokenizer = getattr(self.tokenizer, "tokenizer", self.tokenizer)  # a processor holds its tokenizer
        self.before, self.after = chat_template.special_tokens_around(self.tokenizer)
        end = self.tokenizer.eos_token_id
        if end is not None and self.after[-1:] != [end]:
            self.after = [*self.after, end]
        self.names = COMPLETIONS[self.kind]

    def __call__(self, rows: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> list[Tokens]:
        """Prepare a batch of rows, the dataset's `indices`.

        Raises:
            DataError: a row is faulty, and faulty rows are errors.
        """
        drafts = [self._read(row, index) for row, index in zip(rows, indices, strict=True)]
        for draft in drafts:
            draft.fault = draft.fault or next(filter(None, map(tokenization.unreadable, draft.texts)), "")
        texts = [
            (draft, text, start)
            for draft in drafts
            if not draft.fault
            for text, start in zip(draft.texts, draft.starts, strict=True)
        ]
        spans = [[(start, len(text))] if start < len(text) else [] for _, text, start in texts]
        encodings = chat_template.encode_texts(self.tokenizer, [text for _, text, _ in texts], spans)
        for (draft, _, _), encoding in zip(texts, encodings, strict=True):
            self._add(draft, encoding)
        for draft in drafts:
            if draft.texts and not draft.fault:
                self._split(draft)
            if not draft.fault:
                self._fit(draft)
            if not draft.fault:
                self._judge(draft)
        return drafts

    def content(self) -> str:
        """Everything that affects the prepared rows, the tokenizer included, as a string to hash."""
        fast = getattr(self.tokenizer, "is_fast", False)
        if fast:
            self.tokenizer.backend_tokenizer.no_truncation()
            self.tokenizer.backend_tokenizer.no_padding()
        words = self.tokenizer.backend_tokenizer.to_str() if fast else sorted(self.tokenizer.get_vocab().items())
        options = {k: v for k, v in vars(self).items() if k != "tokenizer"}
        special = sorted(self.tokenizer.special_tokens_map.items())
        return repr((tokenization.REVISION, words, self.tokenizer.chat_template, special, options))

    def _read(self, row: Any, index: int) -> Tokens:
        try:
            if not isinstance(row, Mapping):
                raise DataError(f"the row is not a dict but of type {type(row).__name__}")
            label = self._label(row) if self.kind == "unpaired_preference" else None
            if "prompt_ids" in row:
                return self._read_tokens(row, index, label)
            row = self.with_prompt(row)
            if any(isinstance(row.get(name), list) for name in ("prompt", *self.names)):
                return self._read_chat(row, index, label)
            for name in ("prompt", *self.names):
                if row.get(name) is None:
                    raise DataError(f"{name} is null")
                if not isinstance(row[name], str):
                    raise DataError(
                        f"{name} is neither a text nor a conversation but of type {type(row[name]).__name__}"
                    )
            prompt = row["prompt"]
            empty = next((name for name in self.names if not row[name].strip()), None)
            return Tokens(
                index,
                texts=[prompt + row[name] for name in self.names],
                starts=[len(prompt)] * len(self.names),
                label=label,
                oddity=f"{empty} is empty" if empty else "",
            )
        except DataError as error:
            return Tokens(index, fault=str(error))

    def with_prompt(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """`row`, of a pair with its prompt, also where that is what both completions begin with."""
        if self.kind != "unpaired_preference" and (
            row.get("prompt") is None or isinstance(row["prompt"], str) and isinstance(row["chosen"], list)
            and (row["chosen"] or [{}])[0].get("role") == "user"
        ):  # fmt: skip
            return extract_prompt(row)
        return row

    def _label(self, row: Mapping[str, Any]) -> bool:
        if row.get("label") is None:
            raise DataError("label is null")
        if row["label"] not in (0, 1):
            raise DataError("label is neither true nor false")
        return bool(row["label"])

    def _read_tokens(self, row: Mapping[str, Any], index: int, label: bool | None) -> Tokens:
        ids: list[Any] = [row.get(f"{name}_ids") for name in ("prompt", *self.names)]
        for name, value in zip(("prompt", *self.names), ids, strict=True):
            if value is None:
                raise DataError(f"{name}_ids is null")
        empty = next((n for n, value in zip(self.names, ids[1:], strict=True) if not len(value)), None)
        if empty:
            raise DataError(f"{empty} is empty")
        return Tokens(index, prompt=list(ids[0]), completions=[list(value) for value in ids[1:]], label=label)

    def _read_chat(self, row: Mapping[str, Any], index: int, label: bool | None) -> Tokens:
        def messages(name: str, role: str) -> list[chat_template.Message]:
            value = row[name]
            return (
                [{"role": role, "content": value}] if isinstance(value, str) else chat_template.to_messages(value, name)
            )

        own = {key: value for key, value in (row.get("chat_template_kwargs") or {}).items() if value is not None}
        template = chat_template.Template(
            self.tokenizer, chat_template.to_tools(row.get("tools")), (self.chat_template_kwargs or {}) | own
        )
        prompt = messages("prompt", "user")
        draft = Tokens(index, is_chat=True, label=label)
        for name in self.names:
            completion = messages(name, "assistant")
            whole = prompt + completion
            if prompt[-1]["role"] == completion[0]["role"] == "assistant":  # it continues the prompt
                turn = completion[0] | {"content": prompt[-1]["content"] + completion[0]["content"]}
                whole = [*prompt[:-1], turn, *completion[1:]]
            require_calls(template, whole, [i >= len(whole) - len(completion) for i in range(len(whole))])
            draft.texts.append(template.render(whole))
            draft.starts.append(template.prompt_length(prompt, draft.texts[-1]))
            if not any(message.get("content") or message.get("tool_calls") for message in completion):
                draft.oddity = f"{name} is empty"
        return draft

    def _add(self, draft: Tokens, encoding: chat_template.Encoding) -> None:
        """One text's tokens, with those around it that the tokenizer or the template puts there."""
        ids, before, after, doubled = encoding.ids, [], [], 0
        if draft.is_chat:  # a template writes its own bos and ends of turns
            doubled = int(chat_template.has_doubled_bos(self.tokenizer, ids))
        else:
            before = [] if self.before and ids[: len(self.before)] == self.before else self.before
            after = [] if self.after and ids[-len(self.after) :] == self.after else self.after
        assert encoding.mask is not None  # spans were given
        first = int(encoding.mask.argmax()) if encoding.mask.any() else len(ids)
        draft.completions.append([*before, *ids[doubled:], *after])
        draft.edges.append(len(before) + first - doubled)

    def _split(self, draft: Tokens) -> None:
        """Cut the tokens of each text into the prompt, the same for all, and the completion."""
        whole, length = draft.completions, min(draft.edges)
        if any(ids[:length] != whole[0][:length] for ids in whole):  # a tokenizer that looks ahead over the edge
            length = next(i for i in range(length) if len({ids[i] for ids in whole}) > 1)
        draft.prompt, draft.completions = whole[0][:length], [ids[length:] for ids in whole]

    def _fit(self, draft: Tokens) -> None:
        """Truncate a row as configured. The completions keep one prompt."""
        longest = max(map(len, draft.completions))
        most = self.max_length
        if most is None or len(draft.prompt) + longest <= most:
            return
        if self.long_rows == "error":
            raise DataError(
                f"Row {draft.index} has {len(draft.prompt) + longest} tokens, more than max_length={most}. Raise "
                "max_length, or set long_rows to truncate or drop."
            )
        if self.long_rows == "drop":
            draft.fault = f"longer than max_length={most}"
            return
        if self.truncation == "keep_start":
            room = most - len(draft.prompt)
            if room < 1:
                draft.fault = f"the prompt alone fills max_length={most}"
                return
            draft.completions = [ids[:room] for ids in draft.completions]
        else:
            draft.completions = [ids[-(most - 1) :] for ids in draft.completions]
            kept = draft.prompt[-(most - max(map(len, draft.completions))) :]
            draft.prompt_cut, draft.prompt = len(kept) < len(draft.prompt), kept
        draft.truncated = True

    def _judge(self, draft: Tokens) -> None:
        if len(draft.completions) > 1 and draft.completions[0] == draft.completions[1]:
            draft.oddity = "chosen and rejected are equal" + (" after truncation" if draft.truncated else "")
        if any(len(ids) + bool(draft.prompt) < 2 for ids in draft.completions):
            draft.fault = "a completion has no token to predict"
        if draft.oddity and self.faulty_rows == "error":
            raise DataError(f"Row {draft.index}: {draft.oddity}. Correct the row, or set faulty_rows to drop or keep.")
        if draft.oddity and self.faulty_rows == "drop":
            draft.fault = draft.fault or draft.oddity
