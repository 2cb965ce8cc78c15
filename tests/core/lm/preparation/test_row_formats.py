"""What scripts for trl call to bring rows into another format."""

import copy

import pytest

from posttrain.core import (
    apply_chat_template,
    is_conversational,
    is_conversational_from_value,
    maybe_apply_chat_template,
    maybe_convert_to_chatml,
    prepare_multimodal_messages,
)
from posttrain.core.errors import DataError
from tests import tiny

ASKED = [{"role": "user", "content": "What color is the sky?"}]
BLUE, GREEN = ([{"role": "assistant", "content": f"It is {color}."}] for color in ("blue", "green"))


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer(chat_template=tiny.CHATML)


def test_messages_become_one_text(tokenizer):
    whole = tokenizer.apply_chat_template(ASKED + BLUE, tokenize=False)
    assert apply_chat_template({"messages": ASKED + BLUE}, tokenizer) == {"text": whole}
    turns = [{"from": "human", "value": ASKED[0]["content"]}, {"from": "gpt", "value": BLUE[0]["content"]}]
    assert maybe_apply_chat_template({"conversations": turns}, tokenizer) == {"text": whole}


@pytest.mark.parametrize("completions", [{"completion": BLUE, "label": True}, {"chosen": BLUE, "rejected": GREEN}])
def test_a_prompt_and_what_follows_it_are_the_conversation(completions, tokenizer):
    row = {"prompt": ASKED} | completions
    before = copy.deepcopy(row)
    made = apply_chat_template(row, tokenizer)
    assert row == before and made.keys() == row.keys() and made.get("label") == row.get("label")
    for name in {"completion", "chosen", "rejected"} & row.keys():
        assert made["prompt"] + made[name] == tokenizer.apply_chat_template(ASKED + row[name], tokenize=False)
    assert made["prompt"] == tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)


def test_a_mark_that_the_template_puts_before_an_answer_stays_in_the_answer_that_has_it():
    words = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    begins = "{% if add_generation_prompt %}{{ 'assistant: <think>' }}{% endif %}"
    tokenizer = tiny.tokenizer(chat_template=words + begins)
    thought = [{"role": "assistant", "content": "<think>sky</think>blue"}]
    made = apply_chat_template({"prompt": ASKED, "chosen": thought, "rejected": GREEN}, tokenizer)
    assert made["chosen"] == "<think>sky</think>blue\n" and made["rejected"] == "It is green.\n"


def test_a_begun_answer_is_continued(tokenizer):
    begun = [*ASKED, {"role": "assistant", "content": "It is"}]
    assert apply_chat_template({"prompt": begun}, tokenizer)["prompt"].endswith("It is")


def test_pairs_without_a_prompt_are_whole_conversations(tokenizer):
    made = apply_chat_template({"chosen": ASKED + BLUE, "rejected": ASKED + GREEN}, tokenizer)
    assert made["rejected"] == tokenizer.apply_chat_template(ASKED + GREEN, tokenize=False)


def test_other_rows_stay_as_they_are_or_are_refused(tokenizer):
    row = {"prompt": "The sky is", "completion": " blue."}
    assert maybe_apply_chat_template(row, tokenizer) is row and not is_conversational(row)
    with pytest.raises(DataError, match="columns text, and none of messages"):
        apply_chat_template({"text": "The sky is blue."}, tokenizer)
    with pytest.raises(DataError, match="the role 'system'; end it with one of user"):
        apply_chat_template({"prompt": [{"role": "system", "content": "Be kind."}]}, tokenizer)


def test_turns_become_messages_and_the_row_is_not_changed():
    row = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "id": 3}
    before = copy.deepcopy(row)
    expected = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert maybe_convert_to_chatml(row) == {"id": 3, "messages": expected} and row == before
    assert is_conversational_from_value(row) and not is_conversational_from_value({"messages": expected})
    assert maybe_convert_to_chatml({"prompt": row["conversations"][:1]}) == {"prompt": expected[:1]}
    assert maybe_convert_to_chatml({"text": "Hi"}) == {"text": "Hi"}


def test_images_come_before_the_first_question_or_where_a_part_waits():
    first, second = object(), object()
    talk = [{"role": "system", "content": "Look."}, *ASKED, *BLUE, *ASKED]
    made = prepare_multimodal_messages(talk, [first, second])
    kinds = [[part["type"] for part in message["content"]] for message in made]
    assert kinds == [["text"], ["image", "image", "text"], ["text"], ["text"]]
    assert [part["image"] for part in made[1]["content"][:2]] == [first, second]
    assert isinstance(talk[1]["content"], str)  # as it was given
    waits = [{"role": "user", "content": [{"type": "text", "text": "Here:"}, {"type": "image"}]}]
    assert prepare_multimodal_messages(waits, [first])[0]["content"][1]["image"] is first
    filled = prepare_multimodal_messages(waits, [first])
    assert prepare_multimodal_messages(filled) == filled
    called = [*ASKED, {"role": "assistant", "tool_calls": [{"type": "function"}]}]
    assert prepare_multimodal_messages(called)[1] == called[1]
    with pytest.raises(DataError, match="2 images, and its messages have places for 1"):
        prepare_multimodal_messages(waits, [first, second])
