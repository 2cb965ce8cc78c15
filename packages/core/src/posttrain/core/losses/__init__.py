"""Losses, and how they are averaged over an accumulation window."""

from posttrain.core.losses.logits import cross_entropy, selective_log_softmax, shift_labels

__all__ = ["cross_entropy", "selective_log_softmax", "shift_labels"]
