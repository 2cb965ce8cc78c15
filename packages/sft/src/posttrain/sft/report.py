"""Counts kept, truncated and dropped rows during preparation and reports them before training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from posttrain.lm.preparation.pipeline import TokenReport

ENOUGH_ENDINGS = 0.5


@dataclass
class DataReport(TokenReport):
    """What became of the rows of a dataset.

    rows_kept: more than were read where rows are split. split: rows cut into several.
    tokens: of the kept rows. trained_tokens: those that the loss predicts.
    eos_share: share of kept rows whose last trained token ends a text or a turn; without it a model does not stop.
    doubled_bos: rows that began with bos twice; one was taken out.
    notes: further remarks, as sentences.
    """

    remedies: ClassVar[Mapping[str, str]] = {
        "after truncation": ": max_length cut off all trained tokens; raise it, or set truncation_mode or too_long",
        "longer than max_length": ": raise max_length, or set too_long=truncate or split",
    }

    split: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    ended: int = 0
    doubled_bos: int = 0
    cut: int = 0

    @property
    def eos_share(self) -> float:
        return self.ended / self.rows_kept if self.rows_kept else 0.0

    @property
    def notes(self) -> list[str]:
        notes = []
        if self.rows_kept and self.eos_share < ENOUGH_ENDINGS:
            notes.append(
                f"Only {self.eos_share:.0%} of the rows end in a trained end-of-sequence token: the model may not "
                "learn to stop. Check eos_token and max_length."
            )
        if self.doubled_bos:
            notes.append(f"{self.doubled_bos:,} rows began with the bos token twice; one of the two was taken out.")
        if self.cut:
            notes.append(
                f"In {self.cut:,} rows a token would have crossed the border between prompt and completion; they "
                "were tokenized separately, as in generation."
            )
        return notes

    def add(self, facts: Mapping[str, np.ndarray], lengths: Mapping[str, np.ndarray]) -> None:
        super().add(facts, lengths)
        self.rows_in += len(np.unique(facts["row"]))
        kept = facts["fault"] == ""
        tokens = lengths["input_ids"][kept]
        self.split += int(facts["split"].sum())
        self.tokens += int(tokens.sum())
        self.longest = max(self.longest, int(tokens.max(initial=0)))
        self.trained_tokens += int(facts["trained"][kept].sum())
        self.ended += int(facts["ends"][kept].sum())
        self.doubled_bos += int(facts["doubled_bos"].sum())
        self.cut += int(facts["cut"].sum())

    def lines(self) -> list[str]:
        """The report as sentences for the log."""
        share = self.trained_tokens / self.tokens if self.tokens else 0.0
        lines = [
            f"{self.name}: {self.rows_in:,} rows read, {self.rows_kept:,} kept, {self.tokens:,} tokens of which "
            f"{self.trained_tokens:,} ({share:.1%}) are trained on; longest {self.longest:,}, "
            f"{self.eos_share:.1%} end in a trained end token"
        ]
        if self.truncated:
            lines.append(f"  truncated to max_length: {self.truncated:,} rows")
        if self.split:
            lines.append(f"  split: {self.split:,} rows")
        return [*lines, *self.lines_of("dropped"), *(f"  note: {note}" for note in self.notes)]

    @property
    def is_wrong(self) -> bool:
        return bool(self.dropped or self.doubled_bos or (self.rows_kept and self.eos_share < ENOUGH_ENDINGS))

    def to_dict(self) -> dict[str, Any]:
        """All numbers, ready for JSON."""
        counts = {key: value for key, value in dataclasses.asdict(self).items() if key not in ("ended", "cut", "_told")}
        return counts | {"eos_share": self.eos_share, "notes": self.notes}
