"""Rows are read as people have them: common columns are recognised, and files of every kind."""

from __future__ import annotations

import csv
import json
from types import SimpleNamespace

import pytest
from datasets import Dataset, IterableDataset

from posttrain.cli.source import DataSource
from posttrain.core.errors import DataError
from posttrain.lm.text import chat_template, layouts

CHATS = SimpleNamespace(chat_template="{{ messages }}")
PLAIN = SimpleNamespace(chat_template=None)
SFT, PAIRS = ("prompt_completion",), ("preference",)


def turn(role, content):
    return {"role": role, "content": content}


@pytest.mark.parametrize(("row", "prompt", "answer"), [
    ({"instruction": "Add.", "input": "2 and 3", "output": "5"}, "Add.\n\n2 and 3", "5"),
    ({"instruction": "Greet.", "input": "", "output": "Hello"}, "Greet.", "Hello"),
    ({"instruction": "Greet.", "output": "Hello", "text": None}, "Greet.", "Hello"),
    ({"question": "2 + 3?", "answer": "5"}, "2 + 3?", "5"),
    ({"query": "2 + 3?", "response": "5"}, "2 + 3?", "5"),
    ({"input": "2 + 3?", "output": "5"}, "2 + 3?", "5"),
    ({"instruction": "Who?", "context": "Ann.", "response": "Ann", "category": "qa"}, "Who?\n\nAnn.", "Ann"),
])  # fmt: skip
def test_common_columns_become_prompt_and_completion(row, prompt, answer):
    row.pop("text", None)
    chat, text = (layouts.canonical([row], tokenizer, SFT)[0] for tokenizer in (CHATS, PLAIN))
    assert (chat["prompt"], chat["completion"]) == ([turn("user", prompt)], [turn("assistant", answer)])
    assert (text["prompt"], text["completion"]) == (prompt + "\n", answer)


def test_pairs_with_a_question_and_a_system_message_keep_both():
    row = {"system": "Be brief.", "question": "Why?", "chosen": "So.", "rejected": "Well, ..."}
    made = layouts.canonical([row], CHATS, PAIRS)[0]
    assert made["prompt"] == [turn("system", "Be brief."), turn("user", "Why?")]
    assert made["chosen"] == [turn("assistant", "So.")] and "question" not in made


def test_prompts_alone_keep_the_answer_for_the_reward():
    made = layouts.canonical([{"question": "2 + 3?", "answer": "#### 5"}], CHATS, ("prompt_only",))
    assert made == [{"answer": "#### 5", "prompt": [turn("user", "2 + 3?")]}]


@pytest.mark.parametrize("make", [Dataset.from_list, lambda rows: IterableDataset.from_generator(lambda: iter(rows))])
def test_datasets_are_mapped_and_keep_their_other_columns(make):
    made = next(iter(layouts.canonical(make([{"question": "a", "answer": "b", "id": 1}]), CHATS, SFT)))
    assert made == {"id": 1, "prompt": [turn("user", "a")], "completion": [turn("assistant", "b")]}


def test_rows_that_trainers_read_stay_as_they_are_and_plain_texts_of_a_chat_model_are_warned_of(caplog):
    rows = [{"prompt": "a", "completion": "b"}]
    assert layouts.canonical(rows, PLAIN, SFT) is rows and not caplog.messages
    for other in ([{"text": "a"}], [{"messages": [turn("user", "a")]}], [{"conversations": []}], [], "name", 3):
        assert layouts.canonical(other, CHATS, SFT) is other and not caplog.messages
    assert layouts.canonical(rows, CHATS, SFT) is rows
    assert "set as_messages: true in the file of the run (--as_messages)" in caplog.text


def test_texts_and_dialogues_can_be_made_messages():
    assert layouts.as_messages([{"prompt": "a", "completion": "b"}])[0]["prompt"] == [turn("user", "a")]
    talk = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant: "
    made = layouts.as_messages([{"chosen": talk + "So.", "rejected": talk + "No."}])[0]
    assert made["chosen"][-1] == turn("assistant", "So.") and len(made["chosen"]) == 4
    assert made["chosen"][:3] == made["rejected"][:3]


def test_an_error_about_columns_names_the_argument_that_works():
    with pytest.raises(DataError, match='--rename_columns \'{"frage": "prompt", "antwort": "completion"}\''):
        chat_template.detect_format(["frage", "antwort"], among=("prompt_completion", "language_modeling"))


def test_every_kind_of_file_is_read(tmp_path):
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    for name, mark in (("csv", ","), ("tsv", "\t")):
        with (tmp_path / f"rows.{name}").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["question", "answer"], delimiter=mark)
            writer.writeheader()
            writer.writerows(rows)
    for name in ("jsonl", "json", "parquet", "csv", "tsv"):
        found, _ = DataSource(dataset_name=str(tmp_path / f"rows.{name}"), as_messages=True).load()
        assert found[2]["prompt"] == [turn("user", "2 + 1?")] and found[2]["completion"][0]["content"] == "3"
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "rows.jsonl").rename(folder / "rows.jsonl")
    assert len(DataSource(dataset_name=str(folder)).load()[0]) == 3


@pytest.mark.parametrize("talk", ["messages", "conversations"])
def test_a_system_prompt_beside_conversations_is_not_lost_in_silence(talk, caplog):
    rows = [{"system": "Be kind.", talk: [turn("user", "Hi"), turn("assistant", "Hello")]}]
    assert layouts.canonical(rows, CHATS, SFT) is rows
    assert "does not read the column 'system'" in caplog.text


def test_conversations_with_their_answers_are_not_offered_as_prompts():
    assert '{"frage": "prompt"}' in layouts.rename_hint(["frage"], ("prompt",))
    assert "the turns before an answer" in layouts.rename_hint(iter(["id", "messages"]), ("prompt",))
