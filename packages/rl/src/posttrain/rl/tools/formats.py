"""The formats of tool calls: a parser of each, and the field that describes it to transformers.

The chat template shows the format of a model, see `posttrain.rl.tools.protocol`. A parser, by which the trainers read,
finds the blocks of a text that hold calls; a block that does not match the format is a call without arguments (None).
A field is a part of a response template, the language in which transformers describes a turn, for tokenizers that are
used elsewhere too; it knows nothing of calls that cannot be parsed.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

Types = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> name of an argument -> JSON schema of the argument."""

UNREADABLE = "unreadable"
END = "<END>"  # stands for the pattern of what ends a turn, which depends on the tokenizer
CONSTANTS = {"True": "true", "False": "false", "None": "null"}
DECODER = json.JSONDecoder(strict=False)  # models write line breaks within strings


@dataclass(frozen=True)
class Call:
    """A call of a tool. `arguments` are None if they cannot be parsed; `id` is the model's own id."""

    name: str
    arguments: dict[str, Any] | None
    id: str | None = None

    def as_message(self) -> dict[str, Any]:
        """The call as an entry of a message's ``tool_calls``."""
        call = {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return call if self.id is None else {"id": self.id} | call


@dataclass(frozen=True)
class Block:
    """A part of a text that holds calls, with the marks around it: from character `start` to `stop`."""

    start: int
    stop: int
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Form:
    """A format of calls.

    Attributes:
        read: ``(text, types)`` -> the blocks of calls, in their order.
        is_marked: no other text looks like a call. Other formats are parsed only if the template uses them.
        field: the format as the field ``tool_calls`` of a response template, see `rl.tools.response_templates`, with
            `END` for the pattern of what ends a turn; None if such a field cannot describe it.
    """

    name: str
    read: Callable[[str, Types], list[Block]]
    is_marked: bool = True
    field: dict[str, Any] | None = None


def between(start: str, stop: str, body: Callable[[str, Types], list[Call]]) -> Callable[[str, Types], list[Block]]:
    """Calls between two marks (regular expressions). Without the second one they cannot be read."""
    pattern = re.compile(rf"(?:{start})(.*?)(?:(?:{stop})|(?P<open>\Z))", re.DOTALL)

    def read(text: str, types: Types) -> list[Block]:
        return [
            _block(m.start(), m.end(), partial(body, m[1].strip(), types) if m["open"] is None else list)
            for m in pattern.finditer(text)
        ]

    return read


def before_json(start: str, stop: str = "") -> Callable[[str, Types], list[Block]]:
    """A mark followed by JSON of calls, or of arguments if the mark has a group `name`, and an optional `stop`."""
    opening, closing = re.compile(start, re.DOTALL), re.compile(stop)

    def read(text: str, types: Types) -> list[Block]:
        blocks, place = [], 0
        while found := opening.search(text, place):
            try:
                value, place = DECODER.raw_decode(text, found.end())
            except json.JSONDecodeError:
                blocks.append(Block(found.start(), len(text), (Call(UNREADABLE, None),)))
                break
            if ended := closing.match(text, place):
                place = ended.end()
            blocks.append(_block(found.start(), place, partial(_json_calls, value, **found.groupdict())))
        return blocks

    return read


def _block(start: int, stop: int, calls: Callable[[], list[Call]]) -> Block:
    try:
        return Block(start, stop, tuple(calls()) or (Call(UNREADABLE, None),))
    except (ValueError, SyntaxError, TypeError, KeyError, AttributeError, RecursionError):
        return Block(start, stop, (Call(UNREADABLE, None),))


def _json_calls(value: Any, name: str | None = None, id: str | None = None) -> list[Call]:
    """The calls in ``{"name": ..., "arguments": {...}}``, a list of such, or the one whose arguments `value` are."""
    if name is not None:
        return [Call(name, _arguments(value), id)]
    return [_json_call(each) for each in (value if isinstance(value, list) else [value])]


def _json_call(value: dict[str, Any]) -> Call:
    value = value["function"] if isinstance(value.get("function"), dict) else value
    name = value.get("name", value.get("tool_name"))
    if name is None and len(value) == 1:  # {"look": {...}}
        ((name, arguments),) = value.items()
        return Call(name, _arguments(arguments))
    if not isinstance(name, str):
        raise ValueError("a call without the name of a tool")
    arguments = value.get("arguments", value.get("parameters", {}))
    return Call(name, _arguments(arguments), value.get("id", value.get("tool_call_id")))


def _arguments(value: Any) -> dict[str, Any]:
    value = DECODER.decode(value) if isinstance(value, str) else value
    if value is not None and not isinstance(value, dict):
        raise ValueError("arguments have names")
    return value or {}


def _json_text(text: str, types: Types) -> list[Call]:
    return _json_calls(DECODER.decode(text))


def typed(text: str, schema: Mapping[str, Any] | None) -> Any:
    """A plain-text argument, converted to the type of its schema; without one, to what it reads as."""
    kinds = _kinds(schema or {})
    if "null" in kinds and text.strip() in ("null", "None"):
        return None
    if kinds - {"null"} == {"string"}:
        return text
    for parse in (DECODER.decode, ast.literal_eval):  # templates write true and True
        try:
            value = parse(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if value is None or isinstance(value, (bool, int, float, str, list, dict)):  # "1, 2" is a text, not a tuple
            return value
    return text


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    kind = schema.get("type", [])
    parts = [*schema.get("anyOf", []), *schema.get("oneOf", [])]
    kinds = {kind} if isinstance(kind, str) else set(kind)
    return kinds.union(["null"] * bool(schema.get("nullable")), *map(_kinds, parts))


def _elements(functions: str, arguments: str) -> Callable[[str, Types], list[Call]]:
    """Calls in elements like those of XML, with nothing between them; what is no element would be a lost argument. The
    pattern `functions` has the groups `name` and `rest`, and `arguments`, which reads the rest, `key` and `value`.
    """
    function, argument = re.compile(functions, re.DOTALL), re.compile(arguments, re.DOTALL)

    def read(text: str, types: Types) -> list[Call]:
        return [Call(m["name"], dict(values(m["rest"], types.get(m["name"], {})))) for m in _whole(function, text)]

    def values(text: str, schemas: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for m in _whole(argument, text):
            value = m["value"]
            if len(value) > 1 and value[0] == value[-1] == "\n":  # some templates put it on separate lines
                value = value[1:-1]
            yield m["key"], typed(value, schemas.get(m["key"]))

    return read


def _whole(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """The matches of `pattern`, which must be all of `text` but white space."""
    if pattern.sub("", text).strip():
        raise ValueError("a part of the call is not in the format of this template")
    return list(pattern.finditer(text))


def _items(pattern: str) -> Callable[[str, Types], list[Call]]:
    """Calls from matches with `name`, `json` arguments and an optional `id`."""
    item = re.compile(pattern, re.DOTALL)

    def read(text: str, types: Types) -> list[Call]:
        found = [m.groupdict() for m in item.finditer(text)]
        return [Call(each["name"], _arguments(each["json"]), each.get("id")) for each in found]

    return read


def _python(text: str, types: Types) -> list[Call]:
    """``[look(where='here', far=2), stop()]``."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:  # templates do not escape line breaks in texts
        tree = ast.parse(text.strip().replace("\n", "\\n"), mode="eval").body
    return [_python_call(call) for call in (tree.elts if isinstance(tree, ast.List) else [tree])]


def _python_call(call: Any) -> Call:
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("arguments have names")
    return Call(
        ast.unparse(call.func), {each.arg: ast.literal_eval(_Constants().visit(each.value)) for each in call.keywords}
    )


class _Constants(ast.NodeTransformer):
    """JSON's words for constants are Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant({"true": True, "false": False, "null": None}[node.id])


def _bare_python(text: str, types: Types) -> list[Block]:
    found = re.fullmatch(
        r"\s*(?:```(?:tool_code|python)?\s*)?(\[?\s*[A-Za-z_][\w.]*\(.*\)\s*\]?)\s*(?:```)?\s*", text, re.DOTALL
    )
    if not found:
        return []
    block = _block(found.start(), found.end(), lambda: _python(found[1], types))
    return [block] if block.calls[0].arguments is not None else []  # words in brackets are no call


def _bare_json(text: str, types: Types) -> list[Block]:
    """``{"name": ..., "parameters": {...}}`` alone, or several with a semicolon between them."""
    start = len(text) - len(text.lstrip())
    if not re.match(r'(?:<\|python_tag\|>)?\s*\{\s*"(?:name|type|function)"', text[start:]):
        return []
    if not re.search(r'"(?:parameters|arguments)"', text):
        return []  # an answer in JSON
    place, calls = text.index("{", start), []
    while True:
        try:
            value, place = DECODER.raw_decode(text, place)
            calls += _json_calls(value)
        except (ValueError, KeyError, AttributeError):
            return [Block(start, len(text), (Call(UNREADABLE, None),))]
        if not (more := re.compile(r"\s*;\s*(?=\{)").match(text, place)):
            return [Block(start, place, tuple(calls))]
        place = more.end()


def _with_delimiters(delimiter: str) -> Callable[[str, Types], list[Call]]:
    """``call:look{where:<d>here<d>,far:2}`` with delimiters <d> around texts."""
    strings, keys = re.compile(f"{delimiter}(.*?){delimiter}", re.DOTALL), re.compile(r"(^|[{,]\s*)([\w.-]+)\s*:")
    words = re.compile(r"\b(?:True|False|None)\b(?!\"?:)")

    def read(text: str, types: Types) -> list[Call]:
        found = re.fullmatch(r"\s*call:(?P<name>[\w.-]+)\s*(?P<rest>\{.*\})\s*", text, re.DOTALL)
        if found is None:
            raise ValueError("no call in the format of this template")
        pieces = strings.split(found["rest"])
        pieces[::2] = [words.sub(lambda m: CONSTANTS[m[0]], keys.sub(r'\1"\2":', piece)) for piece in pieces[::2]]
        pieces[1::2] = [json.dumps(piece) for piece in pieces[1::2]]
        return [Call(found["name"], _arguments("".join(pieces)))]

    return read


# ------------------------------------------------------------------------------------------ both ways to read a format


def _one(opening: str, closing: str, call: Any = None) -> dict[str, Any]:
    """The field of one call in JSON between two marks; `call`: where its name and arguments stand in the JSON; None:
    `opening` has a group `name`.
    """
    function = {"name": "{name}", "arguments": "{content}"} if call is None else call
    return {
        "open_pattern": rf"\s*{opening.replace('(?P<id>', '(?:')}", "close_pattern": rf"{closing}\s*", "repeats": True,
        "content": "json", "transform": {"type": "function", "function": function},
    }  # fmt: skip


def _tags(pattern: str) -> dict[str, Any]:
    """Arguments in elements like those of XML, as texts; the tools' schemas give them types."""
    return {"content": "xml-inline", "content_args": {"tag_pattern": pattern, "value_parser": {"name": "text"}}}


def _list(
    name: str, start: str, stop: str, key: str = "name", values: str = "arguments", is_open: bool = False
) -> Form:
    """A JSON list of calls between two marks, or if `is_open`, behind the first one."""
    field = _one(start, stop, {"name": f"{{{key}}}", "arguments": f"{{{values}}}"})
    field |= {"repeats": False, "transform_each": True}
    return Form(name, before_json(start) if is_open else between(start, stop, _json_text), field=field)


def _behind(name: str, opening: str, closing: str = "", ends: str = END, call: Any = None) -> Form:
    """A mark followed by JSON of one call, or of the arguments of the tool that it names; `ends` is for the field."""
    return Form(name, before_json(opening, closing), field=_one(opening, closing or ends, call))


def _xml(name: str, tag: str) -> Form:
    """``<function=look><parameter=where>here</parameter></function>`` in an element."""
    field = _one(rf"<{tag}>\s*<function=(?P<name>[^>\n]+)>", f"</{tag}>")
    tags = _tags(rf"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?{_XML_END}")
    return Form(name, between(f"<{tag}>", f"</{tag}>", _XML), field=field | tags)


def _invoke(name: str, start: str, stop: str, space: str) -> Form:
    """``<invoke name="look"><parameter name="where">here</parameter></invoke>`` between two marks."""
    opening = rf"(?:{start}\s*)?<{space}invoke name=\"?(?P<name>[^\">]+)\"?>"
    field = _one(opening, rf"</{space}invoke>\s*(?:{stop})?")
    tags = _tags(rf"<(?:\w+:)?parameter name=\"?(?P<key>[^\">]+)\"?[^>]*>\n?(?P<value>.*?)\n?{_INVOKE_END}")
    return Form(name, between(start, stop, _INVOKE), field=field | tags)


def _parts(name: str, start: str, stop: str, opening: str, closing: str) -> Form:
    """Marks around each call too, with `name` and perhaps `id` before the JSON of its arguments."""
    field = _one(rf"(?:{start}\s*)?{opening}", rf"{closing}\s*(?:{stop})?")
    return Form(name, between(start, stop, _items(rf"{opening}(?P<json>.*?){closing}")), field=field)


def _quoted(name: str, start: str, stop: str, delimiter: str) -> Form:
    """``call:look{where:<d>here<d>,far:2}`` with delimiters <d> around texts."""
    read = between(start, stop, _with_delimiters(re.escape(delimiter)))
    arguments = {"string_delims": [[delimiter, delimiter]], "unquoted_keys": True}
    return Form(name, read, field=_one(rf"{start}\s*call:(?P<name>[\w.-]+)", stop) | {"content_args": arguments})


def _python_list(name: str, start: str, stop: str) -> Form:
    """``[look(where='here'), stop()]`` between two marks."""
    later = rf"(?<={start}(?:(?!{stop}).)*\)\s*),\s*"
    field = _one(rf"(?:{start}\s*\[\s*|{later})(?P<name>[\w.]+)\(", rf"\)(?:\s*\]\s*{stop}|(?=\s*,\s*[\w.]+\())") | {
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"(?P<key>\w+)\s*=\s*(?P<value>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|"
            r"(?P<nested>[\[{](?:[^\[\]{}'\"]|'[^']*'|\"[^\"]*\"|(?&nested))*[\]}])|[^,()]*)",
            "value_parser": {"name": "json", "args": {"string_delims": [["'", "'"]], "allow_non_json": True}},
        },
    }
    return Form(name, between(start, stop, _python), field=field)


#: What ends an argument: the mark before another argument or the end of the call, since a text may hold marks too.
_XML_END = r"(?:</parameter>(?=\s*(?:<parameter=|</function>|\Z))|\Z)"
_INVOKE_END = r"</(?:\w+:)?parameter>(?=\s*(?:<(?:\w+:)?parameter name=|</(?:\w+:)?invoke>|\Z))"
_XML = _elements(
    r"<function=(?P<name>[^>\n]+)>(?P<rest>.*?)(?:</function>(?=\s*(?:<function=|\Z))|\Z)",
    rf"<parameter=(?P<key>[^>\n]+)>(?P<value>.*?){_XML_END}",
)
_INVOKE = _elements(
    r"<(?:\w+:)?invoke name=\"?(?P<name>[^\">]+)\"?>(?P<rest>.*?)</(?:\w+:)?invoke>",
    rf"<(?:\w+:)?parameter name=\"?(?P<key>[^\">]+)\"?[^>]*>(?P<value>.*?){_INVOKE_END}",
)
_KEYS = _elements(
    r"\A(?P<name>[^\s<{\[]+)(?P<rest>.*)\Z",
    r"<arg_key>(?P<key>[^<>]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
)
_GLM = _one(r"<tool_call>(?P<name>[^\s<{\[]+)\s*", "</tool_call>") | _tags(
    r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
)
_SOLAR = _items(
    r"<\|tool_call:begin\|>(?P<id>.*?)<\|tool_call:name\|>(?P<name>.*?)"
    r"<\|tool_call:args\|>(?P<json>.*?)<\|tool_call:end\|>"
)
_LLAMA = _one(
    r"(?:\A|<\|python_tag\|>)\s*(?=\{\s*\"(?:name|type|function)\")",
    END,
    call={"name": "{content.name}", "arguments": "{content.parameters}"},
)

FORMS = (
    Form(
        "Hermes, Qwen2.5, Qwen3: JSON in <tool_call>",
        between("<tool_call>", "</tool_call>", _json_text),
        field=_one("<tool_call>", "</tool_call>", "{content}"),
    ),
    _xml("Qwen3-Coder, Qwen3.5: <function=...> in <tool_call>", "tool_call"),
    Form("GLM: <arg_key> in <tool_call>", between("<tool_call>", "</tool_call>", _KEYS), field=_GLM),
    _xml("Seed: <function=...> in <seed:tool_call>", "seed:tool_call"),
    _invoke("MiniMax: <invoke> in <minimax:tool_call>", "<minimax:tool_call>", "</minimax:tool_call>", ""),
    _invoke(
        "Muse: <atem:invoke>",
        r"(?:to=\S+<\|message\|>)?<atem:function_calls>",
        "</atem:function_calls>",
        "atem:",
    ),
    _behind(
        "gpt-oss: the commentary channel",
        r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)?\s*to=functions\.(?P<name>[\w.-]+)\s*(?:<\|channel\|>\w+)?"
        r"\s*(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>",
    ),
    _list("Mistral: a list behind [TOOL_CALLS]", r"\[TOOL_CALLS\]\s*(?=[\[{])", END, is_open=True),
    _behind(
        "Mistral: [TOOL_CALLS]name[ARGS]",
        r"\[TOOL_CALLS\](?P<name>[^\[\]{}\s]+)(?:\[CALL_ID\](?P<id>\w+))?\[ARGS\]\s*",
        ends=rf"(?:(?=\[TOOL_CALLS\])|{END})",
    ),
    _parts(
        "DeepSeek: <｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^\n<]+?)(?:<｜tool▁sep｜>|\n```json\n)",
        r"(?:\n```)?\s*<｜tool▁call▁end｜>",
    ),
    _parts(
        "Kimi: <|tool_calls_section_begin|>",
        r"<\|tool_calls_section_begin\|>",
        r"<\|tool_calls_section_end\|>",
        r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^:<]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>",
        r"<\|tool_call_end\|>",
    ),
    _quoted("Gemma 4: call:name{...}", r"<\|tool_call>", r"<tool_call\|>", '<|"|>'),
    _quoted("FunctionGemma: call:name{...}", "<start_function_call>", "<end_function_call>", "<escape>"),
    _list("Cohere: <|START_ACTION|>", r"<\|START_ACTION\|>", r"<\|END_ACTION\|>", "tool_name", "parameters"),
    Form("Command R: Action", between(r"Action:\s*```json", "```", _json_text)),
    _python_list("LFM2: Python in <|tool_call_start|>", r"<\|tool_call_start\|>", r"<\|tool_call_end\|>"),
    _python_list("Llama 4: Python in <|python_start|>", r"<\|python_start\|>", r"<\|python_end\|>"),
    _list("Phi-4: a list in <|tool_call|>", r"<\|tool_call\|>", r"<\|/tool_call\|>"),
    _list("Granite: a list behind <|tool_call|>", r"<\|tool_call\|>\s*(?=[\[{])", END, is_open=True),
    _list("a list in <tool_calls>", "<tool_calls>", "</tool_calls>"),
    _list("Nemotron: a list in <TOOLCALL>", "<TOOLCALL>", "</TOOLCALL>"),
    Form("Apertus: <|tools_prefix|>", between(r"<\|tools_prefix\|>", r"<\|tools_suffix\|>", _json_text)),
    Form("Solar: <|tool_call:begin|>", between(r"<\|tool_calls\|>", r"(?=<\|calls\|>)|\Z", _SOLAR)),
    _behind("GigaChat: <|function_call|>", r"<\|function_call\|>\s*(?=\{)", call="{content}"),
    _behind("Functionary: <function=name>{...}", r"<function=(?P<name>[\w.-]+)>(?=\{)", "</function>"),
    Form("Llama 3: JSON", _bare_json, is_marked=False, field=_LLAMA),
    Form("Python", _bare_python, is_marked=False),
)


def marked_calls(text: str, types: Types) -> list[Block]:
    """The blocks of every marked format in order; if two formats share a mark, the one that parses."""
    found: list[Block] = []
    for form in FORMS:
        for block in form.read(text, types) if form.is_marked else ():
            rival = next((b for b in found if b.start < block.stop and block.start < b.stop), None)
            if rival is None:
                found.append(block)
            elif rival.calls[0].arguments is None and block.calls[0].arguments is not None:
                found[found.index(rival)] = block
    return sorted(found, key=lambda block: block.start)
