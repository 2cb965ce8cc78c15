"""Response templates made of official chat templates parse what models of each family write."""

import copy
import json
import os
import types

import pytest
from transformers import AutoTokenizer

from posttrain.rl import add_response_schema, parse_response, supports_tool_calling
from posttrain.rl.tools.protocol import ToolProtocol
from tests import tiny
from tests.rl.tools.test_tool_protocol import ASKED, FAMILIES, QWEN, SCHEMAS, WITHOUT, look, tokenizer

CALL = {"type": "function", "function": {"name": "look", "arguments": {"where": 'x "y"', "far": 2}}}
THINKING = {"thinking": "hm"}, {"reasoning_content": "hm"}


def bare():
    tok = copy.deepcopy(tiny.tokenizer())
    tok.chat_template = None
    return tok


def ids_of(tok, text):
    return tok(text, add_special_tokens=False)["input_ids"]


def asked(tok):
    return ids_of(tok, tok.apply_chat_template(ASKED, tools=SCHEMAS, tokenize=False, add_generation_prompt=True))


def without_ids(message):
    calls = [{key: value for key, value in call.items() if key != "id"} for call in message.get("tool_calls", ())]
    return {key: value for key, value in message.items() if key != "tool_calls"}, calls


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_and_an_answer_are_parsed_as_the_trainers_parse_them(name):
    tok = tokenizer(name)
    ids, prompt = ids_of(tok, FAMILIES[name][0]), asked(tok)
    protocol = ToolProtocol(tok, None, SCHEMAS)
    expected = protocol.read(ids, SCHEMAS, prompt).message
    assert add_response_schema(tok) is tok
    if protocol.form is not None:
        message = parse_response(tok, ids, prompt, [look])
        assert without_ids(message) == without_ids(expected) and without_ids(message)[1] == [CALL]
        for stop in (1, len(ids) // 2, len(ids) - 2):  # one that was cut never raises
            assert parse_response(tok, ids[:stop], prompt, SCHEMAS)["role"] == "assistant"
    check_answers(tok, SCHEMAS)


@pytest.mark.parametrize("name", [name for name in WITHOUT if name != "smolvlm"])
def test_an_answer_is_parsed_under_templates_without_tools(name):
    check_answers(add_response_schema(tokenizer(name)), None)


def check_answers(tok, tools):
    """Answers, with thoughts where the template writes them, are read without the marks around them."""
    begun = tok.apply_chat_template(ASKED, tools=tools, tokenize=False, add_generation_prompt=True)
    found = []
    for more in ({}, *THINKING):
        said = {"role": "assistant", "content": "Twelve.", **more}
        text = tok.apply_chat_template([*ASKED, said], tools=tools, tokenize=False)
        if text.startswith(begun):
            message = parse_response(tok, text[len(begun) :], begun)
            assert message.pop("content") == "Twelve." and message.pop("role") == "assistant"
            assert set(message.values()) == ({"hm"} if "hm" in text[len(begun) :] else set())
            found.append(text)
    assert found or "think" in begun.lower()  # which some write only where there is a thought


def test_contents_that_are_lists_of_parts_alone_are_refused():
    with pytest.raises(ValueError, match="it leaves out what is in {'content'"):
        add_response_schema(tokenizer("smolvlm"))


def test_it_is_saved_with_the_tokenizer_and_read_by_transformers(tmp_path):
    tok = add_response_schema(tokenizer("qwen2_5"))
    tok.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.response_template == json.loads(json.dumps(tok.response_template))
    message = loaded.parse_response("Let me see.\n" + QWEN, prefix="<|im_start|>assistant\n")
    assert message == {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]}


def test_several_calls_are_parsed_in_their_order():
    for name in ("qwen2_5", "qwen3_coder", "glm4moe", "gemma4", "lfm2_v2", "mistral_nemo"):
        tok = add_response_schema(tokenizer(name))
        calls = [
            {"id": f"abcdefgh{i}", "type": "function", "function": {"name": "look", "arguments": {"where": f"a{i}, b"}}}
            for i in range(3)
        ]
        begun = tok.apply_chat_template(ASKED, tools=SCHEMAS, tokenize=False, add_generation_prompt=True)
        text = tok.apply_chat_template(
            [*ASKED, {"role": "assistant", "content": "", "tool_calls": calls}], tools=SCHEMAS, tokenize=False
        )
        start = len(os.path.commonprefix([begun, text]))
        message = parse_response(tok, text[start:], text[:start], SCHEMAS)
        assert [call["function"] for call in message["tool_calls"]] == [call["function"] for call in calls], name


@pytest.mark.parametrize("name", ["qwen3_coder", "glm4moe"])
def test_without_tools_arguments_written_as_texts_are_what_they_read_as(name):
    tok = add_response_schema(tokenizer(name))
    arguments = {"where": "over there", "far": 2, "all": [1, "b"], "sure": True}
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    begun = tok.apply_chat_template(ASKED, tools=SCHEMAS, tokenize=False, add_generation_prompt=True)
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = tok.apply_chat_template([*ASKED, said], tools=SCHEMAS, tokenize=False)
    start = len(os.path.commonprefix([begun, text]))
    assert parse_response(tok, text[start:], text[:start])["tool_calls"] == [call]
    digits = text[start:].replace("over there", "12")
    [read] = parse_response(tok, digits, text[:start], SCHEMAS)["tool_calls"]
    assert read["function"]["arguments"]["where"] == "12"  # where the schema says that it is a text
    [read] = parse_response(tok, text[start:].replace("over there", "1, 2"), text[:start])["tool_calls"]
    assert read["function"]["arguments"]["where"] == "1, 2"


@pytest.mark.parametrize(
    ("read", "key"), [("thinking", "thinking"), ("thinking or message.reasoning_content", "reasoning_content")]
)
def test_a_thought_has_the_name_under_which_the_chat_template_reads_it(read, key):
    source = "{% for message in messages %}<|im_start|>{{ message.role }}\n{% set said = message.READ %}{% if said %}"
    source += "<think>{{ said }}</think>{% endif %}{{ message.content }}<|im_end|>\n{% endfor %}"
    source += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tok = add_response_schema(tiny.tokenizer(chat_template=source.replace("READ", read)))
    message = parse_response(tok, "<think>hm</think>Twelve.<|im_end|>", "<|im_start|>assistant\n")
    assert message == {"role": "assistant", key: "hm", "content": "Twelve."}


def test_arguments_that_are_left_out_are_empty():
    tok = add_response_schema(tokenizer("qwen2_5"))
    text = '<tool_call>\n{"name": "look"}\n</tool_call><|im_end|>'
    [call] = parse_response(tok, text)["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": {}}


def test_what_is_no_call_stays_a_text():
    tok = add_response_schema(tokenizer("qwen3"))
    text = '<tool_call>\n{"name": "look", "arguments": {"far": 2}\n</tool_call>'
    assert parse_response(tok, ids_of(tok, text + "<|im_end|>")) == {"role": "assistant", "content": text}


def test_one_that_is_set_stays_and_one_that_is_missing_is_asked_for():
    tok = tokenizer("qwen2_5")
    with pytest.raises(ValueError, match="no response_template .* call add_response_schema"):
        parse_response(tok, "Hello.")
    tok.response_template = given = {"start_anchor": "x", "fields": {"content": {}}}
    assert add_response_schema(tok).response_template is given
    with pytest.raises(ValueError, match="There is no chat template"):
        add_response_schema(bare())


def test_a_template_that_is_not_parsed_back_is_refused():
    tok = tiny.tokenizer(chat_template="{% for m in messages %}{{ m.content | upper }}\n{% endfor %}>")
    with pytest.raises(ValueError, match="No response template can be made of this chat template"):
        add_response_schema(tok)


def test_a_processors_tokenizer_gets_that_of_the_processors_template():
    tok = tokenizer("qwen2_5")
    processor = types.SimpleNamespace(tokenizer=tok, chat_template=tok.chat_template)
    tok.chat_template = None
    assert add_response_schema(processor) is processor and supports_tool_calling(processor)
    assert parse_response(tok, QWEN, "<|im_start|>assistant\n")["tool_calls"] == [CALL]


def test_templates_say_whether_they_support_tools():
    assert all(supports_tool_calling(tokenizer(name)) for name in ("qwen2_5", "llama3_1", "gptoss", "gemma4"))
    assert not any(supports_tool_calling(tokenizer(name)) for name in WITHOUT)
    assert not supports_tool_calling(bare())
