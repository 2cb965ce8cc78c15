"""Trains models for translation, summarization and other text-to-text tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.core import registry

if TYPE_CHECKING:
    from posttrain.seq2seq.arguments import Seq2SeqConfig, Seq2SeqTrainingArguments
    from posttrain.seq2seq.collators import PromptTargetCollator
    from posttrain.seq2seq.dataset import tokenize
    from posttrain.seq2seq.metrics import text_metrics
    from posttrain.seq2seq.trainer import Seq2SeqTrainer

__all__, __getattr__, __dir__ = registry.face(__name__)
