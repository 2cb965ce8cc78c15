"""The arguments of sequence-to-sequence training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from posttrain.core.arguments import TrainingArguments
from posttrain.core.config import opt
from posttrain.lm.generate.generate import GenerationArguments

METRICS = ("bleu", "chrf", "ter", "rouge", "exact_match")


@dataclass
class Seq2SeqTrainingArguments(GenerationArguments, TrainingArguments):
    """Arguments of `Seq2SeqTrainer`: those of every trainer, and how evaluations generate."""

    sortish_sampler: bool = opt(
        False, "Train on batches of rows of similar length, as train_sampling_strategy='group_by_length' does."
    )

    def _normalize(self) -> None:
        if self.sortish_sampler and self.train_sampling_strategy == "random":
            self.train_sampling_strategy = "group_by_length"


@dataclass
class Seq2SeqConfig(Seq2SeqTrainingArguments):
    """Arguments of ``posttrain seq2seq``: also which columns of text are read, and how outputs are scored."""

    predict_with_generate: bool = opt(
        True, "Let evaluations generate, and score the texts by `text_metrics`; off computes the loss alone."
    )
    source_column: str = opt("source", "Column with the text that is read.")
    target_column: str = opt("target", "Column with the target text.")
    source_prefix: str = opt("", "Put before every source, e.g. 'summarize: ' for a pretrained T5.")
    max_source_length: int = opt(1024, "Maximum tokens of a source; longer ones are truncated at the end.", min=2)
    max_target_length: int = opt(128, "Maximum tokens of a target; longer ones are truncated at the end.", min=2)
    text_metrics: list[str] = opt(["bleu", "chrf"], f"Scores of generated texts: some of {', '.join(METRICS)}.")

    def _problems(self) -> Iterator[str]:
        for name in self.text_metrics:
            if name not in METRICS:
                yield f"text_metrics holds {name!r}; it may hold {', '.join(METRICS)}"
        if self.source_column == self.target_column:
            yield f"source_column and target_column are both {self.source_column!r}; name two columns"
