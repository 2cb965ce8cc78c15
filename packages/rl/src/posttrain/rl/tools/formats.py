"""Parsers of tool calls, one for each format.

The chat template shows the format of a model, see `posttrain.rl.tools.protocol`. A parser finds the blocks of a text
that hold calls; a block that does not match the format is a call without arguments (None).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from posttrain.rl.tools import fields

Types = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> name of an argument -> JSON schema of the argument."""

UNREADABLE = "unreadable"
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
        field: the format as the field ``tool_calls`` of a response template, see `rl.tools.response_templates`,
            with `tool_fields.END` for the pattern of what ends a turn; None if such a field cannot describe it.
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
    """Calls in elements like those of XML, with nothing between them; what is no element would be a lost argument.

    Args:
        functions: a pattern with the groups `name` and `rest`. arguments: one with `key` and `value`, for `rest`.
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
    return Call(ast.unparse(call.func), {keyword.arg: _literal(keyword.value) for keyword in call.keywords})


class _Constants(ast.NodeTransformer):
    """JSON's words for constants are Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant({"true": True, "false": False, "null": None}[node.id])


def _literal(value: ast.expr) -> Any:
    return ast.literal_eval(_Constants().visit(value))


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


def _quoted(delimiter: str) -> Callable[[str, Types], list[Call]]:
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


_XML = _elements(
    r"<function=(?P<name>[^>\n]+)>(?P<rest>.*?)(?:</function>(?=\s*(?:<function=|\Z))|\Z)",
    rf"<parameter=(?P<key>[^>\n]+)>(?P<value>.*?){fields.XML_END}",
)
_INVOKE = _elements(
    r"<(?:\w+:)?invoke name=\"?(?P<name>[^\">]+)\"?>(?P<rest>.*?)</(?:\w+:)?invoke>",
    rf"<(?:\w+:)?parameter name=\"?(?P<key>[^\">]+)\"?[^>]*>(?P<value>.*?){fields.INVOKE_END}",
)
_KEYS = _elements(
    r"\A(?P<name>[^\s<{\[]+)(?P<rest>.*)\Z",
    r"<arg_key>(?P<key>[^<>]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
)
_DEEPSEEK = _items(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^\n<]+?)(?:<｜tool▁sep｜>|\n```json\n)"
    r"(?P<json>.*?)(?:\n```)?\s*<｜tool▁call▁end｜>"
)
_KIMI = _items(
    r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^:<]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>"
    r"(?P<json>.*?)<\|tool_call_end\|>"
)
_SOLAR = _items(
    r"<\|tool_call:begin\|>(?P<id>.*?)<\|tool_call:name\|>(?P<name>.*?)"
    r"<\|tool_call:args\|>(?P<json>.*?)<\|tool_call:end\|>"
)

FORMS = (
    Form(
        "Hermes, Qwen2.5, Qwen3: JSON in <tool_call>",
        between("<tool_call>", "</tool_call>", _json_text),
        field=fields.HERMES,
    ),
    Form(
        "Qwen3-Coder, Qwen3.5: <function=...> in <tool_call>",
        between("<tool_call>", "</tool_call>", _XML),
        field=fields.QWEN_CODER,
    ),
    Form("GLM: <arg_key> in <tool_call>", between("<tool_call>", "</tool_call>", _KEYS), field=fields.GLM),
    Form(
        "Seed: <function=...> in <seed:tool_call>",
        between("<seed:tool_call>", "</seed:tool_call>", _XML),
        field=fields.SEED,
    ),
    Form(
        "MiniMax: <invoke> in <minimax:tool_call>",
        between("<minimax:tool_call>", "</minimax:tool_call>", _INVOKE),
        field=fields.MINIMAX,
    ),
    Form(
        "Muse: <atem:invoke>",
        between(r"(?:to=\S+<\|message\|>)?<atem:function_calls>", "</atem:function_calls>", _INVOKE),
        field=fields.MUSE,
    ),
    Form(
        "gpt-oss: the commentary channel",
        before_json(
            r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)?\s*to=functions\.(?P<name>[\w.-]+)\s*(?:<\|channel\|>\w+)?"
            r"\s*(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>"
        ),
        field=fields.GPT_OSS,
    ),
    Form("Mistral: a list behind [TOOL_CALLS]", before_json(r"\[TOOL_CALLS\]\s*(?=[\[{])"), field=fields.MISTRAL_LIST),
    Form(
        "Mistral: [TOOL_CALLS]name[ARGS]",
        before_json(r"\[TOOL_CALLS\](?P<name>[^\[\]{}\s]+)(?:\[CALL_ID\](?P<id>\w+))?\[ARGS\]\s*"),
        field=fields.MISTRAL,
    ),
    Form(
        "DeepSeek: <｜tool▁calls▁begin｜>",
        between("<｜tool▁calls▁begin｜>", r"<｜tool▁calls▁end｜>", _DEEPSEEK),
        field=fields.DEEPSEEK,
    ),
    Form(
        "Kimi: <|tool_calls_section_begin|>",
        between(r"<\|tool_calls_section_begin\|>", r"<\|tool_calls_section_end\|>", _KIMI),
        field=fields.KIMI,
    ),
    Form(
        "Gemma 4: call:name{...}",
        between(r"<\|tool_call>", r"<tool_call\|>", _quoted(re.escape('<|"|>'))),
        field=fields.GEMMA,
    ),
    Form(
        "FunctionGemma: call:name{...}",
        between("<start_function_call>", "<end_function_call>", _quoted("<escape>")),
        field=fields.FUNCTION_GEMMA,
    ),
    Form(
        "Cohere: <|START_ACTION|>", between(r"<\|START_ACTION\|>", r"<\|END_ACTION\|>", _json_text), field=fields.COHERE
    ),
    Form("Command R: Action", between(r"Action:\s*```json", "```", _json_text)),
    Form(
        "LFM2: Python in <|tool_call_start|>",
        between(r"<\|tool_call_start\|>", r"<\|tool_call_end\|>", _python),
        field=fields.LFM,
    ),
    Form(
        "Llama 4: Python in <|python_start|>",
        between(r"<\|python_start\|>", r"<\|python_end\|>", _python),
        field=fields.LLAMA_PYTHON,
    ),
    Form(
        "Phi-4: a list in <|tool_call|>", between(r"<\|tool_call\|>", r"<\|/tool_call\|>", _json_text), field=fields.PHI
    ),
    Form("Granite: a list behind <|tool_call|>", before_json(r"<\|tool_call\|>\s*(?=[\[{])"), field=fields.GRANITE),
    Form("a list in <tool_calls>", between("<tool_calls>", "</tool_calls>", _json_text), field=fields.LIST),
    Form("Nemotron: a list in <TOOLCALL>", between("<TOOLCALL>", "</TOOLCALL>", _json_text), field=fields.NEMOTRON),
    Form("Apertus: <|tools_prefix|>", between(r"<\|tools_prefix\|>", r"<\|tools_suffix\|>", _json_text)),
    Form("Solar: <|tool_call:begin|>", between(r"<\|tool_calls\|>", r"(?=<\|calls\|>)|\Z", _SOLAR)),
    Form("GigaChat: <|function_call|>", before_json(r"<\|function_call\|>\s*(?=\{)"), field=fields.GIGACHAT),
    Form(
        "Functionary: <function=name>{...}",
        before_json(r"<function=(?P<name>[\w.-]+)>(?=\{)", "</function>"),
        field=fields.FUNCTIONARY,
    ),
    Form("Llama 3: JSON", _bare_json, is_marked=False, field=fields.LLAMA),
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
