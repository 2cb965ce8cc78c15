"""Calls of tools and their answers under the official chat templates of each family."""

import copy
import json
import os
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from posttrain.rl.agents.environments import Environments
from posttrain.rl.online.reporting import plain_text
from posttrain.rl.rewards.functions import accuracy_reward, think_format_reward
from posttrain.rl.samples.prompts import PromptCodec
from posttrain.rl.samples.samples import Sample
from posttrain.rl.tools.formats import Call
from tests import tiny
from tests.rl.agents import conversations

HERE = Path(__file__).parent / "templates"
UNCUT = {"turns": 0, "tokens": 0, "seconds": 0}
TRL = Path(find_spec("trl").origin).parent / "chat_templates" if find_spec("trl") else None
CHATML_END, OF_USER = "<|im_end|>", "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response>"
QWEN = '<tool_call>\n{"name": "look", "arguments": {"where": "x \\"y\\"", "far": 2}}\n</tool_call><|im_end|>'
XML = (
    '<tool_call>\n<function=look>\n<parameter=where>\nx "y"\n</parameter>\n<parameter=far>\n2\n</parameter>\n'
    "</function>\n</tool_call><|im_end|>"
)
GEMMA = '<|tool_call>call:look{far:2,where:<|"|>x "y"<|"|>}<tool_call|>'
LLAMA = '{"name": "look", "parameters": {"where": "x \\"y\\"", "far": 2}}<|eot_id|>'
LLAMA_TAIL = (
    '<|start_header_id|>ipython<|end_header_id|>\n\n"{}"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
)
HARMONY_TAIL = '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"{}"<|end|><|start|>assistant'
GEMMA_TAIL = 'response:look{{value:<|"|>{}<|"|>}}<tool_response|>'
GLM = (
    '\n<think></think>\n<tool_call>look\n<arg_key>where</arg_key>\n<arg_value>x "y"</arg_value>\n'
    "<arg_key>far</arg_key>\n<arg_value>2</arg_value>\n</tool_call><|observation|>"
)
#: Family -> what the policy writes, with the token that ends its turn, and what the template puts behind it, around the
#: answer.
FAMILIES = {
    "qwen2_5": (QWEN, OF_USER + "<|im_end|>\n<|im_start|>assistant\n"),
    "qwen3": (QWEN, OF_USER + "<|im_end|>\n<|im_start|>assistant\n"),
    "qwen3_instruct_2507": (QWEN, OF_USER + "<|im_end|>\n<|im_start|>assistant\n"),
    "qwen3_5_nothink": (XML, OF_USER + "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    "qwen3_5_think": ("hm\n</think>\n\n" + XML, OF_USER + "<|im_end|>\n<|im_start|>assistant\n<think>\n"),
    "qwen3_6": ("hm\n</think>\n\n" + XML, OF_USER + "<|im_end|>\n<|im_start|>assistant\n<think>\n"),
    "qwen3_coder": (XML, OF_USER + "\n<|im_end|>\n<|im_start|>assistant\n"),
    "nemotron_3_nano": ("hm</think>\n" + XML, OF_USER + "\n<|im_end|>\n<|im_start|>assistant\n<think>\n"),
    "hermes_2_pro": (
        QWEN,
        "\n<|im_start|>tool\n<tool_response>\n{}\n</tool_response><|im_end|><|im_start|>assistant\n",
    ),
    "llama3_1": (LLAMA, LLAMA_TAIL),
    "llama3_2": (LLAMA, LLAMA_TAIL),
    "gptoss": (
        ' to=functions.look<|channel|>commentary json<|message|>{"where": "x \\"y\\"", "far": 2}<|call|>',
        HARMONY_TAIL,
    ),
    "gemma4": (GEMMA + "<|tool_response>", GEMMA_TAIL),
    "gemma4_v5": (GEMMA + "<|tool_response>", GEMMA_TAIL),
    "gemma4_v2": (GEMMA + "<turn|>", "\n<|turn>tool\n{}<turn|>\n<|turn>model\n"),
    "mistral_nemo": (
        '[TOOL_CALLS][{"name": "look", "arguments": {"where": "x \\"y\\"", "far": 2}, "id": "abcdefghi"}]<|endoftext|>',
        '[TOOL_RESULTS]{{"content": {}, "call_id": "abcdefghi"}}[/TOOL_RESULTS]',
    ),
    "mistral_small_3_2": (
        '[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{"where": "x \\"y\\"", "far": 2}<|endoftext|>',
        "[TOOL_RESULTS]abcdefghi[TOOL_CONTENT]{}[/TOOL_RESULTS]",
    ),
    "glm4moe": (GLM, "\n<tool_response>\n{}\n</tool_response><|assistant|>"),
    "deepseekv3": (
        "hm</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
        '{"where": "x \\"y\\"", "far": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{}<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
    ),
    "deepseek_v3_1": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"where": "x \\"y\\"", "far": 2}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        "<｜tool▁output▁begin｜>{}<｜tool▁output▁end｜>",
    ),
    "command_r7b": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "look", "parameters": {"where": "x \\"y\\"", '
        '"far": 2}}\n]<|END_ACTION|><|END_OF_TURN_TOKEN|>',
        '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>[\n    {{\n        "tool_call_id": "0",\n        '
        '"results": {{\n            "0": "{}"\n        }},\n        "is_error": null\n    }}\n]<|END_TOOL_RESULT|>'
        "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
        '{"where": "x \\"y\\"", "far": 2}<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
        "<|im_system|>tool<|im_middle|>## Return of "
        "functions.look:0\\n{}<|im_end|><|im_assistant|>assistant<|im_middle|>",
    ),
    "lfm2_v2": (
        "<|tool_call_start|>[look(where='x \"y\"', far=2)]<|tool_call_end|><|im_end|>",
        "\n<|im_start|>tool\n<|tool_response_start|>{}<|tool_response_end|><|im_end|>\n<|im_start|>assistant\n",
    ),
    "lfm2": (
        "<|tool_call_start|>[look(where='x \"y\"', far=2)]<|tool_call_end|><|im_end|>",
        "\n<|im_start|>tool\n<|tool_response_start|>{}<|tool_response_end|><|im_end|>\n<|im_start|>assistant\n",
    ),
    "muse_glimmer": (
        ' to=look<|message|><atem:function_calls>\n<atem:invoke name="look">\n<atem:parameter name="where">x '
        '"y"</atem:parameter>\n<atem:parameter name="far">2</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls><|eot|>",
        '<|start|>tool look<|message|><tool_output name="look">\n{}\n</tool_output><|eot|><|start|>assistant',
    ),
}
#: Official templates that know no tools.
WITHOUT = (
    "gemma",
    "gemma3",
    "llama3",
    "phi3",
    "phi3_5",
    "cohere",
    "cohere2",
    "qwen2_5_vl",
    "smolvlm",
    "deepseek_r1_distill",
)
#: They write an answer into JSON, and so as JSON.
ESCAPE = ("llama3_1", "llama3_2", "gptoss", "command_r7b")
#: They leave out white space around an answer.
STRIP = ("qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "gemma4_v2")


def look(where: str, far: int = 1):
    """Look somewhere.

    Args:
        where: A place.
        far: How far.
    """
    return f"{where} at {far}"


def tokenizer(name):
    path = HERE / f"{name}.jinja"
    if not path.is_file():
        if TRL is None:
            pytest.skip("trl, which has the official template, is not installed")
        path = TRL / f"{name}.jinja"
    source = path.read_text(encoding="utf-8")
    tok = copy.deepcopy(tiny.tokenizer(chat_template=source))
    tok.bos_token = "<s>"
    written = source + FAMILIES.get(name, ("", ""))[0] + FAMILIES.get(name, ("", ""))[1]
    special = set(re.findall(r"<\|[\w\"]+\|?>|<\w+\|>|<｜[\w▁]+｜>|\[/?[A-Z_]{4,}\]", written))
    tok.add_special_tokens({"additional_special_tokens": sorted(special)})
    tok.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    return tok


def codec_of(name):
    return PromptCodec(tokenizer(name))


ENVIRONMENTS = Environments([look])
SCHEMAS = ENVIRONMENTS.schemas_of(Sample({}, None, []))
ASKED = [{"role": "user", "content": "Please look."}]


def sample_of(codec, text):
    ids = codec.tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt = codec.encode(ASKED, SCHEMAS)
    completion = codec.decode(ASKED, ids, prompt, SCHEMAS)
    return Sample({}, ASKED, prompt, ids, [-1.0] * len(ids), finished=True, completion=completion)


def converse(codec, text, tool=look, then="done"):
    """One call, its answer, and the policy's last words. Returns the sample and what the policy was shown."""
    one, shown = sample_of(codec, text), []

    def go_on(turns, turn, tokens):
        shown.extend(list(each.prompt_ids) for each in turns)
        own = {"ids": codec.tokenizer(then, add_special_tokens=False)["input_ids"], "finished": True}
        own["logps"] = [-2.0] * len(own["ids"])
        return [
            replace(each, **own, completion=codec.decode(ASKED, own["ids"], each.prompt_ids, SCHEMAS)) for each in turns
        ]

    environments = Environments([tool])
    [one] = conversations.converse(environments, [one], codec, go_on, 5000)
    return one, shown, environments


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_is_read_and_answered_as_the_official_template_does_it(name):
    codec = codec_of(name)
    written, tail = FAMILIES[name]
    before = sample_of(codec, written)
    one, shown, environments = converse(codec, written)
    assert environments.counts == UNCUT | {"calls": 1, "failures": 0}
    (call,) = one.completion[0]["tool_calls"]
    assert call["type"] == "function" and call["function"] == {
        "name": "look",
        "arguments": {"where": 'x "y"', "far": 2},
    }
    assert "look" not in one.completion[0]["content"], "the call is told once"
    answer = 'x "y" at 2'
    assert [m["role"] for m in one.completion] == ["assistant", "tool", "assistant"]
    assert one.completion[1]["content"] == answer
    # What was read and written stays token for token, and what the template says around an answer follows.
    assert shown[0][: len(before.prompt_ids) + len(before.ids)] == before.prompt_ids + before.ids
    told = codec.tokenizer.decode(shown[0][len(before.prompt_ids) + len(before.ids) :])
    assert told == tail.format(answer.replace('"', '\\"') if name in ESCAPE else answer)
    number = len(shown[0]) - len(before.prompt_ids) - len(before.ids)
    assert one.learn == [True] * len(before.ids) + [False] * number + [True] * (len(one.ids) - len(before.ids) - number)


@pytest.mark.parametrize("answer", ["", "two\nlines", ' of "quotes" \n', "{'a': [1]}", "<tool_call>"])
@pytest.mark.parametrize("name", FAMILIES)
def test_any_answer_can_be_told(name, answer):
    def look(where: str, far: int = 1):
        return answer

    look.__doc__ = globals()["look"].__doc__
    codec = codec_of(name)
    written, tail = FAMILIES[name]
    one, shown, environments = converse(codec, written, look)
    told = codec.tokenizer.decode(shown[0][-(len(one.learn) - sum(one.learn)) :])
    expected = answer.strip() if name in STRIP else answer
    if name in ESCAPE:
        expected = expected.replace('"', '\\"').replace("\n", "\\n")
    assert told == tail.format(expected) and environments.counts["failures"] == 0
    if answer and name == "gptoss":  # <|constrain|> is what the model itself writes, and its template does not
        text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.look "
        text += '<|constrain|>json<|message|>{"where": "here"}<|call|>'
        first = sample_of(codec, text).completion[0]
        assert first["thinking"] == "hm" and first["tool_calls"][0]["function"]["arguments"] == {"where": "here"}


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3_coder", "hermes_2_pro", "glm4moe", "mistral_nemo", "gemma4", "kimi_k2"]
)
def test_the_whole_conversation_is_what_the_template_renders_of_its_messages(name):
    """Where the template itself leaves earlier turns as they were."""
    codec = codec_of(name)
    one, shown, _ = converse(codec, FAMILIES[name][0])
    text = codec.template(SCHEMAS).render(
        [*ASKED, *({"tool_call_id": "abcdefghi"} | m for m in one.completion[:2])], True
    )
    assert codec.tokenizer.decode(shown[0]) == text
    assert shown[0] == codec.tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", WITHOUT)
def test_a_template_that_shows_no_tools_is_refused(name):
    with pytest.raises(
        ValueError, match="Tools cannot be used with this chat template.*it (shows no tools|renders a call as)"
    ):
        ENVIRONMENTS.check(codec_of(name))


@pytest.mark.parametrize(("template", "says"), [
    (tiny.CHATML, "it shows no tools"),
    ("{{ tools }}{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}",
    "leaves out what tools answer"), (
        "{{ tools }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}@{{ c.function.name "
        "}}@{{ c.function.arguments }}{% endfor %}{% endfor %}",
        "an unknown format; set tokenizer.response_template"),
])  # fmt: skip
def test_a_template_that_cannot_call_or_answer_is_refused(template, says):
    with pytest.raises(ValueError, match=says):
        ENVIRONMENTS.check(PromptCodec(tiny.tokenizer(chat_template=template)))


def test_a_template_that_calls_tools_without_describing_them_needs_a_prompt_that_does():
    codec = codec_of("deepseekv3")
    assert ENVIRONMENTS.check(codec) == {codec.tokenizer.convert_tokens_to_ids("<｜end▁of▁sentence｜>")}
    for text, is_told in (("Please look.", True), ("Please overlook it.", False), ("Hello", False)):
        prompt = [{"role": "user", "content": text}]
        one = Sample({}, prompt, codec.encode(prompt, SCHEMAS))
        if is_told:
            ENVIRONMENTS.check_prompt(one, SCHEMAS, codec)
        else:
            with pytest.raises(ValueError, match="does not describe the tools to the model"):
                ENVIRONMENTS.check_prompt(one, SCHEMAS, codec)


@pytest.mark.parametrize(("name", "token"), [
    ("qwen2_5", "<|im_end|>"), ("gptoss", "<|call|>"), ("gemma4", "<|tool_response>"), ("glm4moe", "<|observation|>"),
    ("llama3_1", "<|eot_id|>"), ("nemotron_3_nano", "<|im_end|>"), ("command_r7b", "<|END_OF_TURN_TOKEN|>"),
])  # fmt: skip
def test_a_turn_stops_at_the_token_that_ends_a_call(name, token):
    codec = codec_of(name)
    assert ENVIRONMENTS.check(codec) == {codec.tokenizer.convert_tokens_to_ids(token)}


def test_arguments_have_the_types_that_their_tool_asks_for():
    def store(number: int, text: str, on: bool, parts: list[int], note: str | None = None):
        """Store.

        Args:
            number: A.
            text: B.
            on: C.
            parts: D.
            note: E.
        """

    values = {"number": "7", "text": "7", "on": "True", "parts": "[1, 2]", "note": "null"}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    codec = codec_of("qwen3_5_nothink")
    schemas = Environments([store]).schemas_of(Sample({}, None, []))
    ids = codec.tokenizer(f"<tool_call>\n<function=store>\n{body}</function>\n</tool_call>")["input_ids"]
    (call,) = codec.decode(ASKED, ids, codec.encode(ASKED, schemas), schemas)[0]["tool_calls"]
    assert call["function"]["arguments"] == {"number": 7, "text": "7", "on": True, "parts": [1, 2], "note": None}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_the_official_template_writes_of_a_call_is_read_back(name):
    def act(text: str, number: int, share: float, on: bool, parts: list[int], more: dict):
        """Act.

        Args:
            text: A.
            number: B.
            share: C.
            on: D.
            parts: E.
            more: F.
        """

    codec, schemas = codec_of(name), Environments([act]).schemas_of(Sample({}, None, []))
    protocol, template = codec.protocol(schemas), codec.template(schemas)
    if protocol.form is None:
        return  # a template that shows no calls
    asked = template.render(ASKED, add_generation_prompt=True)
    for text in (
        "",
        "7",
        "true",
        'of "quotes"',
        "two\nlines",
        "[1, {x}]",
        "def f(x):\n    return [x]\n",
        "äöü €",
        "a=1, b",
        "written <parameter=far>2</parameter>, <function=look> and </function>",
        "\n<parameter=far>\nfar",
    ):
        given = {"text": text, "number": 7, "share": 0.5, "on": True, "parts": [1, 2], "more": {"key": ["a", None]}}
        arguments = json.dumps(given) if name == "deepseekv3" else given
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "act", "arguments": arguments}}
        whole = template.render([*ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}])
        start = len(os.path.commonprefix([asked, whole]))
        start = whole.rfind("<", 0, start + 1) if name == "deepseekv3" else start  # "<think>" and its mark begin alike
        ids = codec.tokenizer("</think>" * (name == "deepseekv3") + whole[start:], add_special_tokens=False)[
            "input_ids"
        ]
        (read,) = protocol.read(ids, schemas).calls
        assert (read.name, read.arguments) == ("act", given)


def test_no_calls_are_made_in_thoughts_and_thoughts_are_told_apart():
    codec = codec_of("qwen3_5_think")
    one = sample_of(codec, "I could write <tool_call>\n<function=look></function>")
    assert "tool_calls" not in one.completion[0] and one.completion[0]["content"] == ""
    one = sample_of(codec, "So I look.\n" + XML)  # vLLM, too, takes the call for the end of thoughts that have none
    assert one.completion[0]["reasoning_content"] == "So I look." and len(one.completion[0]["tool_calls"]) == 1
    one = sample_of(codec, "<tool_call> or not?\n</think>\n\nWell.\n\n" + XML)
    assert one.completion[0]["reasoning_content"] == "<tool_call> or not?" and one.completion[0]["content"] == "Well."
    assert len(one.completion[0]["tool_calls"]) == 1
    one = sample_of(codec_of("qwen3"), "Just words.<|im_end|>")
    assert one.completion == [{"role": "assistant", "content": "Just words."}]


@pytest.mark.parametrize(
    ("name", "closing"),
    [
        ("qwen3", "</tool_call>"),
        ("qwen3_coder", "</tool_call>"),
        ("glm4moe", "</tool_call>"),
        ("gemma4", "<tool_call|>"),
        ("kimi_k2", "<|tool_calls_section_end|>"),
    ],
)
def test_a_call_that_is_not_closed_cannot_be_read_and_is_answered(name, closing):
    assert closing in FAMILIES[name][0]
    codec, text = codec_of(name), FAMILIES[name][0].replace(closing, "")
    one, _, environments = converse(codec, text)
    assert environments.counts == UNCUT | {"calls": 1, "failures": 1}
    written = codec.tokenizer.decode(codec.tokenizer(text)["input_ids"], skip_special_tokens=True)
    content = one.completion[0]["content"]
    assert content.strip() == written.rpartition("</think>")[2].strip() and "look" in content
    assert "tool_calls" not in one.completion[0]
    assert one.completion[1]["content"].startswith("error: this call cannot be read; a call is written")


def test_built_in_rewards_and_tables_see_thoughts_that_stand_apart():
    codec = codec_of("qwen3_5_think")
    texts = ("two and two\n</think>\n\nIt is 4.<|im_end|>", "two and two, and then", "hm\n</think>\n\n" + XML)
    completions = [sample_of(codec, text).completion for text in texts]
    assert think_format_reward(completions) == [1, 0, 1]
    assert accuracy_reward(completions[:1], ["4"]) == [1]
    assert plain_text(completions[0]) == "[assistant] <think>two and two</think> It is 4."


@pytest.mark.parametrize(("name", "text"), [
    ("qwen2_5", XML), ("qwen3_coder", QWEN), ("qwen2_5", "<tool_call>\n{'name': 'look'}\n</tool_call>"),
    ("mistral_nemo", "[TOOL_CALLS][{look}]<|endoftext|>"),
    ("qwen2_5", '<tool_call>\n{"name": "look", "arguments": [1]}\n</tool_call>'),
])  # fmt: skip
def test_a_call_in_another_form_is_answered_with_the_right_one(name, text):
    codec = codec_of(name)
    one, _, environments = converse(codec, text)
    assert environments.counts == UNCUT | {"calls": 1, "failures": 1} and "tool_calls" not in one.completion[0]
    assert one.completion[1]["content"].startswith("error: this call cannot be read; a call is written ")
    form = codec.protocol(SCHEMAS).example
    assert form in one.completion[1]["content"] and "look" not in form


def test_words_that_only_look_like_a_call_are_none():
    codec = codec_of("llama3_1")
    for text in (
        '{"name": "Bob", "age": 3}<|eot_id|>',
        "{}<|eot_id|>",
        'Say {"name": "look", "parameters": {}}<|eot_id|>',
    ):
        assert sample_of(codec, text).completion == [{"role": "assistant", "content": text.removesuffix("<|eot_id|>")}]
    called = sample_of(
        codec, '<|python_tag|>{"name": "look", "parameters": {"where": "a"}}; {"name": "look", "parameters": {}}'
    )
    assert len(called.completion[0]["tool_calls"]) == 2


# As Gemma 3 is used with tools: Python in the turn itself, and answers in a turn of the user.
PYTHON = (
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n{% if loop.first and tools %}"
    "{{ tools | tojson }}\n{% endif %}{% if m.tool_calls %}[{% for c in m.tool_calls %}{{ c.function.name }}("
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})"
    "{{ ', ' if not loop.last }}{% endfor %}]{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_calls_in_python_are_read_where_the_template_writes_them():
    codec = PromptCodec(tiny.tokenizer(chat_template=PYTHON))
    one, shown, _ = converse(codec, '[look(where="here"), look(where="there", far=2)]<|im_end|>')
    assert [m["content"] for m in one.completion] == ["", "here at 1", "there at 2", "done"]
    told = "\n<|im_start|>user\nhere at 1<|im_end|>\n<|im_start|>user\nthere at 2<|im_end|>\n<|im_start|>assistant\n"
    assert codec.tokenizer.decode(shown[0]).endswith("<|im_end|>" + told)
    fenced = sample_of(codec, "```tool_code\nlook(where='a', far=3)\n```<|im_end|>").completion[0]
    assert fenced["tool_calls"][0]["function"]["arguments"] == {"where": "a", "far": 3}
    for words in ("[see (1) and (2)]", "look(here)", "I look(where='a') there"):
        assert sample_of(codec, words + "<|im_end|>").completion == [{"role": "assistant", "content": words}]


def test_a_response_template_of_the_tokenizer_is_asked_first():
    codec = codec_of("qwen2_5")
    own = r"<tool_call>\s*(?P<name>\w+)\("
    codec.tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open": "<tool_call>", "close_pattern": r"</tool_call>\s*", "repeats": True, "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
        },
    }  # fmt: skip
    one, _, environments = converse(codec, "Well. " + QWEN)
    assert own and one.completion[0]["tool_calls"][0]["function"]["arguments"] == {"where": 'x "y"', "far": 2}
    assert one.completion[0]["content"].strip() == "Well." and environments.counts == UNCUT | {
        "calls": 1,
        "failures": 0,
    }
    # without tools, too, messages are what the tokenizer makes of them; what it cannot parse is a text
    ids = codec.tokenizer("Hello.<|im_end|>")["input_ids"]
    assert codec.decode(ASKED, ids, codec.encode(ASKED)) == [{"role": "assistant", "content": "Hello."}]


def test_several_calls_of_one_turn_are_answered_in_their_order():
    for name in ("qwen2_5", "llama3_1", "gptoss", "gemma4", "mistral_nemo", "command_r7b"):
        codec = codec_of(name)
        protocol = codec.protocol(SCHEMAS)
        answers = [{"role": "tool", "name": "look", "content": f"answer {i}"} for i in range(3)]
        text = codec.tokenizer.decode(protocol.answer_ids([], answers, SCHEMAS))
        places = [text.index(f"answer {i}") for i in range(3)]
        assert places == sorted(places)


def test_calls_are_values_and_messages():
    assert Call("look", {"far": 1}, "x").as_message() == {
        "id": "x", "type": "function", "function": {"name": "look", "arguments": {"far": 1}},
    }  # fmt: skip
