"""Metrics of generated texts in percent: BLEU, chrF and TER by sacrebleu, ROUGE by rouge-score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from posttrain.core.errors import require

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def _sacrebleu(name: str) -> Callable[[list[str], list[str]], dict[str, float]]:
    def score(outputs: list[str], references: list[str]) -> dict[str, float]:
        sacrebleu = require("sacrebleu", "posttrain-seq2seq[metrics]", why=f"the metric {name!r}")
        return {name: getattr(sacrebleu, f"corpus_{name}")(outputs, [references]).score}

    return score


def rouge(outputs: list[str], references: list[str]) -> dict[str, float]:
    """F-measures of common words, pairs of words and subsequences (Lin 2004, https://aclanthology.org/W04-1013).

    ``rougeLsum`` compares line by line: put each sentence of a summary on a separate line.
    """
    scorer = require("rouge_score.rouge_scorer", "posttrain-seq2seq[metrics]", why="the metric 'rouge'")
    found = scorer.RougeScorer(ROUGE, use_stemmer=True)
    scores = [found.score(reference, output) for output, reference in zip(outputs, references, strict=True)]
    return {name: 100 * float(np.mean([score[name].fmeasure for score in scores])) for name in ROUGE}


def exact_match(outputs: list[str], references: list[str]) -> dict[str, float]:
    """The share of outputs that are their reference, spaces around them aside."""
    same = [output.strip() == reference.strip() for output, reference in zip(outputs, references, strict=True)]
    return {"exact_match": 100 * float(np.mean(same))}


#: Each takes outputs and references, one of each a row, and gives named scores.
SCORES: dict[str, Callable[[list[str], list[str]], dict[str, float]]] = {
    "bleu": _sacrebleu("bleu"),
    "chrf": _sacrebleu("chrf"),
    "ter": _sacrebleu("ter"),
    "rouge": rouge,
    "exact_match": exact_match,
}


def decode(tokenizer: Any, ids: np.ndarray) -> list[str]:
    """The texts of token ids (rows, T); without negative ids (the padding of labels) and special tokens."""
    return [
        tokenizer.decode(row[row >= 0].tolist(), skip_special_tokens=True).strip()
        for row in np.atleast_2d(np.asarray(ids))
    ]


def text_metrics(tokenizer: Any, names: Sequence[str] = ("bleu", "chrf")) -> Callable[[Any], dict[str, float]]:
    """A `compute_metrics` that scores generated texts against the labels: some of `SCORES`, and ``gen_len``.

    ``gen_len`` is the mean number of tokens of an output, without padding. Of several sequences for one row, the first
    is scored.

    Raises:
        ValueError: there is no score of such a name.
    """
    for name in names:
        if name not in SCORES:
            raise ValueError(f"There is no score {name!r}; there are {', '.join(SCORES)}.")
    pad = tokenizer.pad_token_id

    def compute_metrics(evaluated: Any) -> dict[str, float]:
        ids, labels = evaluated.predictions, evaluated.label_ids
        ids = ids[0] if isinstance(ids, tuple) else ids
        ids = ids[:: max(1, len(ids) // len(labels))]
        outputs, references = decode(tokenizer, ids), decode(tokenizer, labels)
        scores: dict[str, float] = {}
        for name in names:
            scores |= SCORES[name](outputs, references)
        return scores | {"gen_len": float(np.mean(((ids >= 0) & (ids != pad)).sum(1)))}

    return compute_metrics
