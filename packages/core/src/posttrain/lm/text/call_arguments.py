"""Converts the arguments of tool calls to the form that a chat template expects: a dict or a JSON text.

OpenAI's protocol has them as JSON text. A template that serializes a dict would serialize that text again, and the
model would learn invalid calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.core.errors import DataError

MARK = "posttrain7d20e1"
_TURNS = tuple(  # some templates show a call only where the turn has no content
    {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"id": "call00000", "type": "function", "function": {"name": "find", "arguments": {"what": MARK}}}
        ],
    }
    for content in ("", None)
)


def are_text(render: Callable[[list[dict[str, Any]]], str]) -> bool:
    """Whether a chat template inserts arguments unchanged, so that it needs JSON text: found with a test call.
    `render`: the text of a conversation; raises DataError where the template refuses it.
    """
    return not _shows_json(render, as_text=False) and _shows_json(render, as_text=True)


def _shows_json(render: Callable[[list[dict[str, Any]]], str], as_text: bool) -> bool:
    """Whether a call is shown, and its arguments neither as python writes a dict, nor as JSON of a JSON text."""
    for turn in _TURNS:
        try:
            text = render([{"role": "user", "content": "?"}, *put([turn], as_text)])
        except DataError:
            continue
        if MARK in text and "'what'" not in text and f'\\"{MARK}' not in text:
            return True
    return False


def put(messages: Sequence[dict[str, Any]], as_text: bool) -> list[dict[str, Any]]:
    """`messages` with the arguments of their calls as JSON text, or as dicts. Raises a `DataError` where arguments that
    should be a dict are a text that is no JSON, or JSON of something else.
    """
    return [
        message | {"tool_calls": [_put(call, as_text) for call in calls]}
        if isinstance(calls := message.get("tool_calls"), (list, tuple))
        else message
        for message in messages
    ]


def _put(call: Any, as_text: bool) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _put(call["function"], as_text)}
    arguments = call.get("arguments")
    if as_text and isinstance(arguments, Mapping):
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return call if as_text or not isinstance(arguments, str) else {**call, "arguments": _decoded(arguments)}


def _decoded(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text) if text.strip() else {}
    except json.JSONDecodeError:
        raise DataError("the arguments of a call in tool_calls are a text that is not valid JSON") from None
    if not isinstance(value, dict):
        raise DataError("the arguments of a call in tool_calls are JSON, but not of an object with named arguments")
    return value
