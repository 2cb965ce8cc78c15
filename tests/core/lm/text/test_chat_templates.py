"""What is trained on under chat templates of every family: only what was chosen, and all of it."""

import copy
import json

import pytest

from posttrain.core import get_training_chat_template
from posttrain.core.errors import DataError
from posttrain.lm.text import chat_template
from posttrain.lm.text.chat_template import require_calls
from tests.tiny import CHATML, tokenizer

GENERATE = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim "
    "}}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif "
    "%}"
)
# The system's words stand in the first turn of the user, and roles must alternate.
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set before = messages[0].content + '\n\n' %}{% set turns "
    "= messages[1:] %}{% else %}{% set before = '' %}{% set turns = messages %}{% endif %}{% for m in turns %}{% if "
    "(m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif "
    "%}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ before if loop.first }}{{ m.content | "
    "trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# No generation prompt, and the system's words in the last turn of the user.
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{% if loop.index0 == ns.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "{{ m.content }}[/INST]{% elif m.role == 'assistant' %} {{ m.content }}<|endoftext|>{% endif %}{% endfor %}"
)
# Thoughts of earlier turns are dropped; the generation prompt opens one.
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'assistant' "
    "%}<|Assistant|>{{ m.content.split('</think>')[-1] }}<|endoftext|>{% else %}{{ m.content }}{% endif %}{% endfor "
    "%}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
)
# As gpt-oss': each turn of the assistant names its channel, which the model writes, and the last one ends otherwise.
CHANNELS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif "
    "%}<|message|>{{ m.content }}{{ '<|endoftext|>' if loop.last and m.role == 'assistant' and not "
    "add_generation_prompt else '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant"
    "{% endif %}"
)
# As Qwen's: calls within the assistant's turn, and neighbouring answers of tools in one turn of the user.
TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}{% if "
    "m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}\n"
    "<tool_response>\n{{ m.content }}\n</tool_response>{% if loop.last or messages[loop.index0 + 1].role != 'tool' "
    "%}<|im_end|>\n{% endif %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] "
    "%}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    + GENERATE
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + GENERATE
)
FAMILIES = {
    "chatml": CHATML, "llama": LLAMA, "gemma": GEMMA, "mistral": MISTRAL, "deepseek": DEEPSEEK, "phi": PHI,
    "channels": CHANNELS, "tools": TOOLS,
}  # fmt: skip
ENDS = {"llama": "<|eot_id|>", "gemma": "<end_of_turn>\n", "mistral": "<|endoftext|>", "deepseek": "<|endoftext|>"}
ENDS |= {"phi": "<|end|>\n", "chatml": "<|im_end|>\n", "tools": "<|im_end|>\n"}

TURNS = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Q one"},
    {"role": "assistant", "content": "A one"},
    {"role": "user", "content": "Q two"},
    {"role": "assistant", "content": "A two"},
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLS = [
    {"role": "user", "content": "1+1, 1+2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "2"},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "2 and 3"},
]


def template(source):
    tok = copy.deepcopy(tokenizer(chat_template=source))
    tok.bos_token = "<|im_start|>"
    marks = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")  # of whole tokens, as those of real tokenizers are
    tok.add_special_tokens({"additional_special_tokens": list(marks)})
    return chat_template.Template(tok)


def spans_of(source, messages, chosen):
    text, spans = template(source).trained_spans(messages, chosen)
    return text, [text[a:b] for a, b in spans]


def by_role(messages, role):
    return [message["role"] == role for message in messages]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_turns_of_the_assistant_are_found_with_their_ends(family):
    _, pieces = spans_of(FAMILIES[family], TURNS, by_role(TURNS, "assistant"))
    if family == "channels":
        assert pieces == ["<|channel|>final<|message|>A one<|im_end|>", "<|channel|>final<|message|>A two<|endoftext|>"]
        source = get_training_chat_template(template(CHANNELS).tokenizer)  # whose marks are the same
        assert spans_of(source, TURNS, by_role(TURNS, "assistant"))[1] == pieces
        return
    end = ENDS[family]
    final = end + ("<|endoftext|>" if family == "phi" else "")
    assert [piece.lstrip() for piece in pieces] == ["A one" + end, "A two" + final]


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_not_trained_on_does_not_depend_on_what_is_said(family, role):
    """The round trip: with other words in the chosen messages, all outside the spans stays as it was."""

    def outside(word):
        messages = [m | {"content": word} if m["role"] == role else m for m in TURNS]
        text, spans = template(FAMILIES[family]).trained_spans(messages, by_role(messages, role))
        assert len(spans) == sum(by_role(messages, role)) and all(word in text[a:b] for a, b in spans)
        edges = [0, *(edge for span in spans for edge in span), len(text)]
        return [text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]

    assert outside("Xylophone") == outside("no, really!")


def test_the_words_of_users_and_tools_are_found_within_what_the_template_says_around_them():
    assert spans_of(GEMMA, TURNS, by_role(TURNS, "system"))[1] == ["Be kind."]
    assert spans_of(GEMMA, TURNS, by_role(TURNS, "user"))[1] == ["Q one<end_of_turn>\n", "Q two<end_of_turn>\n"]
    assert spans_of(MISTRAL, TURNS, by_role(TURNS, "user"))[1] == ["Q one[/INST]", "Q two[/INST]"]
    assert spans_of(TOOLS, CALLS, by_role(CALLS, "tool"))[1] == [
        "2\n</tool_response>",
        "3\n</tool_response><|im_end|>\n",
    ]


@pytest.mark.parametrize("source", [TOOLS, MARKED], ids=["by rendering", "marked"])
def test_calls_of_tools_are_the_assistants_and_their_answers_are_not(source):
    call = f"<tool_call>\n{json.dumps(CALL['function'])}\n</tool_call>"
    end = "<|im_end|>" + "\n" * (source == TOOLS)  # a mark ends with the token that the model stops at
    wanted = [call * 2 + end, "2 and 3" + end]
    assert spans_of(source, CALLS, by_role(CALLS, "assistant"))[1] == wanted
    assert spans_of(source, CALLS, [False, False, False, False, True])[1] == wanted[1:]
    assert spans_of(source, CALLS, [True, False, False, False, True])[1] == ["1+1, 1+2?<|im_end|>\n", wanted[1]]


def test_a_thought_is_trained_on_where_the_template_shows_it():
    messages = [TURNS[1], {"role": "assistant", "content": "<think>\nhm</think>A one"}, *TURNS[3:]]
    text, pieces = spans_of(DEEPSEEK, messages, by_role(messages, "assistant"))
    assert pieces == ["A one<|endoftext|>", "A two<|endoftext|>"] and "hm" not in text  # the template drops it


def test_a_template_that_leaves_the_content_out_is_refused():
    parts = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{{ p.text }}{% endfor "
        "%}<|im_end|>{% endfor %}"
    )
    with pytest.raises(DataError, match="does not show where"):
        spans_of(parts + GENERATE, TURNS, by_role(TURNS, "assistant"))  # a text has no parts, and so nothing is shown
    messages = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in TURNS]
    pieces = spans_of(parts + GENERATE, messages, by_role(messages, "assistant"))[1]
    assert pieces == ["A one<|im_end|>", "A two<|im_end|>"]
    assert spans_of(parts + GENERATE, messages, by_role(messages, "user"))[1] == ["Q one<|im_end|>", "Q two<|im_end|>"]


def test_a_template_that_says_before_a_turn_what_depends_on_it_is_refused():
    counts = (
        "{% for m in messages %}<|im_start|>{{ m.content | length }} {{ m.role }}\n{{ m.content }}<|im_end|>{% "
        "endfor %}"
    )
    with pytest.raises(DataError, match="does not show where"):
        spans_of(counts, TURNS, by_role(TURNS, "user"))
    pieces = spans_of(counts, TURNS, by_role(TURNS, "assistant"))[
        1
    ]  # nothing is asked of the model: it writes all of it
    assert pieces == ["<|im_start|>5 assistant\nA one<|im_end|>", "<|im_start|>5 assistant\nA two<|im_end|>"]


ROLES = ["user", "assistant", "user", "assistant"]


@pytest.mark.parametrize(
    ("train_on", "flags", "expected"),
    [
        (None, [{}] * 4, None),
        ("all", [{}] * 4, None),
        ("assistant", [{}] * 4, [0, 1, 0, 1]),
        (["assistant", "user"], [{}] * 4, [1, 1, 1, 1]),
        ("last", [{}] * 4, [0, 0, 0, 1]),
        (None, [{}, {"train": False}, {}, {"train": True}], [0, 0, 0, 1]),
        (None, [{}, {"weight": 0}, {}, {}], [0, 0, 0, 1]),
        (None, [{"train": None}] * 4, [0, 1, 0, 1]),  # as Arrow has it where another row has a flag
        ("all", [{}, {"weight": 0.0}, {}, {}], [1, 0, 1, 1]),
        ("last", [{"train": True}, {}, {}, {}], [1, 0, 0, 1]),
    ],
)
def test_a_messages_flag_goes_before_its_role(train_on, flags, expected):
    messages = [{"role": role, "content": "x"} | flag for role, flag in zip(ROLES, flags, strict=True)]
    chosen = chat_template.message_choice(messages, train_on)
    assert chosen == (expected if expected is None else [bool(flag) for flag in expected])
    assert all(set(message) == {"role", "content"} for message in chat_template.to_messages(messages))


@pytest.mark.parametrize("flag", [{"weight": 0.5}, {"train": "yes"}])
def test_a_flag_that_is_neither_true_nor_false_is_refused(flag):
    with pytest.raises(DataError, match="neither true nor false"):
        chat_template.message_choice([{"role": "user", "content": "x"} | flag])


@pytest.mark.parametrize("source", [CHATML, PHI, LLAMA, GEMMA, DEEPSEEK, MISTRAL])
def test_a_template_that_leaves_calls_out_is_noticed(source):
    messages = [*CALLS[:2], {"role": "user", "content": "2"}, CALLS[4]]
    with pytest.raises(DataError, match="leaves out tool_calls, and turns would be learned without them"):
        require_calls(template(source), messages)
    with pytest.raises(DataError, match="leaves out tool_calls"):
        require_calls(template(source), [messages[0], messages[1] | {"content": "Let me add."}])
    require_calls(template(source), messages, by_role(messages, "user"))  # of turns that are not learned
    require_calls(template(source), TURNS[1:])


@pytest.mark.parametrize("source", [TOOLS, MARKED], ids=["by rendering", "marked"])
def test_a_template_that_shows_calls_is_believed(source):
    require_calls(template(source), CALLS)
    flat = [CALLS[0], {"role": "assistant", "content": "", "tool_calls": [{"function": CALL["function"]}]}]
    require_calls(template(source), flat)
    first_only = source.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    with pytest.raises(DataError, match="leaves out tool_calls"):  # the second of two
        require_calls(template(first_only), CALLS)


# Writes the arguments out as they are, as DeepSeek's does: a dict cannot be added to a text, or becomes what python
# prints.
WRITES_OUT = TOOLS.replace("{{ call.function | tojson }}", '{{ "call " + call.function.arguments }}')
PRINTS = TOOLS.replace("{{ call.function | tojson }}", "call {{ call.function.arguments }}")


@pytest.mark.parametrize("source", [TOOLS, MARKED], ids=["by rendering", "marked"])
@pytest.mark.parametrize("text", ['{"a":1}', ' {"a": 1}\n'])
def test_arguments_given_as_json_text_are_rendered_as_the_dict_that_they_are(source, text):
    called = [CALLS[0], {**CALLS[1], "tool_calls": [{"function": {"name": "add", "arguments": text}}] * 2}, *CALLS[2:]]
    plain = [CALLS[0], {**CALLS[1], "tool_calls": [{"function": CALL["function"]}] * 2}, *CALLS[2:]]
    for chosen in ([True] * len(CALLS), by_role(CALLS, "assistant")):
        assert spans_of(source, called, chosen) == spans_of(source, plain, chosen)
    assert called[1]["tool_calls"][0]["function"]["arguments"] == text  # the row is the user's
    require_calls(template(source), called)


def test_a_call_without_arguments_may_have_an_empty_text_for_them():
    flat = [
        CALLS[0],
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now", "arguments": ""}}]},
    ]
    assert '{"name": "now", "arguments": {}}' in template(TOOLS).render(flat)


@pytest.mark.parametrize("source", [WRITES_OUT, PRINTS], ids=["adds texts", "prints"])
@pytest.mark.parametrize(("arguments", "shown"), [({"a": 1}, '{"a": 1}'), ('{"a":1}', '{"a":1}')])
def test_a_template_that_writes_arguments_out_is_given_json_text(source, arguments, shown):
    called = [CALLS[0], {**CALLS[1], "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}]
    assert f"<tool_call>\ncall {shown}\n</tool_call>" in template(source).render(called)


@pytest.mark.parametrize(
    ("text", "problem"), [("{'a': 1}", "not valid JSON"), ("[1]", "not of an object"), ("3", "not of an")]
)
def test_arguments_that_are_no_json_object_are_refused(text, problem):
    called = [CALLS[0], {**CALLS[1], "tool_calls": [{"function": {"name": "add", "arguments": text}}]}]
    with pytest.raises(DataError, match=f"arguments of a call in tool_calls .*{problem}"):
        template(TOOLS).render(called)
