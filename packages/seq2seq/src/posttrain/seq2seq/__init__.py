"""Trains models for translation, summarization and other text-to-text tasks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.seq2seq.arguments import Seq2SeqConfig, Seq2SeqTrainingArguments
    from posttrain.seq2seq.collators import PromptTargetCollator
    from posttrain.seq2seq.dataset import tokenize
    from posttrain.seq2seq.metrics import text_metrics
    from posttrain.seq2seq.trainer import Seq2SeqTrainer

_PLACES = {
    "PromptTargetCollator": "collators",
    "Seq2SeqConfig": "arguments",
    "Seq2SeqTrainer": "trainer",
    "Seq2SeqTrainingArguments": "arguments",
    "text_metrics": "metrics",
    "tokenize": "dataset",
}
__all__ = [
    "PromptTargetCollator",
    "Seq2SeqConfig",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "text_metrics",
    "tokenize",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        if name.startswith("__"):
            raise AttributeError(f"module 'posttrain.seq2seq' has no attribute {name!r}")
        from posttrain.compat.absent_names import missing_name

        raise missing_name("posttrain.seq2seq", name, __all__)
    return getattr(importlib.import_module("posttrain.seq2seq." + _PLACES[name]), name)
