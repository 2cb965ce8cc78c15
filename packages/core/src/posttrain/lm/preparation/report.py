"""Counts kept, truncated and dropped rows during preparation and reports them before training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from posttrain.core.data.row_reports import Faults, RowReport


@dataclass
class TokenReport(RowReport):
    """What became of the rows of a dataset that are tokenized.

    truncated: rows cut to the maximum length. longest: tokens of the longest kept row.
    """

    truncated: int = 0
    longest: int = 0

    def add(self, facts: Mapping[str, np.ndarray], lengths: Mapping[str, np.ndarray]) -> None:
        """Count a batch of prepared rows. Subclasses count the rows that were read, of which one may become several.

        Args:
            facts: what is known of each row, by the names in `posttrain.lm.preparation.rows.RowPreparation.facts`.
            lengths: the tokens of each row in each column of tokens, 0 for dropped rows.
        """
        self.rows_kept += int((facts["fault"] == "").sum())
        self.truncated += int(facts["truncated"].sum())
        self.count_reasons(self.dropped, facts["fault"], facts["row"])

    def count_reasons(self, faults: Faults, reasons: np.ndarray, rows: np.ndarray) -> None:
        """Add each of `rows` to those of its reason; "" is none."""
        for reason in dict.fromkeys(reasons[reasons != ""].tolist()):
            self.count(faults, reason, rows[reasons == reason].tolist())
