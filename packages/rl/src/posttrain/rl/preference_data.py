"""From rows of preferences to tokens: pairs behind one prompt, or single completions with a verdict.

A *pair* has a prompt (or none, and then what both texts begin with), a chosen and a rejected completion. An *unpaired* row
has a prompt, a completion and a label, True for a good one. Either may be text, conversations, or tokens already.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.core import chat
from posttrain.core.data import check_dataset
from posttrain.core.errors import DataError
from posttrain.core.loader import out_of_range

logger = logging.getLogger(__name__)

PAIR = ("chosen", "rejected")
#: The columns of tokens that the rows of a format become.
TOKEN_COLUMNS = {
    "preference": ("prompt_ids", "chosen_ids", "rejected_ids"),
    "unpaired_preference": ("prompt_ids", "completion_ids", "label"),
}
LONG = ("truncate", "drop", "error")
FAULTY = ("drop", "keep", "error")
#: Log-probabilities under the reference, summed over a completion, that were computed before.
REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
ROWS_PER_BATCH = 1000
ROWS_PER_STREAMED_BATCH = 256
ROWS_SHOWN = 5
#: Columns that a prepared row carries until the report is made.
FACTS = ("row", "fault", "oddity", "truncated", "prompt_tokens", "completion_tokens", "longest")


# --------------------------------------------------------------------------------------------------------------- rows


def extract_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    """A pair with an implicit prompt, as one with an explicit prompt: what both completions begin with.

    Conversations are cut between messages, and texts after a space, so that no word is cut in two. A prompt that is there
    as a text while the completions are conversations that begin with it, is one with them.
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
        chosen, rejected = (chat.to_messages(row[name], name) for name in PAIR)
        shorter = min(len(chosen), len(rejected))
        length = next((i for i in range(shorter) if chosen[i] != rejected[i]), shorter)
        if length == len(chosen) == len(rejected):  # equal to the end: the last message is what was compared
            length -= 1
        if length < 1:
            raise DataError("chosen and rejected have no message in common, and there is no prompt")
    return {**row, "prompt": chosen[:length], "chosen": chosen[length:], "rejected": rejected[length:]}


def to_unpaired(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Two rows of each pair: its chosen completion with the label True, its rejected one with False."""
    unpaired = []
    for row in rows:
        row = dict(row) if "prompt" in row else extract_prompt(row)
        rest = {name: value for name, value in row.items() if name not in PAIR}
        unpaired += [rest | {"completion": row[name], "label": name == "chosen"} for name in PAIR]
    return unpaired


def to_pairs(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Pairs of the completions of each prompt: good ones with bad ones, in their order; what is left over is left out."""
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


# ------------------------------------------------------------------------------------------------------------- report


@dataclass
class PreferenceReport:
    """What became of the rows of a dataset.

    rows_in: rows read. rows_kept: rows to train on. dropped, kept: fault -> (count, first rows), of the rows that were left
    out for it, or kept in spite of it. truncated: rows cut to the maximum length. prompt_tokens, completion_tokens: of the
    kept rows. longest: tokens of the longest prompt with its completion.
    """

    name: str = "train"
    rows_in: int = 0
    rows_kept: int = 0
    dropped: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    kept: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    truncated: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    longest: int = 0

    def add(self, facts: Mapping[str, Sequence[Any]]) -> None:
        """Count a batch of prepared rows by their columns `FACTS`."""
        for row, fault, oddity, truncated, prompt, completions, longest in zip(*(facts[f] for f in FACTS), strict=True):
            self.rows_in += 1
            self.truncated += truncated
            if fault or oddity:
                faults = self.dropped if fault else self.kept
                number, first = faults.get(fault or oddity, (0, []))
                faults[fault or oddity] = (number + 1, [*first, row][:ROWS_SHOWN])
            if not fault:
                self.rows_kept += 1
                self.prompt_tokens += prompt
                self.completion_tokens += completions
                self.longest = max(self.longest, longest)

    def lines(self) -> list[str]:
        """The report as sentences for the log."""
        tokens = self.prompt_tokens + self.completion_tokens
        share = self.prompt_tokens / tokens if tokens else 0.0
        lines = [
            f"{self.name}: {self.rows_in:,} rows read, {self.rows_kept:,} kept, {tokens:,} tokens of which {share:.0%} are "
            f"prompt; longest {self.longest:,}"
        ]
        if self.truncated:
            lines.append(f"  truncated: {self.truncated:,} rows")
        for what, faults in (("dropped", self.dropped), ("kept", self.kept)):
            for fault, (count, first) in faults.items():
                more = ", ..." if count > len(first) else ""
                lines.append(f"  {what} {count:,}: {fault} (rows {', '.join(map(str, first))}{more})")
        return lines

    def tell(self, logger: logging.Logger) -> None:
        """Write the report to the log, as a warning where rows were at fault."""
        logger.log(logging.WARNING if self.dropped or self.kept else logging.INFO, "%s", "\n".join(self.lines()))


# -------------------------------------------------------------------------------------------------------- preparation


@dataclass
class Tokens:
    """A row on its way: texts with where the prompt ends in them, or tokens; one completion, or two."""

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
    """Why it had better not be; what is done then is the user's choice."""
    truncated: bool = False


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
        self.before, self.after = chat.special_tokens_around(self.tokenizer)
        end = self.tokenizer.eos_token_id
        if end is not None and self.after[-1:] != [end]:
            self.after = [*self.after, end]
        self.names = PAIR if self.kind == "preference" else ("completion",)

    def __call__(self, rows: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> list[Tokens]:
        """Prepare a batch of rows, the dataset's `indices`.

        Raises:
            DataError: a row is at fault, and an error is what was asked for then.
        """
        drafts = [self._read(row, index) for row, index in zip(rows, indices, strict=True)]
        texts = [
            (draft, text, start) for draft in drafts for text, start in zip(draft.texts, draft.starts, strict=True)
        ]
        spans = [[(start, len(text))] if start < len(text) else [] for _, text, start in texts]
        encodings = chat.encode_texts(self.tokenizer, [text for _, text, _ in texts], spans)
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
        """All that decides what a row becomes, the tokenizer's contents included, as a string to hash."""
        fast = getattr(self.tokenizer, "is_fast", False)
        if fast:
            self.tokenizer.backend_tokenizer.no_truncation()
            self.tokenizer.backend_tokenizer.no_padding()
        words = self.tokenizer.backend_tokenizer.to_str() if fast else sorted(self.tokenizer.get_vocab().items())
        options = {k: v for k, v in vars(self).items() if k != "tokenizer"}
        return repr((words, self.tokenizer.chat_template, sorted(self.tokenizer.special_tokens_map.items()), options))

    def _read(self, row: Any, index: int) -> Tokens:
        try:
            if not isinstance(row, Mapping):
                raise DataError(f"the row is not a dict but of type {type(row).__name__}")
            label = self._label(row) if self.kind == "unpaired_preference" else None
            if "prompt_ids" in row:
                return self._read_tokens(row, index, label)
            if self.kind == "preference" and (
                row.get("prompt") is None or isinstance(row["prompt"], str) and isinstance(row["chosen"], list)
                and (row["chosen"] or [{}])[0].get("role") == "user"
            ):  # fmt: skip
                row = extract_prompt(row)
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

    def _label(self, row: Mapping[str, Any]) -> bool:
        if row.get("label") is None:
            raise DataError("label is null")
        if row["label"] not in (0, 1):
            raise DataError("label is neither true nor false")
        return bool(row["label"])

    def _read_tokens(self, row: Mapping[str, Any], index: int, label: bool | None) -> Tokens:
        ids = [row.get(f"{name}_ids") for name in ("prompt", *self.names)]
        for name, value in zip(("prompt", *self.names), ids, strict=True):
            if value is None:
                raise DataError(f"{name}_ids is null")
        empty = next((n for n, value in zip(self.names, ids[1:], strict=True) if not len(value)), None)
        if empty:
            raise DataError(f"{empty} is empty")
        return Tokens(index, prompt=list(ids[0]), completions=[list(value) for value in ids[1:]], label=label)

    def _read_chat(self, row: Mapping[str, Any], index: int, label: bool | None) -> Tokens:
        def messages(name: str, role: str) -> list[chat.Message]:
            value = row[name]
            return [{"role": role, "content": value}] if isinstance(value, str) else chat.to_messages(value, name)

        own = {key: value for key, value in (row.get("chat_template_kwargs") or {}).items() if value is not None}
        template = chat.Template(
            self.tokenizer, chat.to_tools(row.get("tools")), (self.chat_template_kwargs or {}) | own
        )
        prompt = messages("prompt", "user")
        draft = Tokens(index, is_chat=True, label=label)
        for name in self.names:
            completion = messages(name, "assistant")
            whole = prompt + completion
            if prompt[-1]["role"] == completion[0]["role"] == "assistant":  # it goes on where the prompt stops
                turn = completion[0] | {"content": prompt[-1]["content"] + completion[0]["content"]}
                whole = [*prompt[:-1], turn, *completion[1:]]
            draft.texts.append(template.render(whole))
            draft.starts.append(template.prompt_length(prompt, draft.texts[-1]))
            if not any(message.get("content") or message.get("tool_calls") for message in completion):
                draft.oddity = f"{name} is empty"
        return draft

    def _add(self, draft: Tokens, encoding: chat.Encoding) -> None:
        """One text's tokens, with those around it that the tokenizer or the template puts there."""
        ids, before, after, doubled = encoding.ids, [], [], 0
        if draft.is_chat:  # a template writes its own bos and ends of turns
            doubled = int(chat.has_doubled_bos(self.tokenizer, ids))
        else:
            before = [] if self.before and ids[: len(self.before)] == self.before else self.before
            after = [] if self.after and ids[-len(self.after) :] == self.after else self.after
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
        """Cut a row that is too long, in the way that was asked for. The completions keep one prompt."""
        longest = max(map(len, draft.completions))
        most = self.max_length
        if most is None or len(draft.prompt) + longest <= most:
            return
        if self.long_rows == "error":
            raise DataError(
                f"Row {draft.index} has {len(draft.prompt) + longest} tokens, more than max_length={most}. Raise max_length, or "
                "set long_rows to truncate or drop."
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
            draft.prompt = draft.prompt[-(most - max(map(len, draft.completions))) :]
        draft.truncated = True

    def _judge(self, draft: Tokens) -> None:
        if len(draft.completions) == 2 and draft.completions[0] == draft.completions[1]:
            draft.oddity = "chosen and rejected are equal" + (" after truncation" if draft.truncated else "")
        if any(len(ids) + bool(draft.prompt) < 2 for ids in draft.completions):
            draft.fault = "nothing of a completion can be predicted"
        if draft.oddity and self.faulty_rows == "error":
            raise DataError(f"Row {draft.index}: {draft.oddity}. Mend the row, or set faulty_rows to drop or keep.")
        if draft.oddity and self.faulty_rows == "drop":
            draft.fault = draft.fault or draft.oddity


def prepare_preferences(
    dataset: Any,
    tokenizer: Any,
    *,
    kind: str = "preference",
    max_length: int | None = None,
    truncation: str = "keep_start",
    long_rows: str = "truncate",
    faulty_rows: str = "drop",
    chat_template_kwargs: dict[str, Any] | None = None,
    num_proc: int | None = None,
    limits: Mapping[str, int] | None = None,
    name: str = "train",
) -> tuple[Any, PreferenceReport]:
    """Tokenize a dataset of pairs, or of completions with verdicts.

    Args:
        dataset: a `datasets.Dataset`, a list of dicts, a torch dataset of dicts, or a stream. Rows of the other kind are
            converted where that is possible: pairs become unpaired rows, and unpaired rows of the same prompt pairs.
        tokenizer: or the processor that holds it.
        kind: "preference" or "unpaired_preference".
        max_length: tokens that a prompt with a completion may have, None for any number.
        truncation: "keep_start" cuts completions at their end; "keep_end" cuts the prompt at its beginning, as much for
            both completions, and completions only where they alone are too long.
        long_rows: what becomes of a row that is too long: "truncate", "drop" or "error". A row whose prompt alone is too
            long is dropped where completions are to be cut.
        faulty_rows: what becomes of a pair of equal completions, and of an empty completion: "drop", "keep" or "error".
        limits: what the model can read, as `posttrain.core.models.id_limits` says.
        name: the dataset's, in the report.

    Returns:
        A `datasets.Dataset` (an `IterableDataset` for a stream) with the columns `TOKEN_COLUMNS` of its kind and what was in
        ``ref_..._logps``, and the report, which for a stream grows as it is read.

    Raises:
        DataError: no rows, the columns fit no format, no row can be trained on, or one holds a token that the model does
            not know.
    """
    import datasets
    from torch.utils.data import IterableDataset

    check_dataset(dataset, f"{name}_dataset")
    options = {"max_length": max_length, "truncation": truncation, "long_rows": long_rows, "faulty_rows": faulty_rows}
    prepare = PreferencePreparation(tokenizer, kind, chat_template_kwargs=chat_template_kwargs, **options)
    report = PreferenceReport(name)
    if isinstance(dataset, Iterator):
        raise TypeError(
            f"{name}_dataset is a {type(dataset).__name__}, which gives its rows once only. Pass list(...) of it."
        )
    if isinstance(dataset, IterableDataset):
        if not isinstance(dataset, datasets.IterableDataset):
            dataset = datasets.IterableDataset.from_generator(_rows_of, gen_kwargs={"dataset": dataset})
        return _prepare_stream(dataset, prepare, report, limits or {}), report
    if not isinstance(dataset, datasets.Dataset):
        dataset = _from_list([dataset[i] for i in range(len(dataset))], name)
    dataset = _of_kind(dataset.with_format(None), kind, name)
    prepared = _prepare_arrow(dataset, prepare, limits or {}, num_proc, name)
    report.add({fact: prepared[fact][:] for fact in FACTS})
    if report.rows_kept == 0:
        raise DataError("\n".join([f"{name}: no row can be trained on.", *report.lines()[1:]]))
    if report.dropped:
        prepared = prepared.select([i for i, fault in enumerate(prepared["fault"][:]) if not fault])
    return prepared.remove_columns(list(FACTS)), report


def _rows_of(dataset: Any) -> Iterator[Any]:
    yield from dataset


def _from_list(rows: list[Any], name: str) -> Any:
    from datasets import Dataset

    wrong = next((i for i, row in enumerate(rows) if not isinstance(row, Mapping)), None)
    if wrong is not None:
        raise DataError(f"{name}: row {wrong} is not a dict but of type {type(rows[wrong]).__name__}")
    try:
        return Dataset.from_list([dict(row) for row in rows])
    except (TypeError, ValueError, OverflowError) as error:  # Arrow's: columns of several types
        raise DataError(
            f"{name}: the rows cannot be laid out as a table ({error}). Give each column one type."
        ) from error


def _of_kind(dataset: Any, kind: str, name: str) -> Any:
    """`dataset`, or what it becomes where its rows are of the other kind."""
    found = _detect(dataset.column_names, name)
    if found == kind:
        return dataset
    rows = [{k: v for k, v in row.items() if not k.startswith("ref_")} for row in dataset]
    converted = to_unpaired(rows) if kind == "unpaired_preference" else to_pairs(rows)
    if not converted:
        raise DataError(f"{name}: no prompt has a good and a bad completion, so there are no pairs.")
    return _from_list(converted, name)


def _detect(columns: list[str], name: str) -> str:
    for kind, wanted in TOKEN_COLUMNS.items():
        if set(wanted) <= set(columns):
            return kind
    try:
        return chat.detect_format(columns, among=("preference", "unpaired_preference"))
    except DataError as error:
        raise DataError(f"{name}: {error}") from None


def _features(kind: str, kept: Iterable[str] = ()) -> Any:
    from datasets import Features, List, Value

    kinds = {"label": Value("bool"), "truncated": Value("bool"), "fault": Value("string"), "oddity": Value("string")}
    numbers = {name: Value("int64") for name in FACTS} | {name: Value("float32") for name in kept}
    columns = {name: List(Value("int32")) for name in TOKEN_COLUMNS[kind]} | numbers
    return Features({name: kinds.get(name, value) for name, value in columns.items()})


def _columns(drafts: list[Tokens], kind: str, limits: Mapping[str, int], name: str) -> dict[str, list[Any]]:
    """Prepared rows as columns: their tokens, empty where they are at fault, and their `FACTS`."""
    columns: dict[str, list[Any]] = {column: [] for column in (*TOKEN_COLUMNS[kind], *FACTS)}
    for draft in drafts:
        prompt, completions = draft.prompt, draft.completions
        if draft.fault:
            prompt, completions = [], [[]] * (2 if kind == "preference" else 1)
        _check_numbers(draft, limits, name)
        lengths = list(map(len, completions))
        facts = (
            draft.index,
            draft.fault,
            draft.oddity,
            draft.truncated,
            len(prompt),
            sum(lengths),
            len(prompt) + max(lengths),
        )
        verdict = [bool(draft.label)] if kind == "unpaired_preference" else []
        for values, value in zip(columns.values(), (prompt, *completions, *verdict, *facts), strict=True):
            values.append(value)
    return columns


def _check_numbers(draft: Tokens, limits: Mapping[str, int], name: str) -> None:
    if "input_ids" in limits:
        ids = np.concatenate([draft.prompt, *draft.completions, np.empty(0, np.int64)])
        wrong = ids[(ids < 0) | (ids >= limits["input_ids"])]
        if len(wrong):
            where = f" in row {draft.index}"
            raise DataError(f"{name}: {out_of_range('input_ids', int(wrong[0]), limits['input_ids'], where)}")


def _prepare_arrow(
    dataset: Any, prepare: PreferencePreparation, limits: Mapping, num_proc: int | None, name: str
) -> Any:
    from datasets import is_caching_enabled
    from datasets.fingerprint import Hasher

    kept = [column for column in dataset.column_names if column in REFERENCE_COLUMNS]

    def batch_of(columns: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        made = _columns(prepare(rows, indices), prepare.kind, limits, name)
        return made | {column: columns[column] for column in kept}

    cached = bool(dataset.cache_files) and is_caching_enabled()
    return dataset.map(
        batch_of,
        batched=True,
        batch_size=ROWS_PER_BATCH,
        with_indices=True,
        remove_columns=dataset.column_names,
        features=_features(prepare.kind, kept),
        num_proc=num_proc,
        keep_in_memory=not cached,
        new_fingerprint=Hasher.hash([dataset._fingerprint, prepare.content(), sorted(limits.items()), FACTS]),
        desc=f"Preparing {name}",
    )


def _prepare_stream(
    dataset: Any, prepare: PreferencePreparation, report: PreferenceReport, limits: Mapping[str, int]
) -> Any:
    columns_in = dataset.column_names or list(next(iter(dataset), {}))
    if not columns_in:
        raise DataError(f"{report.name}_dataset has no rows. If it was filtered, see what the filter kept.")
    convert = _detect(columns_in, report.name) != prepare.kind
    if convert and prepare.kind == "preference":
        raise DataError(f"{report.name}: unpaired rows cannot be paired in a stream. Load them with streaming=False.")

    def batch_of(batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        if convert:
            rows, indices = to_unpaired(rows), [2 * i + j for i in indices for j in (0, 1)]
        if indices and indices[0] == 0:  # another pass over the stream
            report.__init__(report.name)
        known = len(report.dropped)
        columns = _columns(prepare(rows, indices), prepare.kind, limits, report.name)
        report.add(columns)
        if len(report.dropped) > known:  # a reason that was not met before
            report.tell(logger)
        if report.rows_kept == 0 and report.rows_in >= ROWS_PER_BATCH:
            raise DataError("\n".join([f"{report.name}: no row can be trained on.", *report.lines()[1:]]))
        kept = [i for i, fault in enumerate(columns["fault"]) if not fault]
        return {name: [columns[name][i] for i in kept] for name in TOKEN_COLUMNS[prepare.kind]}

    features = _features(prepare.kind)
    return dataset.map(
        batch_of,
        batched=True,
        batch_size=ROWS_PER_STREAMED_BATCH,
        with_indices=True,
        remove_columns=columns_in,
        features=type(features)({name: features[name] for name in TOKEN_COLUMNS[prepare.kind]}),
    )
