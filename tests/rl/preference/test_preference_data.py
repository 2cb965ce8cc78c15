"""Rows of preferences become tokens: what the prompt is, what each completion is, and what is left out is told."""

import datasets
import pytest

from posttrain.core.errors import DataError
from posttrain.lm.text import tokenization
from posttrain.rl.preference.data import prepare_preferences
from posttrain.rl.preference.rows import extract_prompt, to_pairs, to_unpaired
from tests import tiny

TOKENIZER = tiny.tokenizer()
TEXT = {"prompt": "Natalia sold clips", "chosen": " in April.", "rejected": " to James, twice."}
USER = [{"role": "user", "content": "What is 2 + 3?"}]
CHAT = {
    "prompt": USER,
    "chosen": [{"role": "assistant", "content": "5"}],
    "rejected": [{"role": "assistant", "content": "6 or 7"}],
}


def prepare(rows, **options):
    return prepare_preferences(rows, TOKENIZER, **options)


def text_of(ids):
    return TOKENIZER.decode(ids)


def test_a_pair_of_texts_ends_in_eos_and_its_completions_share_the_tokens_of_the_prompt():
    data, report = prepare([TEXT])
    row = data[0]
    assert text_of(row["prompt_ids"]) == TEXT["prompt"]
    assert text_of(row["chosen_ids"]) == TEXT["chosen"] + "<|endoftext|>"
    assert text_of(row["rejected_ids"]) == TEXT["rejected"] + "<|endoftext|>"
    assert (report.rows_in, report.rows_kept, report.dropped) == (1, 1, {})
    assert report.prompt_tokens == len(row["prompt_ids"])
    assert report.completion_tokens == len(row["chosen_ids"]) + len(row["rejected_ids"])


def test_a_conversation_is_rendered_by_the_template_and_nothing_is_added():
    row = prepare([CHAT])[0][0]
    assert text_of(row["prompt_ids"]) == "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(row["chosen_ids"]) == "5<|im_end|>\n"
    assert text_of(row["rejected_ids"]) == "6 or 7<|im_end|>\n"


def test_a_token_never_crosses_from_the_prompt_into_a_completion():
    row = prepare([{"prompt": "She ea", "chosen": "rns $12", "rejected": "ts"}])[0][0]
    assert text_of(row["prompt_ids"]) == "She ea" and text_of(row["chosen_ids"]).startswith("rns")


@pytest.mark.parametrize(
    "implicit",
    [
        {"chosen": USER + CHAT["chosen"], "rejected": USER + CHAT["rejected"]},
        {"prompt": "What is 2 + 3?", "chosen": USER + CHAT["chosen"], "rejected": USER + CHAT["rejected"]},
    ],
    ids=["no prompt", "a text beside conversations"],
)
def test_an_implicit_prompt_is_what_both_conversations_begin_with(implicit):
    assert prepare([implicit])[0][0] == prepare([CHAT])[0][0]


def test_the_implicit_prompt_of_texts_ends_before_the_word_in_which_they_part():
    row = extract_prompt({"chosen": "Q: two? A: four", "rejected": "Q: two? A: five"})
    assert row == {"prompt": "Q: two? A:", "chosen": " four", "rejected": " five"}
    row = extract_prompt({"chosen": "yes it is", "rejected": "yes it"})
    assert row == {"prompt": "yes", "chosen": " it is", "rejected": " it"}


def test_tools_reach_the_template():
    template = "{% for t in tools or [] %}[{{ t['name'] }}]{% endfor %}" + tiny.CHATML
    tokenizer = tiny.tokenizer(chat_template=template)
    row = prepare_preferences([CHAT | {"tools": [{"name": "plus"}]}], tokenizer)[0][0]
    assert tokenizer.decode(row["prompt_ids"]).startswith("[plus]<|im_start|>user")


def test_pairs_whose_calls_the_template_leaves_out_are_dropped_and_named():
    call = {"type": "function", "function": {"name": "plus", "arguments": {"a": 2}}}
    row = CHAT | {"chosen": [{"role": "assistant", "content": "", "tool_calls": [call]}]}
    data, report = prepare([CHAT, row])
    ((reason, found),) = report.dropped.items()
    assert "leaves out tool_calls" in reason and found == (1, [1]) and len(data) == 1
    shows = tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS)
    assert '"plus"' in shows.decode(prepare_preferences([row], shows)[0][0]["chosen_ids"])


def test_equal_and_empty_completions_are_dropped_and_named():
    rows = [TEXT, TEXT | {"rejected": TEXT["chosen"]}, TEXT | {"chosen": " "}, TEXT | {"chosen": None}]
    data, report = prepare(rows)
    assert len(data) == 1 and report.rows_in == 4
    assert report.dropped == {
        "chosen and rejected are equal": (1, [1]),
        "chosen is empty": (1, [2]),
        "chosen is null": (1, [3]),
    }
    assert any("dropped 1: chosen is empty (rows 2)" in line for line in report.lines())


def test_faulty_pairs_are_kept_or_refused_where_that_is_asked_for():
    rows = [TEXT, TEXT | {"rejected": TEXT["chosen"]}]
    data, report = prepare(rows, faulty_rows="keep")
    assert len(data) == 2 and report.kept == {"chosen and rejected are equal": (1, [1])} and report.dropped == {}
    with pytest.raises(DataError, match="Row 1: chosen and rejected are equal. .*faulty_rows"):
        prepare(rows, faulty_rows="error")


TOKENS = {"prompt_ids": [1, 2, 3, 4], "chosen_ids": [5, 6, 7], "rejected_ids": [8]}


def test_long_pairs_are_cut_at_the_end_of_their_completions():
    data, report = prepare([TOKENS], max_length=6)
    assert data[0] == TOKENS | {"chosen_ids": [5, 6]} and report.truncated == 1
    assert prepare([TOKENS], max_length=7)[1].truncated == 0


def test_keeping_the_end_cuts_the_prompt_alike_for_both():
    row = prepare([TOKENS], max_length=5, truncation="keep_end")[0][0]
    assert row == TOKENS | {"prompt_ids": [3, 4]}
    row = prepare([TOKENS], max_length=3, truncation="keep_end")[0][0]
    assert row == {"prompt_ids": [4], "chosen_ids": [6, 7], "rejected_ids": [8]}


def test_a_prompt_that_fills_the_row_is_dropped_and_counted():
    with pytest.raises(DataError, match="the prompt alone fills max_length=4"):
        prepare([TOKENS], max_length=4)
    data, report = prepare([TOKENS, TOKENS | {"prompt_ids": [1]}], max_length=4)
    assert len(data) == 1 and report.dropped == {"the prompt alone fills max_length=4": (1, [0])}


def test_long_pairs_are_dropped_or_refused_where_that_is_asked_for():
    rows = [TOKENS, TOKENS | {"chosen_ids": [5]}]
    assert prepare(rows, max_length=6, long_rows="drop")[1].dropped == {"longer than max_length=6": (1, [0])}
    with pytest.raises(DataError, match="Row 0 has 7 tokens, more than max_length=6. Raise max_length"):
        prepare(rows, max_length=6, long_rows="error")


def test_pairs_cut_to_the_same_tokens_are_at_fault():
    row = TOKENS | {"chosen_ids": [5, 6], "rejected_ids": [5, 7]}
    with pytest.raises(DataError, match="chosen and rejected are equal after truncation"):
        prepare([row], max_length=5)


def test_tokens_that_the_model_does_not_know_are_named():
    with pytest.raises(DataError, match="8.* in row 0"):
        prepare([TOKENS], limits={"input_ids": 8})


def test_columns_that_fit_no_format_are_named():
    with pytest.raises(DataError, match="train: The columns .*question.* fit no format"):
        prepare([{"question": "?", "answer": "!"}])


@pytest.mark.parametrize("kind", ["list", "dataset", "stream", "torch"])
def test_every_kind_of_dataset_gives_the_same_rows(kind):
    import torch

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([TEXT, TEXT | {"chosen": ""}])

    rows = [TEXT, TEXT | {"chosen": ""}]
    given = {
        "list": rows,
        "dataset": datasets.Dataset.from_list(rows),
        "stream": datasets.Dataset.from_list(rows).to_iterable_dataset(),
        "torch": Stream(),
    }[kind]
    data, report = prepare(given)
    assert list(data) == [prepare([TEXT])[0][0]]
    assert (report.rows_in, report.rows_kept) == (2, 1)


def test_pairs_become_unpaired_rows_and_pairs_again():
    unpaired = to_unpaired([TEXT])
    assert unpaired == [
        {"prompt": TEXT["prompt"], "completion": TEXT["chosen"], "label": True},
        {"prompt": TEXT["prompt"], "completion": TEXT["rejected"], "label": False},
    ]
    assert to_pairs(unpaired) == [TEXT]
    assert to_pairs([*unpaired, unpaired[0] | {"completion": "left over"}]) == [TEXT]


def test_each_kind_is_converted_to_the_one_that_is_wanted():
    unpaired, _ = prepare([TEXT], kind="unpaired_preference")
    pair = prepare([TEXT])[0][0]
    assert [row["label"] for row in unpaired] == [True, False]
    assert [row["completion_ids"] for row in unpaired] == [pair["chosen_ids"], pair["rejected_ids"]]
    assert list(prepare(to_unpaired([TEXT]))[0]) == [pair]
    stream = datasets.Dataset.from_list([TEXT]).to_iterable_dataset()
    assert list(prepare(stream, kind="unpaired_preference")[0]) == list(unpaired)


def test_reference_log_probabilities_that_are_there_stay():
    row = TOKENS | {"ref_chosen_logps": -1.5, "ref_rejected_logps": -2.5}
    assert prepare([row])[0][0] == row


def test_rows_prepared_by_an_earlier_reading_of_them_are_not_taken_from_the_cache(monkeypatch):
    data = datasets.Dataset.from_list([TEXT])
    first = prepare(data)[0]._fingerprint
    assert prepare(data)[0]._fingerprint == first
    monkeypatch.setattr(tokenization, "REVISION", tokenization.REVISION + 1)
    assert prepare(data)[0]._fingerprint != first
