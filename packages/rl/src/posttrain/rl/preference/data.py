"""Tokenizes preference datasets and reports kept, truncated and dropped rows.

`posttrain.rl.preference.rows` handles a single row.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from posttrain.core.data.pipeline import check_dataset
from posttrain.core.data.samplers import is_stream
from posttrain.core.errors import DataError
from posttrain.lm.preparation.pipeline import TokenReport, prepare_rows
from posttrain.lm.preparation.row_reports import Faults
from posttrain.lm.text import layouts
from posttrain.rl.preference.rows import PreferencePreparation, to_pairs


@dataclass
class PreferenceReport(TokenReport):
    """Counts of kept, truncated and dropped rows of a dataset. kept: fault -> (count, first rows), of rows kept in
    spite of it. prompts_cut: truncated rows that lost the beginning of their prompt. prompt_tokens, completion_tokens:
    of the kept rows. longest: tokens of the longest prompt with its completion.
    """

    remedies: ClassVar[Mapping[str, str]] = {
        "the prompt alone fills": (
            ": raise max_length, or set truncation_mode=keep_end to cut prompts at their beginning"
        ),
        "longer than max_length": ": raise max_length, or set long_rows=truncate",
        "after truncation": ": they differ beyond max_length; raise it",
    }

    kept: Faults = field(default_factory=dict)
    prompts_cut: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, facts: Mapping[str, np.ndarray], lengths: Mapping[str, np.ndarray]) -> None:
        super().add(facts, lengths)
        self.rows_in += len(facts["row"])
        kept = facts["fault"] == ""
        prompt, *completions = (tokens[kept] for tokens in lengths.values())
        self.count_reasons(self.kept, facts["oddity"][kept], facts["row"][kept])
        self.prompts_cut += int(facts["prompt_cut"].sum())
        self.prompt_tokens += int(prompt.sum())
        self.completion_tokens += int(sum(tokens.sum() for tokens in completions))
        self.longest = max(self.longest, int((prompt + np.max(completions, axis=0)).max(initial=0)))

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
    num_proc: int | None = None,
    limits: Mapping[str, int] | None = None,
    on_bad_rows: str = "drop",
    name: str = "train",
    **options: Any,
) -> tuple[Any, PreferenceReport]:
    """Tokenize a dataset of pairs, or of labelled completions.

    Args:
        dataset, num_proc, limits, on_bad_rows: as for `posttrain.lm.preparation.pipeline.prepare_rows`. Rows of the
            other kind are converted where that is possible: pairs become unpaired rows, and unpaired rows of the same
            prompt pairs.
        tokenizer: or the processor that holds it.
        name: the dataset's, in the report.
        options: of `PreferencePreparation`.

    Returns:
        As `prepare_rows`, with the columns `TOKEN_COLUMNS` of its kind and those of `KEPT_COLUMNS` that are there, and
        the report.

    Raises:
        DataError: as `prepare_rows`; or the rows form no table, or no pairs.
    """
    from datasets import Dataset

    check_dataset(dataset, f"{name}_dataset")
    prepare, report = PreferencePreparation(tokenizer, **options), PreferenceReport(name)
    if prepare.kind in layouts.KINDS and not isinstance(dataset, Iterator):
        dataset = layouts.canonical(dataset, prepare.tokenizer, (prepare.kind, *layouts.PAIRED), name)
    if not is_stream(dataset):
        if not isinstance(dataset, Dataset):
            dataset = _from_list([dataset[i] for i in range(len(dataset))], name)
        if prepare.kind == "preference" and prepare.format_of(dataset.column_names, name) != prepare.kind:
            rows = dataset.with_format(None)
            pairs = to_pairs({k: v for k, v in row.items() if not k.startswith("ref_")} for row in rows)
            if not pairs:
                raise DataError(f"{name}: no prompt has a good and a bad completion, so there are no pairs.")
            dataset = _from_list(pairs, name)
    how: dict[str, Any] = {"num_proc": num_proc, "limits": limits, "on_bad_rows": on_bad_rows}
    return prepare_rows(dataset, prepare, report, what="preference", **how), report


def _from_list(rows: list[Any], name: str) -> Any:
    from datasets import Dataset

    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"{name}: row {i} is not a dict but of type {type(row).__name__}")

    def fault(number: int, columns: Collection[str]) -> Exception | None:
        """Arrow's error for these columns of the rows up to `number`: several types, or half of a surrogate pair."""
        try:
            Dataset.from_list([{k: v for k, v in row.items() if k in columns} for row in rows[: number + 1]])
        except (TypeError, ValueError, OverflowError) as error:
            return error
        return None

    try:
        return Dataset.from_list([dict(row) for row in rows])
    except (TypeError, ValueError, OverflowError):
        names = {column for row in rows for column in row}
        number = bisect.bisect_left(range(len(rows)), True, key=lambda number: fault(number, names) is not None)
        said = "; ".join(f"{column}: {error}" for column in rows[number] if (error := fault(number, [column])))
        raise DataError(
            f"{name}: row {number} does not form a table with those before it ({said}). Give each column one "
            "type, and texts of whole characters."
        ) from None
