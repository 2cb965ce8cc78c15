"""The command that finds repeated rows, and evaluation rows among those trained on."""

from __future__ import annotations

import json

import pytest

from posttrain.cli import main
from posttrain.cli.tools import data
from posttrain.core.errors import DataError

SOLD = "Natalia sold clips to 48 of her friends in April and then she sold half as many clips in May"
OTHER = "A robe takes two bolts of blue fiber and half that much white fiber so how many bolts does it take"
LONG = " ".join(f"word{i}" for i in range(40))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def overlap(train, test, size=None):
    found = data.Overlaps("test", test, size)
    shares = [found.add(f"row {number}", data.words_of(row)) for number, row in enumerate(train)]
    return found, shares


def test_an_evaluation_row_is_found_in_any_format_case_and_punctuation():
    test = [{"question": f"{SOLD}?", "answer": "72"}, {"question": OTHER, "answer": "3"}]
    train = [
        {"messages": [{"role": "user", "content": f"Please: {SOLD.upper()}!"}, {"role": "assistant", "content": "72"}]},
        {"prompt": [{"type": "text", "text": f'"{SOLD}"'}], "completion": "x"},
        {"text": LONG},
    ]
    found, shares = overlap(train, test)
    assert (found.size, shares, found.trained) == (13, [True, True, False], 2)
    report = "\n".join(found.lines())
    assert "1 of 2 rows (50.0%) share 13 words in a row with 2 training rows; 1 of them 70% of their 13-grams" in report
    assert "row 0 and its row 0: natalia sold clips to 48 of her friends in april and then she" in report


@pytest.mark.parametrize(("shared", "is_found"), [(13, True), (12, False)])
def test_an_overlap_is_as_many_words_in_a_row_as_are_asked_for(shared, is_found):
    words = LONG.split()
    row = {"text": " ".join(["before", *words[5 : 5 + shared], "after"])}
    assert overlap([row], [{"text": LONG}], 13)[1] == [is_found]
    report = "\n".join(overlap([row], [{"text": LONG}], 13)[0].lines())
    assert f"{int(is_found)} of 1 rows" in report and "0 of them 70%" in report  # 1 of 28 13-grams


def test_the_length_of_an_n_gram_is_that_of_all_but_a_twentieth_of_the_rows():
    rows = [{"text": " ".join(LONG.split()[:length])} for length in [10] * 10 + [30] * 90]
    assert data.Overlaps("test", rows).size == 10
    assert data.Overlaps("test", [{"text": "two words"}, {"text": LONG}]).size == data.SHORTEST
    assert "not compared: 1 rows of fewer words" in "\n".join(
        data.Overlaps("t", [{"text": "two"}, {"text": LONG}]).lines()
    )


def test_what_many_evaluation_rows_begin_with_tells_none_of_them():
    rows = [{"text": f"{SOLD} {' '.join(f'own{i}x{k}' for k in range(13))}"} for i in range(data.TEMPLATE + 1)]
    found, shares = overlap([{"text": SOLD}, {"text": rows[3]["text"][-150:]}], rows)
    assert shares == [False, True] and found.of_template == len(data.ngrams(data.words_of(SOLD), found.size))
    assert "1 of 11 rows" in found.lines()[0]
    few = rows[: data.TEMPLATE]
    assert overlap([{"text": SOLD}], few)[1] == [True]


def test_a_row_is_repeated_where_most_of_its_n_grams_are_those_of_one_earlier_row():
    rows = [
        {"prompt": LONG},
        {"text": f"  {LONG}\n"},  # the same text under another name
        {"prompt": LONG.replace("word39", "other")},  # 35 of 36 5-grams
        {"prompt": LONG.replace("word10", "other")},  # 31 of 36
        {"prompt": LONG.replace("word10", "x").replace("word20", "y")},  # 26 of 36
        {"prompt": LONG.upper() + " new"},  # 36 of 37
        {"prompt": "7 + 5 = 12"},
        {"prompt": "7 - 5 = 12"},
    ]
    report, kept = data.compare({"train": rows}, {})
    assert kept == [rows[i] for i in (0, 4, 6, 7)]
    assert "1 rows have the texts of an earlier one, 3 have 80%" in report
    assert "train row 1 repeats train row 0" in report


def test_what_every_conversation_begins_with_repeats_none():
    rows = [
        {"messages": [{"role": "system", "content": LONG}, {"role": "user", "content": said}]} for said in (SOLD, OTHER)
    ] + [{"conversations": [{"from": "system", "value": LONG}, {"from": "human", "value": "Something else ."}]}]
    assert data.compare({"train": rows}, {"test": [{"text": LONG}]})[1] == rows


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Crème brûlée", ["creme", "brulee"]),
        ("Cre\u0300me bru\u0302le\u0301e", ["creme", "brulee"]),  # the same, decomposed
        ("ﬁne Ｗｉｄｅ in\u00adside\u200b", ["fine", "wide", "inside"]),
        ("हिन्दी भाषा", ["हनद", "भष"]),  # vowel signs and the virama do not part a word
        ("한국어", ["한국어"]),
    ],
)
def test_a_word_is_the_same_however_it_is_encoded(text, words):
    assert data.words_of({"text": text}) == words


def test_texts_without_spaces_have_a_word_for_each_sign():
    text = "私は猫が好きですがあなたは犬が好きですか"
    assert len(data.words_of({"text": text})) == len(text)
    assert overlap([{"text": f"はい{text}"}], [{"text": text}])[1] == [True]


@pytest.mark.parametrize("from_file", [False, True], ids=["rows", "run.yaml"])
def test_the_command_reports_and_writes_what_is_left(from_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": SOLD, "completion": "72"}, {"prompt": LONG, "completion": "a"}]
    write(tmp_path / "rows.jsonl", [*rows, rows[1], {"prompt": OTHER, "completion": "b"}])
    write(tmp_path / "test.jsonl", [{"question": SOLD, "answer": "72"}])
    write(tmp_path / "mine.jsonl", [{"text": OTHER}])
    (tmp_path / "run.yaml").write_text(
        "method: sft\nmodel_name_or_path: none\ndataset_name: rows.jsonl\neval_dataset_name: mine.jsonl\n"
        "output_dir: out\nlearning_rate: 1e-4\n"
    )
    named = ["run.yaml"] if from_file else ["rows.jsonl"]
    assert main(["data", *named, "--against", "test.jsonl", "--output", "out/clean.jsonl"]) == 0
    out = capsys.readouterr().out
    assert "4 training rows" in out and "against test.jsonl: 1 of 1 rows (100.0%)" in out
    assert ("against the evaluation rows: 1 of 1 rows" in out) == from_file
    left = [json.loads(line) for line in (tmp_path / "out" / "clean.jsonl").read_text().splitlines()]
    assert left == ([rows[1]] if from_file else [rows[1], {"prompt": OTHER, "completion": "b"}])


def test_the_datasets_of_a_mixture_are_compared_with_each_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", [{"text": SOLD}])
    write(tmp_path / "b.jsonl", [{"text": OTHER}, {"text": SOLD}])
    (tmp_path / "run.yaml").write_text("dataset_mixture:\n  a: a.jsonl\n  b: {path: b.jsonl}\n")
    assert main(["data", "run.yaml"]) == 0
    assert "b row 1 repeats a row 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.jsonl"], "none.jsonl"),
        (["rows.jsonl", "--ngram", "0"], "ngram"),
        (["rows.jsonl", "--agains", "rows.jsonl"], "did you mean 'against'"),
        (["rows.jsonl", "--against", "none.jsonl"], "none.jsonl cannot be read"),
        (["--against", "rows.jsonl"], "dataset_name"),
    ],
)
def test_wrong_words_are_said(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", [{"text": SOLD}])
    assert main(["data", *words]) != 0
    assert message in capsys.readouterr().err


def test_no_rows_are_an_error():
    with pytest.raises(DataError, match="no training rows"):
        data.compare({"train": []}, {})
    with pytest.raises(DataError, match="test has no rows"):
        data.compare({"train": [{"text": "a"}]}, {"test": []})
