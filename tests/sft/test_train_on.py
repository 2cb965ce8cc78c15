"""What of a row is trained on, and what becomes of rows that are too long: from the arguments to the labels."""

import copy

import pytest
from datasets import Dataset

from posttrain.core.errors import ConfigError, DataError
from posttrain.sft import SFTConfig, SFTTrainer
from posttrain.sft.collators import SFTCollator
from posttrain.sft.dataset import prepare_dataset
from tests.tiny import CORPUS, causal_lm, tokenizer

MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Q one"},
    {"role": "assistant", "content": "A one"},
    {"role": "user", "content": "Q two"},
    {"role": "assistant", "content": "A two"},
]


def flagged(**flags):
    """The conversation with a flag on its third message."""
    return [message | (flags if i == 2 else {}) for i, message in enumerate(MESSAGES)]


def trained(row, **options):
    tok = tokenizer()
    dataset, _ = prepare_dataset([row], tok, **options)
    return tok.decode([label for label in dataset[0]["labels"] if label != -100])


def trainer(tmp_path, rows, tok=None, **options):
    args = SFTConfig(str(tmp_path), report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True, **options)
    return SFTTrainer(causal_lm(), args, train_dataset=rows, processing_class=tok or tokenizer())


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        ("assistant", "A one<|im_end|>\nA two<|im_end|>\n"),
        ("last", "A two<|im_end|>\n"),
        ("user", "Q one<|im_end|>\nQ two<|im_end|>\n"),
        (["system", "assistant"], "Be kind.<|im_end|>\nA one<|im_end|>\nA two<|im_end|>\n"),
    ],
)
def test_the_messages_of_the_roles_that_are_named_are_trained_on(train_on, expected):
    assert trained({"messages": MESSAGES}, train_on=train_on) == expected


def test_a_list_of_one_is_that_one():
    assert SFTConfig("out", train_on=["last"]).train_on == "last"
    assert SFTConfig("out", train_on=["assistant"], assistant_only_loss=True).train_on == "assistant"


def test_all_trains_on_all_that_is_rendered():
    assert trained({"messages": MESSAGES}, train_on="all") == trained({"messages": MESSAGES})
    assert trained({"messages": MESSAGES}).startswith("<|im_start|>system\nBe kind.")


@pytest.mark.parametrize("flags", [{"train": False}, {"weight": 0}])
def test_a_message_can_be_left_out_by_its_flag(flags):
    rows = [{"messages": flagged(**flags)}, {"messages": MESSAGES}]
    assert trained(rows[0]) == trained(rows[0], train_on="assistant") == "A two<|im_end|>\n"
    tok = tokenizer()
    prepared, _ = prepare_dataset(Dataset.from_list(rows), tok)  # where one row has flags, Arrow gives all rows the key
    texts = [tok.decode([label for label in row["labels"] if label != -100]) for row in prepared]
    assert texts == ["A two<|im_end|>\n", "A one<|im_end|>\nA two<|im_end|>\n"]


def test_a_message_can_be_taken_in_by_its_flag():
    row = {"messages": [message | {"train": message["content"] == "Q one"} for message in MESSAGES]}
    assert trained(row, train_on="assistant") == "Q one<|im_end|>\n"


def test_completions_and_roles_train_on_what_is_in_both():
    row = {"prompt": MESSAGES[:3], "completion": [*MESSAGES[3:], {"role": "user", "content": "Bye"}]}
    assert trained(row, train_on="assistant") == "A two<|im_end|>\n"
    assert trained(row, train_on="user") == "Q two<|im_end|>\nBye<|im_end|>\n"
    assert trained(row, train_on="user", completion_only_loss=False).startswith("Q one<|im_end|>\nQ two")
    goes_on = {"prompt": [*MESSAGES[1:2], {"role": "assistant", "content": "A"}],
               "completion": [{"role": "assistant", "content": " one", "train": True}]}  # fmt: skip
    assert trained(goes_on) == trained(goes_on, train_on="user") == " one<|im_end|>\n"


def test_rows_in_which_nothing_is_chosen_are_dropped_with_the_reason():
    tok = tokenizer()
    rows = [{"messages": MESSAGES}, {"messages": MESSAGES[:2]}, {"messages": flagged(weight=0.5)}]
    prepared, report = prepare_dataset(rows, tok, train_on="assistant")
    assert len(prepared) == 1
    assert report.dropped == {
        "nothing to train on": (1, [1]),
        "the weight of a message is neither true nor false (1 nor 0)": (1, [2]),
    }
    with pytest.raises(DataError, match="train_on='user' needs conversations, and the row is a text"):
        prepare_dataset([{"text": "Two"}], tok, train_on="user")


def test_the_arguments_reach_the_data(tmp_path):
    template = "{{ mood }}: " + tokenizer().chat_template
    rows = [{"messages": MESSAGES}, {"messages": MESSAGES + MESSAGES[1:] * 4}]
    options = {"train_on": "last", "chat_template_kwargs": {"mood": "glad"}, "max_length": 64, "too_long": "drop"}
    tok = tokenizer(chat_template=template)
    made = trainer(tmp_path, rows, tok, **options)
    assert made.data_reports["train"].dropped == {"longer than max_length=64": (1, [1])}
    assert str(made.data_reports["train"]).startswith("train: ")
    row = made.train_dataset[0]
    assert tok.decode(row["input_ids"]).startswith("glad: <|im_start|>system")
    assert tok.decode([label for label in row["labels"] if label != -100]) == "A two<|im_end|>\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_on": "user", "assistant_only_loss": True}, "contradict each other"),
        ({"train_on": ["last", "user"]}, "last and all stand alone"),
        ({"train_on": []}, "must name roles"),
        ({"too_long": "crop"}, "too_long='crop' is not one of truncate, drop, split, error"),
        ({"too_long": "drop", "packing": True, "packing_strategy": "wrapped"},
        "set packing_strategy=bfd or too_long=split"),
        ({"chat_template_kwargs": "mood"}, "chat_template_kwargs='mood' is not a JSON object"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_work_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        SFTConfig("out", **options)


@pytest.mark.parametrize("packing", [False, True])
def test_rows_that_are_split_are_trained_on_token_by_token(tmp_path, packing):
    rows = [{"text": text} for text in CORPUS]
    whole = trainer(tmp_path, rows, max_length=None).data_reports["train"]
    made = trainer(tmp_path, rows, max_length=16, too_long="split", packing=packing)
    report = made.data_reports["train"]
    assert report.trained_tokens == whole.trained_tokens and report.split == len(CORPUS) and report.truncated == 0
    assert report.longest == 16 and "split: 5 rows" in "\n".join(report.lines()) and report.to_dict()["split"] == 5
    assert sum(label != -100 for row in made.train_dataset for label in row["labels"][1:]) == whole.trained_tokens


def test_what_is_counted_of_a_row_is_counted_once_where_it_is_split():
    tok = copy.deepcopy(tokenizer())
    tok.bos_token = "<|im_start|>"
    row = {"messages": [{"role": "user", "content": CORPUS[0]}]}
    tok.chat_template = "{{ bos_token }}" + tok.chat_template  # which begins with the same token
    _, report = prepare_dataset([row], tok, max_length=8, too_long="split")
    assert report.rows_kept > 3 and report.doubled_bos == 1 and report.split == 1


def test_pieces_without_a_trained_token_are_left_out_and_said_to_be_pieces():
    row = {"prompt": CORPUS[0], "completion": " 48"}
    prepared, report = prepare_dataset([row], tokenizer(), max_length=16, too_long="split")
    (reason, (count, rows)) = next(iter(report.dropped.items()))
    assert reason == "nothing to train on in a piece of a row that was split" and rows[0] == 0
    assert (
        count + len(prepared) == -(-(len(tokenizer()(CORPUS[0] + " 48")["input_ids"])) // 15)
        and report.eos_share == 1.0
    )


def test_padding_is_told_by_position_and_never_by_its_token():
    tok = copy.deepcopy(tokenizer())
    tok.pad_token = tok.eos_token
    prepared, _ = prepare_dataset([{"text": "Two"}, {"text": CORPUS[0]}], tok)
    for padding_free in (False, True):
        batch = SFTCollator(tok.pad_token_id, padding_free=padding_free)(list(prepared))
        labels = batch["labels"][batch["labels"] != -100].tolist()
        assert labels.count(tok.eos_token_id) == 2  # the end of each row, and none of the padding
        assert len(labels) == sum(len(row["input_ids"]) for row in prepared) - 2 * padding_free
