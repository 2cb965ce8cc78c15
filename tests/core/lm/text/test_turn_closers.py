"""Where a chat template ends no turn of the assistant, the token that opens the next message does."""

from __future__ import annotations

import copy
import itertools

import pytest

from posttrain.core import get_training_chat_template
from posttrain.lm.text import chat_template
from posttrain.sft import SFTConfig
from posttrain.sft.rows import Preparation, preparation_options
from tests import tiny
from tests.core.lm.text.test_chat_templates import FAMILIES, TURNS, template

#: As GLM's: a message lasts until the next one begins, and the answers of tools have a role of their own.
GLM = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}{% else %}<|{{ m.role }}|>\n"
    "{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "find", "arguments": {}}}]}
FOUND = {"role": "tool", "content": "it"}


@pytest.fixture(scope="module")
def tokenizer():
    made = copy.deepcopy(tiny.tokenizer(chat_template=GLM))
    made.add_special_tokens(
        {"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|system|>", "<|observation|>"]}
    )
    return made


def spans_of(tokenizer, messages, source=None):
    kwargs = {"chat_template": source} if source else {}
    text, spans = chat_template.Template(tokenizer, chat_template_kwargs=kwargs).trained_spans(messages)
    return text, [text[start:stop] for start, stop in spans]


@pytest.mark.parametrize("marked", [False, True])
def test_each_turn_is_trained_on_with_the_token_that_opens_the_next_message(tokenizer, marked):
    source = get_training_chat_template(tokenizer) if marked else None
    text, spans = spans_of(tokenizer, [TURNS[1], TURNS[2], TURNS[3], CALL, FOUND, TURNS[4]], source)
    assert spans == ["A one<|user|>", "<tool_call>find</tool_call><|observation|>", "A two<|user|>"]
    assert text == (
        "<|user|>\nQ one<|assistant|>\nA one<|user|>\nQ two<|assistant|>\n<tool_call>find</tool_call><|observation|>\n"
        "it<|assistant|>\nA two<|user|>"
    )
    assert spans_of(tokenizer, [TURNS[1], CALL], source)[1] == ["<tool_call>find</tool_call><|observation|>"]


def test_a_longer_conversation_begins_with_the_marked_shorter_one(tokenizer):
    source = get_training_chat_template(tokenizer)
    plain, made = (chat_template.Template(tokenizer, chat_template_kwargs={"chat_template": t}) for t in (GLM, source))
    shown = [made.render(TURNS[1 : n + 2]) for n in range(4)]
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(shown))
    assert shown[3] == plain.render(TURNS[1:5]) + "<|user|>" and shown[2] == plain.render(TURNS[1:4])
    asked = [t.render(TURNS[1:4], add_generation_prompt=True) for t in (plain, made)]
    assert asked[0] == asked[1]
    words = copy.deepcopy(tokenizer)
    words.chat_template = source
    assert get_training_chat_template(words) is None


def test_they_stop_generation(tokenizer):
    ids = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    assert chat_template.end_tokens(tokenizer) == {tokenizer.eos_token_id, *ids}


@pytest.mark.parametrize(
    ("row", "ends"),
    [
        ({"messages": TURNS[1:3]}, True),
        ({"prompt": TURNS[1:2], "completion": TURNS[2:3]}, True),
        ({"messages": TURNS[1:4]}, True),  # ends in a question
    ],
)
def test_rows_end_in_a_trained_end_token(tokenizer, row, ends):
    options = preparation_options(SFTConfig(output_dir="out", assistant_only_loss="messages" in row))
    (draft,) = Preparation(tokenizer, **options)([row], [0])
    trained = tokenizer.decode(draft.ids[draft.labels != -100])
    assert not draft.fault and draft.ends is ends and trained == "A one<|user|>"


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_that_end_turns_get_no_other_end(family):
    assert chat_template.Template(template(FAMILIES[family]).tokenizer).turn_closers == {}
