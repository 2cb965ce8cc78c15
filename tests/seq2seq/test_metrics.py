"""Scores of texts, and rows of text that become rows of tokens."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset

from posttrain.core.errors import DataError
from posttrain.core.state import EvalPrediction
from posttrain.seq2seq import text_metrics, tokenize
from tests import tiny

TEXTS = ["Betty is saving money for a new wallet", "Weng earns half of the money"]


def ids(*texts, fill):
    rows = [tiny.tokenizer()(text)["input_ids"] for text in texts]
    longest = max(map(len, rows))
    return np.array([row + [fill] * (longest - len(row)) for row in rows])


def score(names, outputs, references=TEXTS):
    evaluated = EvalPrediction(ids(*outputs, fill=0), ids(*references, fill=-100))
    return text_metrics(tiny.tokenizer(), names)(evaluated)


def test_bleu_and_chrf_are_those_of_sacrebleu():
    sacrebleu = pytest.importorskip("sacrebleu")
    outputs = ["Betty is saving money for a wallet", "Weng earns half the money"]
    found = score(["bleu", "chrf", "ter"], outputs)
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(outputs, [TEXTS]).score)
    assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(outputs, [TEXTS]).score)
    assert 0 < found["bleu"] < 100
    assert score(["bleu", "chrf", "ter"], TEXTS)["bleu"] == pytest.approx(100)
    assert score(["ter"], TEXTS)["ter"] == 0


def test_rouge_counts_common_words():
    pytest.importorskip("rouge_score")
    found = score(["rouge"], ["Betty is saving", "Weng earns half of the money"])
    # the first: 3 of 8 words, all of them right: 2 * 3/8 / (3/8 + 1); of its 7 pairs, 2 of 2
    assert found["rouge1"] == pytest.approx(100 * (2 * 3 / 11 + 1) / 2)
    assert found["rouge2"] == pytest.approx(100 * (2 * 2 / 9 + 1) / 2)
    assert found["rougeL"] == found["rouge1"]


def test_exact_match_and_the_length_of_outputs():
    found = score(["exact_match"], [TEXTS[0] + " ", "no"])
    lengths = [len(tiny.tokenizer()(text)["input_ids"]) for text in (TEXTS[0] + " ", "no")]
    assert found == {"exact_match": 50.0, "gen_len": sum(lengths) / 2}


def test_of_several_outputs_of_a_row_the_first_is_scored():
    outputs = ids(TEXTS[0], "no", TEXTS[1], "no", fill=0)
    evaluated = EvalPrediction(outputs, ids(*TEXTS, fill=-100))
    assert text_metrics(tiny.tokenizer(), ["exact_match"])(evaluated)["exact_match"] == 100


def test_an_unknown_score_is_refused():
    with pytest.raises(ValueError, match="'blue'.*bleu"):
        text_metrics(tiny.tokenizer(), ["blue"])


# ---------------------------------------------------------------------------------------------------- tokenize


def test_texts_become_tokens_of_source_and_target():
    tokenizer = tiny.tokenizer()
    rows = Dataset.from_list([{"en": a, "de": b, "id": 1} for a, b in zip(TEXTS, reversed(TEXTS), strict=True)])
    found = tokenize(rows, tokenizer, "en", "de", prefix="user ", max_target_length=4)
    assert found.column_names == ["input_ids", "attention_mask", "labels"]
    assert found[0]["input_ids"] == tokenizer("user " + TEXTS[0])["input_ids"]
    assert found[0]["labels"] == tokenizer(TEXTS[1])["input_ids"][:4]


def test_a_column_may_hold_texts_by_language():
    rows = Dataset.from_list([{"translation": {"en": TEXTS[0], "de": TEXTS[1]}}])
    found = tokenize(rows, tiny.tokenizer(), "translation.en", "translation.de")
    assert found[0]["labels"] == tiny.tokenizer()(TEXTS[1])["input_ids"]


def test_a_missing_column_and_a_row_without_text_are_named(caplog):
    rows = Dataset.from_list([{"sources": "a", "target": "b"}, {"sources": "a", "target": None}])
    with pytest.raises(DataError, match="no column 'source', did you mean 'sources'"):
        tokenize(rows, tiny.tokenizer())
    with pytest.raises(DataError, match="1 of 2 rows cannot be trained on.*\n.*'target' is null.*rows 1"):
        tokenize(rows, tiny.tokenizer(), "sources", on_bad_rows="raise")
    for given in (rows, rows.to_iterable_dataset()):
        caplog.clear()
        assert len(list(tokenize(given, tiny.tokenizer(), "sources"))) == 1
        assert "'target' is null" in caplog.text
