"""Losses, and how they are averaged over an accumulation window."""

import pkgutil
from typing import TYPE_CHECKING, Any

from posttrain.core.losses.logits import cross_entropy, selective_log_softmax, shift_labels

if TYPE_CHECKING:
    from posttrain.lm.loss.language_modeling import linear_cross_entropy, token_logps

__all__ = ["cross_entropy", "linear_cross_entropy", "selective_log_softmax", "shift_labels", "token_logps"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'posttrain.core.losses' has no attribute {name!r}")
    return pkgutil.resolve_name(f"posttrain.lm.loss.language_modeling:{name}")  # the core imports no language models
