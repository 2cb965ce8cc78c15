"""A chat template is made to mark the assistant's turns, and to render history alike in longer conversations."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from posttrain.core import get_training_chat_template
from posttrain.core.errors import DataError
from posttrain.lm.text import chat_template
from tests import tiny
from tests.core.lm.text.test_chat_templates import FAMILIES, GENERATE, MARKED, MISTRAL, TURNS, template

#: As Qwen3's: only the last turn keeps its thought, and has an empty one if it has none.
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n"
    "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}" + GENERATE
)
TALK = TURNS[1:]


def marked(tokenizer, messages, source):
    """The ids, and the mask, that transformers gives for the template."""
    encoded = tokenizer.apply_chat_template(
        messages, chat_template=source, return_dict=True, return_assistant_tokens_mask=True
    )
    return encoded["input_ids"], np.array(encoded["assistant_masks"], dtype=bool)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("mistral", "deepseek", "channels")])
def test_the_marks_are_where_the_trainers_find_the_turns(family):
    tokenizer = template(FAMILIES[family]).tokenizer
    made = get_training_chat_template(tokenizer)
    for messages in (TURNS, TALK, TURNS[:3], TALK[:3]):
        text, spans = chat_template.Template(tokenizer).trained_spans(messages)
        ids, mask, _ = chat_template.encode_texts(tokenizer, [text], [spans])[0]
        theirs, marks = marked(tokenizer, messages, made)
        assert theirs == ids
        assert 0 < marks.sum() < len(ids) and np.array_equal(marks, mask)
    asked = tokenizer.apply_chat_template(TURNS[:4], tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(
        TURNS[:4], chat_template=made, tokenize=False, add_generation_prompt=True
    ) == asked  # fmt: skip


def test_thoughts_of_earlier_turns_stay_so_that_a_longer_conversation_begins_with_the_shorter():
    tokenizer = tiny.tokenizer(chat_template=THINKS)
    talk = [m | {"reasoning_content": "hm"} if m["role"] == "assistant" else m for m in TALK]
    before = [tokenizer.apply_chat_template(talk[:n], tokenize=False) for n in (2, 4)]
    assert not before[1].startswith(before[0])
    tokenizer.chat_template = get_training_chat_template(tokenizer)
    after = [tokenizer.apply_chat_template(talk[:n], tokenize=False) for n in (1, 2, 3, 4)]
    assert after[1] == before[0] and after[3].count("<think>\nhm\n</think>") == 2
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(after))
    text, spans = chat_template.Template(tokenizer).trained_spans(talk)
    assert [text[a:b] for a, b in spans] == [
        f"<think>\nhm\n</think>\n\nA {n}<|im_end|>\n" for n in ("one", "two")
    ]  # fmt: skip


def test_a_template_that_does_both_is_left_alone_and_marks_alone_are_not_enough():
    tokenizer = template(MARKED).tokenizer
    assert get_training_chat_template(tokenizer) is None
    unsteady = THINKS.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    tokenizer.chat_template = unsteady
    tokenizer.chat_template = get_training_chat_template(tokenizer)
    text, spans = chat_template.Template(tokenizer).trained_spans(TALK)
    assert text.count("<think>") == 2 and len(spans) == 2
    assert get_training_chat_template(tokenizer) is None


def test_arguments_of_calls_may_be_dicts_also_where_the_template_adds_them_to_a_text():
    shown = "{% for c in m.tool_calls or [] %}{{ '!' + c.function.name + ' ' + c.function.arguments }}{% endfor %}"
    tokenizer = tiny.tokenizer(chat_template=THINKS.replace("{{ m.content }}", "{{ m.content }}" + shown))

    def turn(*arguments):
        calls = [{"type": "function", "function": {"name": "add", "arguments": one}} for one in arguments]
        return [TALK[0], {"role": "assistant", "content": "A", "tool_calls": calls}]

    made = get_training_chat_template(tokenizer)
    with pytest.raises(TypeError):
        tokenizer.apply_chat_template(turn({"x": 1}), tokenize=False)
    before = tokenizer.apply_chat_template(turn('{"x": 1, "y": "é"}', "{}"), tokenize=False)
    assert '!add {"x": 1, "y": "é"}!add {}<|im_end|>' in before
    for arguments in (({"x": 1, "y": "é"}, {}), ('{"x": 1, "y": "é"}', "{}")):
        assert tokenizer.apply_chat_template(turn(*arguments), chat_template=made, tokenize=False) == before


def test_named_templates_and_processors_are_read():
    tokenizer = tiny.tokenizer()
    source = tokenizer.chat_template
    made = get_training_chat_template(tokenizer)
    tokenizer.chat_template = {"default": source, "tool_use": "other"}
    assert get_training_chat_template(tokenizer) == made

    class Processor:
        chat_template = source

    Processor.tokenizer = tiny.tokenizer(chat_template=None)
    assert get_training_chat_template(Processor()) == made


def test_what_cannot_be_marked_is_refused():
    with pytest.raises(ValueError, match="no chat template to mark"):
        get_training_chat_template(tiny.tokenizer(chat_template=None))
    always_asks = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>"
    with pytest.raises(ValueError, match="renders the messages before message 1 otherwise with its answer"):
        get_training_chat_template(tiny.tokenizer(chat_template=always_asks + "{{ messages | length }}"))
    with pytest.raises(ValueError, match="refuses a question and an answer"):
        get_training_chat_template(tiny.tokenizer(chat_template="{{ messages[0].content }}"))


def test_words_that_move_with_the_last_question_stay_in_each():
    tokenizer = template(MISTRAL).tokenizer
    assert tokenizer.apply_chat_template(TURNS, tokenize=False).count("Be kind.") == 1
    tokenizer.chat_template = get_training_chat_template(tokenizer)
    text, spans = chat_template.Template(tokenizer).trained_spans(TURNS)
    assert text.count("Be kind.\n\nQ one") == text.count("Be kind.\n\nQ two") == 1
    assert [text[a:b].strip() for a, b in spans] == ["A one<|endoftext|>", "A two<|endoftext|>"]


def test_a_question_that_changes_with_its_answer_is_refused():
    tokenizer = template("{{ messages | length if messages[0].role == 'system' }}" + FAMILIES["chatml"]).tokenizer
    tokenizer.chat_template = get_training_chat_template(tokenizer)
    with pytest.raises(DataError, match="renders the messages before message 2 otherwise with its answer"):
        chat_template.Template(tokenizer).render(TURNS)
