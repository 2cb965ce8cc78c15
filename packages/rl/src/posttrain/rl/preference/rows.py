"""Prepares one preference row: finds its prompt and tokenizes prompt and completions.

A *pair* has a prompt (or else the common beginning of both texts), a chosen and a rejected completion; a *triple* has a
reference completion too. An *unpaired* row has a prompt, a completion and a label, True for a good one. All may be
text, conversations or tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from posttrain.core.data.samplers import columns_of, is_stream
from posttrain.core.errors import DataError
from posttrain.lm.images.vision import Shown
from posttrain.lm.preparation.rows import (
    NOT_INVOKED,
    RowPreparation,
    check_row,
    conversation,
    is_invoked,
    whole_numbers,
)
from posttrain.lm.text import chat_template, tokenization
from posttrain.lm.text.chat_template import require_calls

PAIR = ("chosen", "rejected")
#: The columns of tokens that the rows of a format become.
TOKEN_COLUMNS = {
    "preference": ("prompt_ids", "chosen_ids", "rejected_ids"),
    "unpaired_preference": ("prompt_ids", "completion_ids", "label"),
    "triple_preference": ("prompt_ids", "chosen_ids", "rejected_ids", "reference_ids"),
}
#: The completions of a row of each format.
COMPLETIONS = {"preference": PAIR, "unpaired_preference": ("completion",), "triple_preference": (*PAIR, "reference")}
#: Log-probabilities under the reference, summed over a completion, that were computed before.
REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
#: Numeric columns that are kept; `margin` is the target difference of a pair's rewards.
KEPT_COLUMNS = (*REFERENCE_COLUMNS, "ref_logps", "ref_kl_logps", "margin")
LONG = ("truncate", "drop", "error")
FAULTY = ("drop", "keep", "error")


def extract_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    """A pair with an implicit prompt, as one with an explicit prompt: what both completions begin with.

    Conversations are cut between messages, and texts after a space, so that no word is cut in two. A prompt that is
    there as a text while the completions are conversations that begin with it, is one with them.
    """
    chosen, rejected = row["chosen"], row["rejected"]
    if chosen is None or rejected is None:
        raise DataError(f"{'chosen' if chosen is None else 'rejected'} is null")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError("one of chosen and rejected is a text and the other a conversation")
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

    row: int
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
    kept: dict[str, Any] = field(default_factory=dict)
    """The row's `KEPT_COLUMNS`."""


def preparation_options(args: Any) -> dict[str, Any]:
    """The arguments of `PreferencePreparation` that `args`, a `PreferenceConfig`, sets."""
    return {
        "max_length": args.max_length,
        "truncation": args.truncation_mode,
        "long_rows": args.long_rows,
        "faulty_rows": args.faulty_rows,
    }


@dataclass
class PreferencePreparation(RowPreparation):
    """Turns raw rows of preferences into tokens.

    Args:
        truncation: "keep_start" cuts completions at their end; "keep_end" cuts the prompt at its beginning, equally for
            both completions, and completions only if they alone are too long.
        kind: "preference", "unpaired_preference" or "triple_preference".
        long_rows: how a row longer than `max_length` is handled: "truncate", "drop" or "error". A row whose prompt
            alone is too long is dropped where completions are to be cut.
        faulty_rows: how a pair of equal completions or an empty completion is handled: "drop", "keep" or "error".
    """

    kind: str = "preference"
    long_rows: str = "truncate"
    faulty_rows: str = "drop"

    facts: ClassVar[dict[str, str]] = RowPreparation.facts | {"oddity": "string", "prompt_cut": "bool"}

    def __post_init__(self) -> None:
        for name, value, known in (
            ("long_rows", self.long_rows, LONG),
            ("faulty_rows", self.faulty_rows, FAULTY),
            ("kind", self.kind, tuple(TOKEN_COLUMNS)),
        ):
            if value not in known:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(known)}")
        super().__post_init__()
        self.names = COMPLETIONS[self.kind]
        self.splits_pairs = False  # whether the rows are pairs, and unpaired ones are wanted

    def columns_made(self, columns: Iterable[str] = ()) -> dict[str, str]:
        made = {name: "bool" if name == "label" else "tokens" for name in TOKEN_COLUMNS[self.kind]}
        return made | {name: "float32" for name in columns if name in KEPT_COLUMNS and not self.splits_pairs}

    def format_of(self, columns: Iterable[str], name: str) -> str:
        """The format of the rows of dataset `name`, "preference" or "unpaired_preference" in place of one another.
        Raise DataError if the columns fit no format that can be converted to the `kind` that is prepared.
        """
        columns = list(columns)
        if seen := {"image", "images"} & set(columns):
            raise DataError(
                f"{name}: the column {min(seen)!r} is vision-related, and this trainer reads texts alone, also with a "
                "vision-language model. Remove the column to train on the texts."
            )
        if self.kind == "triple_preference":
            if {"reference", "reference_ids"} & set(columns):
                return self.kind
            raise DataError(
                f"{name} has no column 'reference' with the completion to imitate. It has {', '.join(columns)}."
            )
        for kind, wanted in TOKEN_COLUMNS.items():
            if set(wanted) <= set(columns):
                return kind
        try:
            return chat_template.detect_format(columns, among=("preference", "unpaired_preference"))
        except DataError as error:
            raise DataError(f"{name}: {error}") from None

    def columns_read(self, columns: list[str], name: str) -> list[str]:
        """As the base's; pairs are taken apart where unpaired rows are wanted."""
        self.splits_pairs = self.format_of(columns, name) != self.kind
        if self.splits_pairs and self.kind != "unpaired_preference":
            raise DataError(f"{name}: unpaired rows cannot be paired in a stream. Load them with streaming=False.")
        texts = ("prompt", "completion", "label", *PAIR, "reference", "tools", "chat_template_kwargs")
        tokens = [f"{part}_ids" for part in ("prompt", "completion", *PAIR, "reference")]
        return [column for column in columns if column in (*texts, *tokens, *KEPT_COLUMNS)]

    def values_of(self, draft: Tokens) -> Mapping[str, Any]:
        ids = (draft.prompt, *draft.completions) if not draft.fault else ()
        tokens = {name: np.array(one, np.int32) for name, one in zip(self.token_columns, ids, strict=bool(ids))}
        return vars(draft) | draft.kept | tokens

    def __call__(self, rows: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> list[Tokens]:
        """Prepare a batch of rows, the dataset's `indices`. Raise DataError if a row is faulty, and faulty rows are
        errors.
        """
        drafts = [draft for row, index in zip(rows, indices, strict=True) for draft in self._read(row, index)]
        for draft in drafts:
            draft.fault = draft.fault or next(filter(None, map(tokenization.unreadable, draft.texts)), "")
        good = [draft for draft in drafts if not draft.fault]
        texts = [text for draft in good for text in draft.texts]
        starts = [start for draft in good for start in draft.starts]
        owners = [draft for draft in good for _ in draft.texts]
        spans = [[(start, len(text))] if start < len(text) else [] for text, start in zip(texts, starts, strict=True)]
        encodings = chat_template.encode_texts(self.tokenizer, texts, spans)
        for draft, encoding in zip(owners, encodings, strict=True):
            self._add(draft, encoding)
        for draft in drafts:
            if draft.texts and not draft.fault:
                self._split(draft)
            if not draft.fault:
                self._fit(draft)
            if not draft.fault:
                self._judge(draft)
        return drafts

    def _read(self, row: Any, index: int) -> list[Tokens]:
        """The drafts of a row: two of a pair that is taken apart, else one."""
        try:
            check_row(row)
            parts = to_unpaired([row]) if self.splits_pairs else [row]
        except DataError as error:
            return [Tokens(index, fault=str(error))]
        drafts = [self._read_one(part, index * len(parts) + place) for place, part in enumerate(parts)]
        if not self.splits_pairs:
            drafts[0].kept = {name: row[name] for name in KEPT_COLUMNS if name in row}
        return drafts

    def _read_one(self, row: Mapping[str, Any], index: int) -> Tokens:
        try:
            label = self._label(row) if self.kind == "unpaired_preference" else None
            if "prompt_ids" in row:
                return self._read_tokens(row, index, label)
            row, names = self.with_prompt(row), ("prompt", *self.names)
            if any(isinstance(row.get(name), list) for name in names):
                return self._read_chat(row, index, label)
            for name in names:
                if row.get(name) is None:
                    raise DataError(f"{name} is null")
                if not isinstance(row[name], str):
                    kind = type(row[name]).__name__
                    raise DataError(f"{name} is neither a text nor a conversation but of type {kind}")
            texts, starts = [row["prompt"] + row[name] for name in self.names], [len(row["prompt"])] * len(self.names)
            empty = next((name for name in self.names if not row[name].strip()), None)
            oddity = f"{empty} is empty" if empty else ""
            return Tokens(index, texts=texts, starts=starts, label=label, oddity=oddity)
        except DataError as error:
            return Tokens(index, fault=str(error))

    def with_prompt(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """`row`, of a pair with its prompt, also where that is what both completions begin with."""
        if self.kind == "unpaired_preference":
            return row
        prompt, chosen = row.get("prompt"), row["chosen"]
        begins = isinstance(prompt, str) and isinstance(chosen, list) and (chosen or [{}])[0].get("role") == "user"
        return extract_prompt(row) if prompt is None or begins else row

    def _label(self, row: Mapping[str, Any]) -> bool:
        if row.get("label") is None:
            raise DataError("label is null")
        if row["label"] not in (0, 1):
            raise DataError("label is neither true nor false")
        return bool(row["label"])

    def _read_tokens(self, row: Mapping[str, Any], index: int, label: bool | None) -> Tokens:
        ids: dict[str, Any] = {name: row.get(f"{name}_ids") for name in ("prompt", *self.names)}
        for name, value in ids.items():
            if value is None:
                raise DataError(f"{name}_ids is null")
        for name in self.names:
            if not len(ids[name]):
                raise DataError(f"{name} is empty")
        prompt, *completions = (list(v) and whole_numbers(v, f"{name}_ids").tolist() for name, v in ids.items())
        return Tokens(index, prompt=prompt, completions=completions, label=label)

    def _read_chat(self, row: Mapping[str, Any], index: int, label: bool | None) -> Tokens:
        def messages(name: str, role: str) -> list[chat_template.Message]:
            is_text = isinstance(row[name], str)
            return [{"role": role, "content": row[name]}] if is_text else chat_template.to_messages(row[name], name)

        template = self.template_of(row)
        prompt = messages("prompt", "user")
        draft = Tokens(index, is_chat=True, label=label)
        for name in self.names:
            completion = messages(name, "assistant")
            whole = conversation(prompt, completion)
            require_calls(template, whole, [i >= len(whole) - len(completion) for i in range(len(whole))])
            draft.texts.append(template.render(whole))
            draft.starts.append(template.prompt_length(prompt, draft.texts[-1]))
            if not any(message.get("content") or message.get("tool_calls") for message in completion):
                draft.oddity = f"{name} is empty"
        return draft

    def _add(self, draft: Tokens, encoding: chat_template.Encoding) -> None:
        """One text's tokens, with those around it that the tokenizer or the template puts there."""
        ids, (before, after, has_bos) = encoding.ids, self.around(encoding.ids, draft.is_chat)
        doubled = int(has_bos and draft.is_chat)
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
        length, most = len(draft.prompt) + max(map(len, draft.completions)), self.max_length
        if most is None or length <= most:
            return
        if self.long_rows == "error":
            raise DataError(
                f"Row {draft.row} has {length} tokens, more than max_length={most}. Raise max_length, or set long_rows "
                "to truncate or drop."
            )
        if self.long_rows == "drop":
            draft.fault = f"longer than max_length={most}"
            return
        if self.truncation == "keep_start":
            if (room := most - len(draft.prompt)) < 1:
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
        elif not any(is_invoked([*draft.prompt, *ids], self.invocation) for ids in draft.completions):
            draft.fault = NOT_INVOKED
        if draft.oddity and self.faulty_rows == "error":
            raise DataError(f"Row {draft.row}: {draft.oddity}. Correct the row, or set faulty_rows to drop or keep.")
        if draft.oddity and self.faulty_rows == "drop":
            draft.fault = draft.fault or draft.oddity


__all__ = ["extract_prompt", "maybe_extract_prompt", "maybe_unpair_preference_dataset", "unpair_preference_dataset"]


def maybe_extract_prompt(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """`extract_prompt` of a pair without a prompt; any other row as it is."""
    return row if row.get("prompt") is not None or not {*PAIR} <= row.keys() else extract_prompt(row)


def unpair_preference_dataset(
    dataset: Any, num_proc: int | None = None, desc: str | None = None, **map_kwargs: Any
) -> Any:
    """Two rows of each pair: prompt, completion and label, True for the chosen one. Other columns are kept.

    Args:
        dataset: a Dataset, an IterableDataset or a DatasetDict. Of each 1,000 pairs the chosen ones come first.
        num_proc: processes that work on it. desc: beside the progress bar. Neither is used for a stream.
        map_kwargs: other arguments of the dataset's `map`.
    """
    known = {} if is_stream(_first(dataset)) else {"num_proc": num_proc, "desc": desc}
    return dataset.map(_unpaired, batched=True, remove_columns=list(PAIR), **known | map_kwargs)


def maybe_unpair_preference_dataset(dataset: Any, num_proc: int | None = None, desc: str | None = None) -> Any:
    """`unpair_preference_dataset` of a dataset of pairs; any other as it is."""
    one = _first(dataset)
    are_pairs = {*PAIR} <= {*(columns_of(one) or next(iter(one), []))}
    return unpair_preference_dataset(dataset, num_proc, desc) if are_pairs else dataset


def _first(dataset: Any) -> Any:
    """The dataset, or the first one of a dict of datasets."""
    return next(iter(dataset.values())) if isinstance(dataset, Mapping) else dataset


def _unpaired(pairs: dict[str, list[Any]]) -> dict[str, list[Any]]:
    rows = [dict(zip(pairs, values, strict=True)) for values in zip(*pairs.values(), strict=True)]
    made = to_unpaired(map(maybe_extract_prompt, rows))
    return {name: [row[name] for row in made[::2] + made[1::2]] for name in made[0]}
