"""Counts what a model reads: tokens with and without padding, and operations."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from posttrain.core.logging.metrics import FLOPS, TOKENS, Metrics
from posttrain.core.losses import normalization

logger = logging.getLogger(__name__)


class InputCounter:
    """Adds the tokens of micro-batches to metrics, without waiting for the device.

    Args:
        main_input: the column that holds the tokens.
        pad_token_id: marks padding where a batch has no attention mask; None: only the mask does.
        needs_padding: the count without padding is logged (`include_num_input_tokens_seen="non_padding"`). Elsewhere
            only the mask is read, since a search for pad tokens costs one more kernel a micro-batch.
    """

    def __init__(self, main_input: str, pad_token_id: int | None, needs_padding: bool) -> None:
        self.main_input = main_input
        self._pad = pad_token_id if needs_padding else None
        self._needs_mask = needs_padding and self._pad is None

    def add(self, metrics: Metrics, inputs: Mapping[str, Any], operations: int) -> None:
        """Count one micro-batch; `operations` are the floating-point operations of its forward and backward."""
        if self._needs_mask and "attention_mask" not in inputs:
            self._needs_mask = False  # warn once
            logger.warning(
                "include_num_input_tokens_seen='non_padding', but the batches have no attention_mask and there is no "
                "tokenizer with a pad token: padding looks like any token, and all of them are counted."
            )
        metrics.add_sum(TOKENS, *normalization.count_tokens(inputs, self.main_input, self._pad))
        if operations:
            metrics.add_sum(FLOPS, operations, 0)
