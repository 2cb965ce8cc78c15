"""Losses, and how they are averaged over an accumulation window."""

from posttrain.lm.loss.language_modeling import (
    cross_entropy,
    linear_cross_entropy,
    selective_log_softmax,
    shift_labels,
    token_logps,
)

__all__ = ["cross_entropy", "linear_cross_entropy", "selective_log_softmax", "shift_labels", "token_logps"]
