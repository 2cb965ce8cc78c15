"""The formats of calls as fields of response templates, the language in which transformers describes a turn.

`posttrain.rl.tools.formats` has the parsers that the trainers use, and says which field belongs to which format. A
field is for tokenizers that are used elsewhere too; it knows nothing of calls that cannot be parsed.
"""

from __future__ import annotations

from typing import Any

END = "<END>"  # stands for the pattern of what ends a turn, which depends on the tokenizer


def _field(opening: str, closing: str, call: Any = None) -> dict[str, Any]:
    """One call in JSON between two marks (regular expressions).

    Args:
        call: where its name and arguments stand in the JSON; None: `opening` has a group `name`.
    """
    function = {"name": "{name}", "arguments": "{content}"} if call is None else call
    return {
        "open_pattern": rf"\s*{opening}", "close_pattern": rf"{closing}\s*", "repeats": True, "content": "json",
        "transform": {"type": "function", "function": function},
    }  # fmt: skip


def _list(opening: str, closing: str, name: str = "{name}", arguments: str = "{arguments}") -> dict[str, Any]:
    """A JSON list of calls between two marks."""
    return _field(opening, closing, {"name": name, "arguments": arguments}) | {"repeats": False, "transform_each": True}


def _tags(pattern: str) -> dict[str, Any]:
    """Arguments in elements like those of XML, as texts; the tools' schemas give them types."""
    return {"content": "xml-inline", "content_args": {"tag_pattern": pattern, "value_parser": {"name": "text"}}}


#: What ends an argument: the mark before another argument or the end of the call, since a text may hold marks too.
XML_END = r"(?:</parameter>(?=\s*(?:<parameter=|</function>|\Z))|\Z)"
_XML_TAGS = _tags(rf"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?{XML_END}")
INVOKE_END = r"</(?:\w+:)?parameter>(?=\s*(?:<(?:\w+:)?parameter name=|</(?:\w+:)?invoke>|\Z))"
_INVOKE_TAGS = _tags(rf"<(?:\w+:)?parameter name=\"?(?P<key>[^\">]+)\"?[^>]*>\n?(?P<value>.*?)\n?{INVOKE_END}")
_NAME = r"\"?(?P<name>[^\">]+)\"?>"
_PYTHON_TAGS = {
    "content": "xml-inline",
    "content_args": {
        "tag_pattern": r"(?P<key>\w+)\s*=\s*(?P<value>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|"
        r"(?P<nested>[\[{](?:[^\[\]{}'\"]|'[^']*'|\"[^\"]*\"|(?&nested))*[\]}])|[^,()]*)",
        "value_parser": {"name": "json", "args": {"string_delims": [["'", "'"]], "allow_non_json": True}},
    },
}


def _python(start: str, stop: str) -> dict[str, Any]:
    """``[look(where='here'), stop()]`` between two marks."""
    later = rf"(?<={start}(?:(?!{stop}).)*\)\s*),\s*"
    closing = rf"\)(?:\s*\]\s*{stop}|(?=\s*,\s*[\w.]+\())"
    return _field(rf"(?:{start}\s*\[\s*|{later})(?P<name>[\w.]+)\(", closing) | _PYTHON_TAGS


def _quoted(delimiter: str) -> dict[str, Any]:
    """``{where:<d>here<d>,far:2}`` with delimiters <d> around texts."""
    return {"content_args": {"string_delims": [[delimiter, delimiter]], "unquoted_keys": True}}


HERMES = _field("<tool_call>", "</tool_call>", "{content}")
QWEN_CODER = _field(r"<tool_call>\s*<function=(?P<name>[^>\n]+)>", "</tool_call>") | _XML_TAGS
GLM = _field(r"<tool_call>(?P<name>[^\s<{\[]+)\s*", "</tool_call>") | _tags(
    r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
)
SEED = _field(r"<seed:tool_call>\s*<function=(?P<name>[^>\n]+)>", "</seed:tool_call>") | _XML_TAGS
MINIMAX = (
    _field(rf"(?:<minimax:tool_call>\s*)?<invoke name={_NAME}", r"</invoke>\s*(?:</minimax:tool_call>)?") | _INVOKE_TAGS
)
MUSE = (
    _field(
        rf"(?:(?:to=\S+<\|message\|>)?<atem:function_calls>\s*)?<atem:invoke name={_NAME}",
        r"</atem:invoke>\s*(?:</atem:function_calls>)?",
    )
    | _INVOKE_TAGS
)
GPT_OSS = _field(
    r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)?\s*to=functions\.(?P<name>[\w.-]+)\s*(?:<\|channel\|>\w+)?"
    r"\s*(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>",
    END,
)
MISTRAL_LIST = _list(r"\[TOOL_CALLS\]\s*(?=[\[{])", END)
MISTRAL = _field(r"\[TOOL_CALLS\](?P<name>[^\[\]{}\s]+)(?:\[CALL_ID\]\w+)?\[ARGS\]", rf"(?:(?=\[TOOL_CALLS\])|{END})")
DEEPSEEK = _field(
    r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^\n<]+?)"
    r"(?:<｜tool▁sep｜>|\n```json\n)",
    r"(?:\n```)?\s*<｜tool▁call▁end｜>\s*(?:<｜tool▁calls▁end｜>)?",
)
KIMI = _field(
    r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^:<]+)(?::\d+)?\s*"
    r"<\|tool_call_argument_begin\|>",
    r"<\|tool_call_end\|>\s*(?:<\|tool_calls_section_end\|>)?",
)
GEMMA = _field(r"<\|tool_call>\s*call:(?P<name>[\w.-]+)", r"<tool_call\|>") | _quoted('<|"|>')
FUNCTION_GEMMA = _field(r"<start_function_call>\s*call:(?P<name>[\w.-]+)", "<end_function_call>") | _quoted("<escape>")
COHERE = _list(r"<\|START_ACTION\|>", r"<\|END_ACTION\|>", "{tool_name}", "{parameters}")
LFM = _python(r"<\|tool_call_start\|>", r"<\|tool_call_end\|>")
LLAMA_PYTHON = _python(r"<\|python_start\|>", r"<\|python_end\|>")
PHI = _list(r"<\|tool_call\|>", r"<\|/tool_call\|>")
GRANITE = _list(r"<\|tool_call\|>\s*(?=[\[{])", END)
LIST = _list("<tool_calls>", "</tool_calls>")
NEMOTRON = _list("<TOOLCALL>", "</TOOLCALL>")
GIGACHAT = _field(r"<\|function_call\|>\s*(?=\{)", END, "{content}")
FUNCTIONARY = _field(r"<function=(?P<name>[\w.-]+)>(?=\{)", "</function>")
LLAMA = _field(
    r"(?:\A|<\|python_tag\|>)\s*(?=\{\s*\"(?:name|type|function)\")",
    END,
    call={"name": "{content.name}", "arguments": "{content.parameters}"},
)
