"""Anthropic's messages, https://docs.anthropic.com/en/api/messages: texts and calls of tools; and the count of their
tokens, https://docs.anthropic.com/en/api/messages-count-tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from posttrain.rl.agents.messages import (
    API,
    Event,
    Message,
    Reply,
    ReplyCall,
    Request,
    RequestError,
    assistant,
    fields,
    messages_of,
    text_of,
)

READ = "model messages system tools tool_choice max_tokens stop_sequences stream metadata thread".split()
NEUTRAL = {"thinking": {"type": "disabled"}, "service_tier": "auto"}
STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
ERRORS |= {429: "rate_limit_error", 529: "overloaded_error"}


def read(body: Mapping[str, Any]) -> Request:
    """The request of ``/v1/messages``."""
    messages, tools, thread = messages_of(body), body.get("tools") or (), body.get("thread") or {}
    if named := [tool.get("name") for tool in tools if "input_schema" not in tool]:
        raise RequestError(f"The tool {named[0]!r} has no input_schema; the policy calls the agent's own tools alone.")
    system = text_of(body.get("system"))
    return Request(
        history=[
            *([{"role": "system", "content": system}] if system else []),
            *(one for message in messages for one in _messages(message)),
        ],
        tools=tuple(map(_schema, tools)),
        calls_tools=(body.get("tool_choice") or {}).get("type") != "none",
        max_tokens=body.get("max_tokens"),
        stop=tuple(body.get("stop_sequences") or ()),
        stream=bool(body.get("stream")),
        model=body.get("model") or "",
        previous=thread.get("previous_message_id"),
        instructed=bool(system),
        same_tools=not tools,
        ignored=fields(body, READ, NEUTRAL),
    )


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _messages(message: Mapping[str, Any]) -> list[Message]:
    """The messages that one of the API amounts to: answers of tools stand in those of the user."""
    role, content = message.get("role"), message.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    of = {kind: [block for block in blocks if block.get("type") == kind] for kind in ("tool_use", "tool_result")}
    aside = ("tool_use", "tool_result", "thinking", "redacted_thinking")
    rest = [block for block in blocks if block.get("type") not in aside]
    text = text_of(rest)
    if role == "assistant":
        return [assistant(text, [ReplyCall(b["id"], b["name"], json.dumps(b["input"])) for b in of["tool_use"]])]
    answers = [
        {"role": "tool", "content": text_of(block.get("content")), "tool_call_id": block.get("tool_use_id")}
        for block in of["tool_result"]
    ]
    return [*answers, *([{"role": role, "content": text}] if rest or not answers else [])]


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    texts = [{"type": "text", "text": reply.text}] if reply.text or not reply.calls else []
    return texts + [
        {"type": "tool_use", "id": c.id, "name": c.name, "input": json.loads(c.arguments)} for c in reply.calls
    ]


def answer(request: Request, reply: Reply) -> dict[str, Any]:
    """The body that answers ``/v1/messages``."""
    return {
        "id": f"msg_{reply.number}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": _blocks(reply),
        "stop_reason": STOPS[reply.finish] if reply.calls or reply.stop is None else "stop_sequence",
        "stop_sequence": reply.stop,
        "usage": {"input_tokens": reply.num_read, "output_tokens": reply.num_written},
    }


def events(request: Request, reply: Reply) -> Iterator[Event]:
    """The events of a streamed answer."""
    whole = answer(request, reply)
    begun = whole | {
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": whole["usage"] | {"output_tokens": 0},
    }
    made: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for place, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            empty = block | {"input": {}}
        made += [
            {"type": "content_block_start", "index": place, "content_block": empty},
            {"type": "content_block_delta", "index": place, "delta": delta},
            {"type": "content_block_stop", "index": place},
        ]
    delta = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    made += [{"type": "message_delta", "delta": delta, "usage": whole["usage"]}, {"type": "message_stop"}]
    for data in made:
        yield data["type"], data


def error(message: str, status: int, code: str | None) -> dict[str, Any]:
    """The body of an error of Anthropic's API."""
    kind = ERRORS.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def read_to_count(body: Mapping[str, Any]) -> Request:
    """The request of ``/v1/messages/count_tokens``."""
    return replace(read(body), counts=True, stream=False)


MESSAGES = API(read, answer, events, error)
COUNT = API(read_to_count, lambda request, reply: {"input_tokens": reply.num_read}, events, error)
