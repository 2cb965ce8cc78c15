import copy
import json
import logging
import os

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset, load_dataset

from posttrain.core.errors import DataError
from posttrain.lm.text import tokenization
from posttrain.sft.dataset import prepare_dataset
from tests.tiny import CHATML_WITH_TOOLS, CORPUS, tokenizer

EOS = "<|endoftext|>"
CHAT = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "It is 4."}]
CHAT_TEXT = "<|im_start|>user\nTwo and two?<|im_end|>\n<|im_start|>assistant\nIt is 4.<|im_end|>\n"


@pytest.fixture
def tok():
    return tokenizer()


def trained_text(tok, row):
    """What the loss predicts: labels are aligned with the inputs, and nothing predicts the first token."""
    assert all(label in (-100, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))
    return tok.decode([label for label in row["labels"] if label != -100])


def prepare_one(tok, row, **kwargs):
    dataset, report = prepare_dataset([row], tok, **kwargs)
    return dataset[0], report


# What each format is trained on


def test_text_is_trained_on_whole_with_an_eos_at_its_end(tok):
    row, report = prepare_one(tok, {"text": CORPUS[0], "label": 1})
    assert tok.decode(row["input_ids"]) == trained_text(tok, row) == CORPUS[0] + EOS
    assert set(row) == {"input_ids", "labels"}
    assert report.eos_share == 1.0 and report.trained_tokens == report.tokens - 1 == len(row["input_ids"]) - 1


def test_an_eos_that_is_there_is_not_doubled(tok):
    assert prepare_one(tok, {"text": "Two" + EOS})[0]["input_ids"].count(tok.eos_token_id) == 1


def test_the_text_column_and_the_eos_can_be_named(tok):
    row, report = prepare_one(tok, {"body": "Two", "text": "Three"}, text_field="body", eos_token="<|im_end|>")
    assert tok.decode(row["input_ids"]) == "Two<|im_end|>" and report.eos_share == 1.0
    with pytest.raises(ValueError, match="eos_token='<nope>'"):
        prepare_dataset([{"text": "Two"}], tok, eos_token="<nope>")


def test_an_eos_that_is_also_the_pad_token_is_trained_on():
    tok = copy.deepcopy(tokenizer())
    tok.pad_token = tok.eos_token
    row, _ = prepare_one(tok, {"prompt": "Two and two?", "completion": " 4"})
    assert row["labels"][-1] == tok.eos_token_id


def test_only_the_completion_is_trained_on_unless_told_otherwise(tok):
    row = {"prompt": "Two and two?", "completion": " It is 4.", "label": True}
    prepared, _ = prepare_one(tok, row)
    assert trained_text(tok, prepared) == " It is 4." + EOS
    assert tok.decode(prepared["input_ids"]) == "Two and two? It is 4." + EOS
    everything, _ = prepare_one(tok, row, completion_only_loss=False)
    assert everything["labels"] == everything["input_ids"] == prepared["input_ids"]


def test_a_token_across_the_border_of_prompt_and_completion_is_cut_and_counted(tok):
    word = next(word for word in map(tok.decode, range(260, 384)) if len(word) >= 2 and word.isalpha())
    row, report = prepare_one(tok, {"prompt": word[:1], "completion": word[1:]})
    assert trained_text(tok, row) == word[1:] + EOS
    assert row["input_ids"][:1] == tok(word[:1])["input_ids"]  # the prompt's own tokens, as when generating
    assert report.cut == 1 and "border" in report.notes[0]


def test_conversations_are_rendered_by_the_template_and_get_no_second_end(tok):
    for row in ({"messages": CHAT}, {"conversations": [{"from": "human", "value": CHAT[0]["content"]},
                                                       {"from": "gpt", "value": CHAT[1]["content"]}]}):  # fmt: skip
        prepared, report = prepare_one(tok, row)
        assert tok.decode(prepared["input_ids"]) == trained_text(tok, prepared) == CHAT_TEXT
        assert report.eos_share == 1.0  # the turn's end counts, though a line break follows it


def test_assistant_only_loss_trains_on_every_turn_of_the_assistant(tok):
    more = [*CHAT, {"role": "user", "content": "And one more?"}, {"role": "assistant", "content": "5"}]
    prepared, report = prepare_one(tok, {"messages": more}, assistant_only_loss=True)
    assert trained_text(tok, prepared) == "It is 4.<|im_end|>\n5<|im_end|>\n"
    assert report.trained_tokens < report.tokens and report.eos_share == 1.0


def test_conversational_prompts_and_completions(tok):
    row = {"prompt": CHAT[:1], "completion": CHAT[1:]}
    prepared, _ = prepare_one(tok, row)
    assert tok.decode(prepared["input_ids"]) == CHAT_TEXT
    assert trained_text(tok, prepared) == "It is 4.<|im_end|>\n"
    assert prepare_one(tok, row, completion_only_loss=False)[0]["labels"] == prepared["input_ids"]


def test_completion_and_assistant_masks_together_train_on_what_is_in_both(tok):
    completion = [CHAT[1], {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes"}]
    prompt = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, CHAT[0]]
    row = {"prompt": prompt, "completion": completion}
    both, _ = prepare_one(tok, row, assistant_only_loss=True)
    assert trained_text(tok, both) == "It is 4.<|im_end|>\nYes<|im_end|>\n"
    assistant, _ = prepare_one(tok, row, assistant_only_loss=True, completion_only_loss=False)
    assert trained_text(tok, assistant) == "Hello<|im_end|>\nIt is 4.<|im_end|>\nYes<|im_end|>\n"


def test_a_completion_may_go_on_where_the_prompts_assistant_stops(tok):
    prompt = [CHAT[0], {"role": "assistant", "content": "It is"}]
    prepared, _ = prepare_one(tok, {"prompt": prompt, "completion": [{"role": "assistant", "content": " 4."}]})
    assert tok.decode(prepared["input_ids"]) == CHAT_TEXT and trained_text(tok, prepared) == " 4.<|im_end|>\n"


def test_tokens_pass_through_with_their_masks(tok):
    ids = [5, 6, 7, 8]
    assert prepare_one(tok, {"input_ids": ids, "text": "x"})[0] == {"input_ids": ids, "labels": ids}
    own = {"input_ids": ids, "labels": [-100, 6, -100, 8], "completion_mask": [0, 0, 0, 1]}
    assert prepare_one(tok, own)[0]["labels"] == own["labels"]  # labels that are given are the last word
    masks = {"input_ids": ids, "completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 0, 1, 1]}
    assert prepare_one(tok, masks)[0]["labels"] == [-100, -100, 7, 8]
    assert prepare_one(tok, masks, completion_only_loss=False)[0]["labels"] == [5, -100, 7, 8]


def test_a_rows_own_tools_and_template_variables_are_used():
    template = (
        "{% if tools %}{{ tools[0].name }} {% endif %}{{ mood }}:{% for m in messages %}"
        "<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    tok = tokenizer(chat_template=template)
    row = {"messages": CHAT, "tools": '[{"name": "add"}]', "chat_template_kwargs": {"mood": "sad"}}
    prepared, _ = prepare_dataset([row, {"messages": CHAT}], tok, chat_template_kwargs={"mood": "glad"})
    assert tok.decode(prepared[0]["input_ids"]).startswith("add sad:")
    assert tok.decode(prepared[1]["input_ids"]).startswith("glad:")


@pytest.mark.parametrize(
    ("formatting_func", "expected"),
    [
        (lambda row: f"Q {row['q']}", ["Q one", "Q two"]),
        (lambda row: [f"Q {row['q']}", "again"], ["Q one", "again", "Q two", "again"]),
        (lambda rows: [f"Q {rows['q'][i]}" for i in range(len(rows["q"]))], ["Q one", "Q two"]),  # a batch of rows
        (
            lambda row: [{"role": "user", "content": row["q"]}],
            [f"<|im_start|>user\n{q}<|im_end|>\n" for q in ("one", "two")],
        ),
    ],
    ids=["text", "texts", "batch", "messages"],
)
def test_formatting_func_may_return_texts_or_messages(tok, formatting_func, expected):
    rows = [{"q": "one"}, {"q": "two"}]
    for dataset in (rows, Dataset.from_list(rows)):
        prepared, _ = prepare_dataset(dataset, tok, formatting_func=formatting_func)
        assert [tok.decode(ids).removesuffix(EOS) for ids in prepared["input_ids"]] == expected


def test_formatting_func_may_apply_the_chat_template_to_a_batch(tok):
    def of_batch(rows):  # which fails on a row in another way: its messages are dicts
        return [tok.apply_chat_template(messages, tokenize=False) for messages in rows["messages"]]

    prepared, _ = prepare_dataset([{"messages": CHAT}] * 2, tok, formatting_func=of_batch)
    text = tok.apply_chat_template(CHAT, tokenize=False)
    assert [tok.decode(ids).removesuffix(EOS) for ids in prepared["input_ids"]] == [text.removesuffix(EOS)] * 2


def test_bos_is_put_before_texts_once():
    from tokenizers import processors

    tok = copy.deepcopy(tokenizer())
    tok.bos_token = "<|im_start|>"
    tok.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 2)]
    )
    rows = [{"prompt": "Two?", "completion": " 4"}, {"prompt": "<|im_start|>Two?", "completion": " 4"}]
    prepared, report = prepare_dataset(rows, tok)
    assert prepared[0] == prepared[1]
    assert tok.decode(prepared[0]["input_ids"]) == "<|im_start|>Two? 4" + EOS
    assert trained_text(tok, prepared[0]) == " 4" + EOS
    assert report.doubled_bos == 1 and "bos token twice" in report.notes[0]
    assert prepare_one(tok, {"messages": CHAT})[0]["input_ids"].count(2) == 2  # the template's own


# Rows that are too long


def test_rows_are_cut_at_the_end_that_is_asked_for(tok):
    whole = prepare_one(tok, {"text": CORPUS[0]})[0]["input_ids"]
    start, report = prepare_one(tok, {"text": CORPUS[0]}, max_length=8)
    assert start["input_ids"] == whole[:8] and report.truncated == 1 and report.longest == 8
    assert report.eos_share == 0.0 and "may not learn to stop" in report.notes[0]
    assert prepare_one(tok, {"text": CORPUS[0]}, max_length=8, truncation="keep_end")[0]["input_ids"] == whole[-8:]


def test_rows_that_are_too_long_may_be_dropped_split_or_refused(tok):
    rows = [{"text": "Two"}, {"text": CORPUS[0]}]
    whole = prepare_one(tok, rows[1])[0]["input_ids"]
    dropped, report = prepare_dataset(rows, tok, max_length=8, too_long="drop")
    assert len(dropped) == 1 and report.dropped == {"longer than max_length=8": (1, [1])}
    split, report = prepare_dataset(rows, tok, max_length=8, too_long="split")
    pieces = split["input_ids"][1:]
    assert pieces[0] + [token for piece in pieces[1:] for token in piece[1:]] == whole  # each token is predicted once
    assert report.rows_in == 2 and report.rows_kept == len(split) == 1 + -(-(len(whole) - 1) // 7)
    assert report.trained_tokens == len(whole) - 1 + len(split["input_ids"][0]) - 1
    with pytest.raises(DataError, match="Row 1 has .* more than max_length=8"):
        prepare_dataset(rows, tok, max_length=8, too_long="error")
    with pytest.raises(ValueError, match="max_length=1 "):
        prepare_dataset(rows, tok, max_length=1)


def test_rows_left_with_nothing_to_train_on_are_dropped_and_counted(tok):
    rows = [{"prompt": CORPUS[0], "completion": " 4"}, {"prompt": "Two?", "completion": " 4"}]
    prepared, report = prepare_dataset(rows, tok, max_length=10)
    assert len(prepared) == 1 and report.rows_kept == 1
    assert report.dropped == {"nothing to train on is left after truncation": (1, [0])}


# Faults


def test_half_of_a_surrogate_pair_is_named(tok):
    prepared, report = prepare_dataset([{"text": "Two \ud83d"}, {"text": "Two"}], tok)
    [(reason, dropped)] = report.dropped.items()
    assert len(prepared) == 1 and "half of a surrogate pair" in reason and dropped == (1, [0])


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"text": None}, "text is null"),
        ({"text": ""}, "text is empty"),
        ({"text": 3}, "text is not a text but of type int"),
        ({"other": "x"}, "text is null"),
        ("just a string", "the row is not a dict but of type str"),
    ],
)
def test_bad_rows_are_dropped_with_reason_and_index(tok, bad, reason):
    prepared, report = prepare_dataset([{"text": "Two"}, bad, {"text": "Four"}], tok)
    assert [tok.decode(ids) for ids in prepared["input_ids"]] == ["Two" + EOS, "Four" + EOS]
    assert report.dropped == {reason: (1, [1])} and report.rows_in == 3
    assert f"dropped 1: {reason} (rows 1)" in "\n".join(report.lines())


@pytest.mark.parametrize(
    ("good", "bad", "reason"),
    [
        ({"messages": CHAT}, {"messages": []}, "messages is empty"),
        ({"messages": CHAT}, {"messages": None}, "messages is null"),
        ({"prompt": "a", "completion": "b"}, {"prompt": None, "completion": "b"}, "prompt is null"),
        ({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}, "completion is empty"),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, {"prompt": CHAT, "completion": "b"}, "completion is not a list"),
        ({"input_ids": [5, 6]}, {"input_ids": []}, "input_ids is empty"),
        ({"input_ids": [5, 6]}, {"input_ids": None}, "input_ids is not a list of whole numbers"),
        ({"input_ids": [5, 6]}, {"input_ids": [[5], [6, 7]]}, "input_ids is not a list of whole numbers"),
        ({"input_ids": [5, 6]}, {"input_ids": [5, 6], "labels": [5]}, "differ in length"),
        ({"input_ids": [5, 6]}, {"input_ids": [5, 6], "labels": [5, -100]}, "nothing to train on"),
        ({"input_ids": [5, 6]}, {"input_ids": [5]}, "nothing to train on"),
    ],
)
def test_bad_rows_of_every_format_are_dropped_with_the_reason(tok, good, bad, reason):
    prepared, report = prepare_dataset([good, bad], tok)
    assert len(prepared) == 1
    ((found, where),) = report.dropped.items()
    assert reason in found and where == (1, [1])


TOOL_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ASKS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]}]


@pytest.mark.parametrize("row", [
    {"messages": ASKS}, {"prompt": ASKS[:1], "completion": ASKS[1:]},
    {"messages": [*ASKS, {"role": "tool", "content": "2"}, {"role": "assistant", "content": "Two."}]},
])  # fmt: skip
@pytest.mark.parametrize("assistant_only", [False, True])
def test_rows_whose_calls_the_template_leaves_out_are_dropped_and_counted(tok, row, assistant_only):
    fine = {key: [m | {"tool_calls": None, "content": "x"} for m in value] for key, value in row.items()}
    rows, report = prepare_dataset([fine, row, fine, row], tok, assistant_only_loss=assistant_only)
    ((reason, found),) = report.dropped.items()
    assert found == (2, [1, 3]) and len(rows) == report.rows_kept == 2
    assert reason.startswith("the chat template of") and "leaves out tool_calls" in reason
    shows = tokenizer(chat_template=CHATML_WITH_TOOLS)
    rows, report = prepare_dataset([fine, row], shows, assistant_only_loss=assistant_only)
    assert not report.dropped and '"name": "add"' in shows.decode(rows[1]["input_ids"])


@pytest.mark.parametrize("assistant_only", [False, True])
def test_calls_with_arguments_as_json_text_are_learned_as_those_with_a_dict(assistant_only):
    def row(arguments):
        call = TOOL_CALL | {"function": {"name": "add", "arguments": arguments}}
        return {"messages": [ASKS[0], ASKS[1] | {"tool_calls": [call]}]}

    tok = tokenizer(chat_template=CHATML_WITH_TOOLS)
    rows = [row('{"a":1}'), row('{"a": 1'), row('{"a": 1}')]
    prepared, report = prepare_dataset(rows, tok, assistant_only_loss=assistant_only)
    (reason,) = report.dropped
    assert "arguments" in reason and "not valid JSON" in reason and report.dropped[reason] == (1, [1])
    wanted, _ = prepare_dataset([row({"a": 1})] * 2, tok, assistant_only_loss=assistant_only)
    assert prepared["input_ids"] == wanted["input_ids"] and prepared["labels"] == wanted["labels"]
    assert '"arguments": {"a": 1}' in tok.decode(prepared["input_ids"][0])


def test_calls_in_turns_that_are_not_learned_need_not_be_shown(tok):
    row = {
        "prompt": [*ASKS, {"role": "tool", "content": "2"}],
        "completion": [{"role": "assistant", "content": "Two."}],
    }
    assert not prepare_dataset([row], tok)[1].dropped


def test_a_dataset_without_a_row_to_train_on_is_refused_with_the_reasons(tok):
    with pytest.raises(DataError, match=r"(?s)no row can be trained on.*dropped 2: text is null \(rows 0, 1\)"):
        prepare_dataset([{"text": None}] * 2, tok)
    with pytest.raises(
        DataError, match=r"for example: \{'prompt': 'Hi', 'completion': 'x+ \.\.\. \(1,034 characters\)"
    ):
        prepare_dataset([{"prompt": "Hi", "completion": "x" * 1000}], tok, max_length=4, too_long="drop")
    with pytest.raises(DataError, match="no rows"):
        prepare_dataset([], tok)
    with pytest.raises(DataError, match="needs conversations, and the row is a text"):
        prepare_dataset([{"text": "Two"}], tok, assistant_only_loss=True)


def test_columns_that_fit_no_format_are_named(tok):
    for dataset in ([{"question": "a"}], Dataset.from_list([{"question": "a"}])):
        with pytest.raises(DataError, match=r"\['question'\].*completion and prompt; .*dataset_text_field"):
            prepare_dataset(dataset, tok)
    with pytest.raises(DataError, match="completion_only_loss=True needs the columns prompt and completion"):
        prepare_dataset([{"text": "a"}], tok, completion_only_loss=True)
    with pytest.raises(DataError, match="packed already"):
        prepare_dataset([{"input_ids": [5, 6], "seq_lengths": [1, 1]}], tok)


def test_conversations_need_a_chat_template():
    with pytest.raises(DataError, match="no chat template"):
        prepare_dataset([{"messages": CHAT}], tokenizer(chat_template=None))


def test_what_is_no_dataset_is_refused(tok):
    with pytest.raises(TypeError, match=r"`train_dataset` must be a `Dataset`.* a dict of datasets \(train\)"):
        prepare_dataset(DatasetDict(train=Dataset.from_list([{"text": "a"}])), tok)
    for dataset in ("openai/gsm8k", 5, (row for row in ({"text": "a"},))):
        with pytest.raises(TypeError, match="train_dataset is "):
            prepare_dataset(dataset, tok)
    lazy = Dataset.from_list([{"text": "a"}]).with_transform(lambda batch: batch)
    with pytest.raises(DataError, match="skip_prepare_dataset"):
        prepare_dataset(lazy, tok)


@pytest.mark.parametrize("column", ["input_ids", "labels"])
@pytest.mark.parametrize("token", [384, -1])
def test_a_token_that_the_model_does_not_know_is_named_with_its_row(tok, column, token):
    rows = [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
        {"input_ids": []},
        {"input_ids": [5, 6], "labels": [5, 6]},
    ]
    limits = {"input_ids": 384, "labels": 384}
    prepare_dataset(rows, tok, limits=limits)
    rows[2] = rows[2] | {column: [5, token]}
    for dataset in (rows, Dataset.from_list([rows[0], rows[2]])):
        row = len(dataset) - 1
        with pytest.raises(DataError, match=rf"train: {column} holds {token} in row {row}, .* range is 0 to 383"):
            prepare_dataset(dataset, tok, limits=limits)
    stream, _ = prepare_dataset(Dataset.from_list([rows[0], rows[2]]).to_iterable_dataset(), tok, limits=limits)
    with pytest.raises(DataError, match=f"{column} holds {token} in row 1"):
        list(stream)


def test_a_number_beyond_32_bits_is_no_token(tok):
    prepared, report = prepare_dataset([{"input_ids": [5, 2**32 + 6]}, {"input_ids": [5, 6]}], tok)
    assert prepared["input_ids"] == [[5, 6]]
    assert list(report.dropped.values()) == [(1, [0])]


def test_an_error_in_formatting_func_names_the_function_and_the_row(tok):
    def by_question(row):
        return row["question"]

    with pytest.raises(DataError, match=r"by_question failed on row 0 \(KeyError: 'question'\).*columns text"):
        prepare_dataset([{"text": "a"}], tok, formatting_func=by_question)


def test_dropped_rows_are_a_warning_before_training(tok, caplog):
    rows = [{"text": "Two"}, {"text": None}]
    with caplog.at_level(logging.INFO, "posttrain"):
        prepare_dataset(rows, tok)[1].log(logging.getLogger("posttrain"))
        (record,) = caplog.records
        assert record.levelno == logging.WARNING and "dropped 1: text is null (rows 1)" in record.getMessage()
        caplog.clear()
        list(prepare_dataset(Dataset.from_list(rows * 600).to_iterable_dataset(), tok)[0])
        assert [record.levelno for record in caplog.records] == [logging.WARNING]  # once, not once a batch


def test_a_short_stream_without_a_row_to_train_on_is_refused(tok):
    stream, _ = prepare_dataset(Dataset.from_list([{"text": None}] * 3).to_iterable_dataset(), tok)
    with pytest.raises(DataError, match=r"(?s)no row can be trained on.*dropped 3: text is null"):
        list(stream)


# Kinds of datasets


class TorchDataset(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class TorchStream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def as_generator(rows):
    def generate():
        yield from rows

    return generate


def test_every_kind_of_dataset_gives_the_same_rows_and_report(tok):
    rows = [{"text": text, "label": 1} for text in CORPUS * 60] + [{"text": None, "label": 1}]
    expected, report = prepare_dataset(rows, tok, max_length=24)
    assert isinstance(expected, Dataset) and report.rows_kept == len(CORPUS) * 60
    kinds = {
        "datasets": Dataset.from_list(rows),
        "formatted": Dataset.from_list(rows).with_format("numpy"),
        "torch": TorchDataset(rows),
        "stream": Dataset.from_list(rows).to_iterable_dataset(),
        "generator": IterableDataset.from_generator(as_generator(rows)),
        "torch stream": TorchStream(rows),
    }
    for name, dataset in kinds.items():
        prepared, own = prepare_dataset(dataset, tok, max_length=24)
        assert list(prepared) == list(expected), name
        assert own == report, name


def test_a_streams_report_counts_one_pass(tok):
    stream, report = prepare_dataset(Dataset.from_list([{"text": "Two"}] * 5).to_iterable_dataset(), tok)
    assert report.rows_in == 0
    for _ in range(2):
        assert len(list(stream)) == report.rows_in == 5


def test_a_stream_may_gain_a_column_and_drop_a_row_in_one_batch(tok):
    rows = [{"text": "Two"}, {"text": "Four", "source": "b"}, {"text": None, "source": "c"}]
    prepared, report = prepare_dataset(IterableDataset.from_generator(as_generator(rows)), tok)
    expected, _ = prepare_dataset([{"text": "Two"}, {"text": "Four"}], tok)
    assert [row["input_ids"] for row in prepared] == expected["input_ids"]
    assert report.dropped == {"text is null": (1, [2])}


def test_several_processes_give_the_same_rows(tok):
    dataset = Dataset.from_list([{"text": text} for text in CORPUS])
    one, two = (prepare_dataset(dataset, tok, num_proc=processes)[0] for processes in (None, 2))
    assert list(one) == list(two)


def test_a_dataset_on_disk_is_prepared_once_per_content(tok, tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in [*CORPUS, ""]))
    dataset = load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path), split="train")
    calls = []

    def files(**kwargs):
        prepared, report = prepare_dataset(dataset, kwargs.pop("tok", tok), **kwargs)
        calls.append((list(prepared), report))
        return [os.path.basename(file["filename"]) for file in prepared.cache_files]

    first = files()
    assert len(first) == 1 and files() == first
    assert calls[0] == calls[1] and calls[0][1].dropped  # the report survives the cache
    assert files(tok=copy.deepcopy(tok)) == first  # the same content in another object
    assert files(max_length=8) != first
    other = copy.deepcopy(tok)
    other.add_tokens(["Natalia"])
    assert files(tok=other) != first
    monkeypatch.setattr(tokenization, "REVISION", tokenization.REVISION + 1)  # by an upgrade that reads rows otherwise
    assert files() != first


# The report


def test_the_report_adds_up(tok):
    rows = [
        {"prompt": "Two?", "completion": " 4"},
        {"prompt": CORPUS[0], "completion": " 8"},
        {"prompt": "x", "completion": None},
    ]
    prepared, report = prepare_dataset(rows, tok, name="eval")
    assert report.tokens == sum(len(ids) for ids in prepared["input_ids"])
    assert report.trained_tokens == sum(label != -100 for labels in prepared["labels"] for label in labels)
    assert report.longest == max(len(ids) for ids in prepared["input_ids"])
    assert report.lines()[0].startswith("eval: 3 rows read, 2 kept")
    numbers = json.loads(json.dumps(report.to_dict()))
    assert numbers["eos_share"] == 1.0 and numbers["dropped"] == {"completion is null": [1, [2]]}
    assert not any(name.startswith("_") for name in numbers)


@pytest.mark.skipif("POSTTRAIN_DATA" not in os.environ, reason="POSTTRAIN_DATA does not name a folder of real data")
def test_real_problems_are_prepared_without_losses(tok):
    with open(os.path.join(os.environ["POSTTRAIN_DATA"], "gsm8k", "test.jsonl")) as file:
        rows = [json.loads(line) for line in file]
    pairs = [{"prompt": row["question"] + "\n", "completion": row["answer"]} for row in rows]
    prepared, report = prepare_dataset(pairs, tok)
    assert report.rows_kept == len(rows) and report.eos_share == 1.0
    for row, pair in zip(prepared, pairs, strict=True):
        assert tok.decode(row["input_ids"]) == pair["prompt"] + pair["completion"] + EOS
        assert trained_text(tok, row) == pair["completion"] + EOS
