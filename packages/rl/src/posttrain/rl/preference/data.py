"""Tokenizes preference datasets and reports kept, truncated and dropped rows.

`posttrain.rl.preference.rows` handles a single row.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from posttrain.core.data.batch_limits import out_of_range
from posttrain.core.data.pipeline import check_dataset
from posttrain.core.data.row_reports import Faults, RowReport
from posttrain.core.errors import DataError
from posttrain.lm.text import chat_template, layouts
from posttrain.rl.preference.rows import (
    COMPLETIONS,
    TOKEN_COLUMNS,
    PreferencePreparation,
    Tokens,
    to_pairs,
    to_unpaired,
)

logger = logging.getLogger(__name__)

#: Log-probabilities under the reference, summed over a completion, that were computed before.
REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
#: Numeric columns that are kept; `margin` is the target difference of a pair's rewards.
KEPT_COLUMNS = (*REFERENCE_COLUMNS, "ref_logps", "ref_kl_logps", "margin")
ROWS_PER_BATCH = 1000
ROWS_PER_STREAMED_BATCH = 256
#: Columns of a prepared row for the report, dropped afterwards.
FACTS = ("row", "fault", "oddity", "truncated", "prompt_cut", "prompt_tokens", "completion_tokens", "longest")


@dataclass
class PreferenceReport(RowReport):
    """Counts of kept, truncated and dropped rows of a dataset.

    kept: fault -> (count, first rows), of rows kept in spite of it. truncated: rows cut to the maximum length.
    prompts_cut: truncated rows that lost the beginning of their prompt. prompt_tokens, completion_tokens: of the kept
    rows. longest: tokens of the longest prompt with its completion.
    """

    remedies: ClassVar[Mapping[str, str]] = {
        "the prompt alone fills": (
            ": raise max_length, or set truncation_mode=keep_end to cut prompts at their beginning"
        ),
        "longer than max_length": ": raise max_length, or set long_rows=truncate",
        "after truncation": ": they differ beyond max_length; raise it",
    }

    kept: Faults = field(default_factory=dict)
    truncated: int = 0
    prompts_cut: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    longest: int = 0

    def add(self, facts: Mapping[str, Sequence[Any]]) -> None:
        """Count a batch of prepared rows by their columns `FACTS`."""
        for row, fault, oddity, truncated, prompt_cut, prompt, completions, longest in zip(
            *(facts[f] for f in FACTS), strict=True
        ):
            self.rows_in += 1
            self.truncated += truncated
            self.prompts_cut += prompt_cut
            if fault or oddity:
                self.count(self.dropped if fault else self.kept, fault or oddity, [row])
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
            f"{self.name}: {self.rows_in:,} rows read, {self.rows_kept:,} kept, {tokens:,} tokens of which "
            f"{share:.0%} are prompt; longest {self.longest:,}"
        ]
        if self.truncated:
            cut = f", of which {self.prompts_cut:,} lost the beginning of their prompt" if self.prompts_cut else ""
            lines.append(f"  truncated to max_length: {self.truncated:,} rows{cut}")
        return [*lines, *self.lines_of("dropped"), *self.lines_of("kept", self.kept)]

    @property
    def is_wrong(self) -> bool:
        return bool(self.dropped or self.kept)


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
    on_bad_rows: str = "drop",
    name: str = "train",
) -> tuple[Any, PreferenceReport]:
    """Tokenize a dataset of pairs, or of labelled completions.

    Args:
        dataset: a `datasets.Dataset`, a list of dicts, a torch dataset of dicts, or a stream. Rows of the other kind
            are converted where that is possible: pairs become unpaired rows, and unpaired rows of the same prompt
            pairs.
        tokenizer: or the processor that holds it.
        kind: "preference", "unpaired_preference" or "triple_preference".
        max_length: tokens that a prompt with a completion may have, None for any number.
        truncation: "keep_start" cuts completions at their end; "keep_end" cuts the prompt at its beginning, equally for
            both completions, and completions only if they alone are too long.
        long_rows: how a row that is too long is handled: "truncate", "drop" or "error". A row whose prompt alone is too
            long is dropped where completions are to be cut.
        faulty_rows: how a pair of equal completions or an empty completion is handled: "drop", "keep" or "error".
        limits: of the model's token ids, see `posttrain.core.models.embeddings.id_limits`.
        on_bad_rows: "drop" rows that cannot be trained on, or "raise".
        name: the dataset's, in the report.

    Returns:
        A `datasets.Dataset` (an `IterableDataset` for a stream) with the columns `TOKEN_COLUMNS` of its kind and those
        of `KEPT_COLUMNS` that are there, and the report, which for a stream grows as it is read.

    Raises:
        DataError: no rows, unknown columns, no row to train on, one that cannot be where `on_bad_rows` is "raise", or a
            token outside the model's vocabulary.
    """
    import datasets
    from torch.utils.data import IterableDataset

    check_dataset(dataset, f"{name}_dataset")
    options: dict[str, Any] = {"max_length": max_length, "truncation": truncation}
    options |= {"long_rows": long_rows, "faulty_rows": faulty_rows}
    prepare = PreferencePreparation(tokenizer, kind, chat_template_kwargs=chat_template_kwargs, **options)
    report = PreferenceReport(name)
    if isinstance(dataset, Iterator):
        raise TypeError(
            f"{name}_dataset is a {type(dataset).__name__}, which gives its rows once only. Pass list(...) of it."
        )
    if kind in layouts.KINDS:
        dataset = layouts.canonical(dataset, prepare.tokenizer, (kind, *layouts.PAIRED), name)
    if isinstance(dataset, IterableDataset):
        if not isinstance(dataset, datasets.IterableDataset):
            dataset = datasets.IterableDataset.from_generator(_rows_of, gen_kwargs={"dataset": dataset})
        return _prepare_stream(dataset, prepare, report, limits or {}, on_bad_rows), report
    if not isinstance(dataset, datasets.Dataset):
        dataset = _from_list([dataset[i] for i in range(len(dataset))], name)
    dataset = _of_kind(dataset.with_format(None), kind, name)
    prepared = _prepare_arrow(dataset, prepare, limits or {}, num_proc, name)
    report.add({fact: prepared[fact][:] for fact in FACTS})
    report.judge(on_bad_rows)
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
        raise DataError(f"{name}: the rows do not form a table ({error}). Give each column one type.") from error


def _of_kind(dataset: Any, kind: str, name: str) -> Any:
    """`dataset`, converted if its rows are of the other kind."""
    found = _detect(dataset.column_names, name, kind)
    if found == kind:
        return dataset
    rows = [{k: v for k, v in row.items() if not k.startswith("ref_")} for row in dataset]
    converted = to_unpaired(rows) if kind == "unpaired_preference" else to_pairs(rows)
    if not converted:
        raise DataError(f"{name}: no prompt has a good and a bad completion, so there are no pairs.")
    return _from_list(converted, name)


def _detect(columns: list[str], name: str, asked: str) -> str:
    if seen := {"image", "images"} & set(columns):
        raise DataError(
            f"{name}: the column {min(seen)!r} is vision-related, and this trainer reads texts alone, also with a "
            "vision-language model. Remove the column to train on the texts."
        )
    if asked == "triple_preference":
        if {"reference", "reference_ids"} & set(columns):
            return asked
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


def _features(kind: str, kept: Iterable[str] = ()) -> Any:
    from datasets import Features, List, Value

    kinds = {
        "label": Value("bool"),
        "truncated": Value("bool"),
        "prompt_cut": Value("bool"),
        "fault": Value("string"),
        "oddity": Value("string"),
    }
    numbers = {name: Value("int64") for name in FACTS} | {name: Value("float32") for name in kept}
    columns = {name: List(Value("int32")) for name in TOKEN_COLUMNS[kind]} | numbers
    return Features({name: kinds.get(name, value) for name, value in columns.items()})


def _columns(drafts: list[Tokens], kind: str, limits: Mapping[str, int], name: str) -> dict[str, list[Any]]:
    """Prepared rows as columns: tokens, empty for faulty rows, and their `FACTS`."""
    columns: dict[str, list[Any]] = {column: [] for column in (*TOKEN_COLUMNS[kind], *FACTS)}
    for draft in drafts:
        prompt, completions = draft.prompt, draft.completions
        if draft.fault:
            prompt, completions = [], [[]] * len(COMPLETIONS[kind])
        _check_numbers(draft, limits, name)
        verdict = [bool(draft.label)] if kind == "unpaired_preference" else []
        for values, value in zip(columns.values(), (prompt, *completions, *verdict, *_facts(draft)), strict=True):
            values.append(value)
    return columns


def _facts(draft: Tokens) -> tuple[Any, ...]:
    """The `FACTS` of a row; one with a fault has no tokens."""
    prompt = 0 if draft.fault else len(draft.prompt)
    lengths = [0] if draft.fault else list(map(len, draft.completions))
    verdict = (draft.index, draft.fault, draft.oddity, draft.truncated, draft.prompt_cut)
    return *verdict, prompt, sum(lengths), prompt + max(lengths)


def facts_of(drafts: list[Tokens]) -> dict[str, list[Any]]:
    """What a `PreferenceReport` counts of rows that are prepared while batches are made."""
    rows = [_facts(draft) for draft in drafts]
    return {fact: [row[place] for row in rows] for place, fact in enumerate(FACTS)}


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

    kept = [column for column in dataset.column_names if column in KEPT_COLUMNS]

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
    dataset: Any, prepare: PreferencePreparation, report: PreferenceReport, limits: Mapping[str, int], on_bad_rows: str
) -> Any:
    columns_in = dataset.column_names or list(next(iter(dataset), {}))
    if not columns_in:
        raise DataError(f"{report.name}_dataset has no rows. If it was filtered, see what the filter kept.")
    convert = _detect(columns_in, report.name, prepare.kind) != prepare.kind
    brought = [] if convert else [column for column in columns_in if column in KEPT_COLUMNS]
    if convert and prepare.kind == "preference":
        raise DataError(f"{report.name}: unpaired rows cannot be paired in a stream. Load them with streaming=False.")

    def batch_of(batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        if convert:
            rows, indices = to_unpaired(rows), [2 * i + j for i in indices for j in (0, 1)]
        if indices and indices[0] == 0:  # another pass over the stream
            report.clear()
        known = len(report.dropped)
        columns = _columns(prepare(rows, indices), prepare.kind, limits, report.name)
        columns |= {name: [row[name] for row in rows] for name in brought}
        report.add(columns)
        report.judge(on_bad_rows)
        if len(report.dropped) > known:  # a new reason
            report.tell(logger)
        if report.rows_kept == 0 and report.rows_in >= ROWS_PER_BATCH:
            raise DataError("\n".join([f"{report.name}: no row can be trained on.", *report.lines()[1:]]))
        kept = [i for i, fault in enumerate(columns["fault"]) if not fault]
        return {name: [columns[name][i] for i in kept] for name in (*TOKEN_COLUMNS[prepare.kind], *brought)}

    features = _features(prepare.kind, brought)
    return dataset.map(
        batch_of,
        batched=True,
        batch_size=ROWS_PER_STREAMED_BATCH,
        with_indices=True,
        remove_columns=columns_in,
        features=type(features)({name: features[name] for name in (*TOKEN_COLUMNS[prepare.kind], *brought)}),
    )
