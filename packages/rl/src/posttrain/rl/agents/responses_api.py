"""OpenAI's responses, https://platform.openai.com/docs/api-reference/responses: texts and calls of functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.rl.agents.chat_api import ROLES, error
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
    functions_of,
    text_of,
)

READ = (
    "model input instructions tools tool_choice parallel_tool_calls stream max_output_tokens previous_response_id "
    "store include metadata user prompt_cache_key"
).split()
NEUTRAL = {"text": {"format": {"type": "text"}}, "truncation": "disabled", "background": False, "service_tier": "auto"}


def read(body: Mapping[str, Any]) -> Request:
    """The request of ``/v1/responses``."""
    given, instructions = body.get("input"), body.get("instructions")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not items or not isinstance(items, list):
        raise RequestError("input is missing or empty: send a text, or a list of items.")
    own = ("name", "description", "parameters")
    return Request(
        history=[*([{"role": "system", "content": instructions}] if instructions else []), *_messages(items)],
        tools=tuple({"type": "function", "function": {name: t.get(name) for name in own}} for t in functions_of(body)),
        calls_tools=body.get("tool_choice") != "none",
        max_tokens=body.get("max_output_tokens"),
        stream=bool(body.get("stream")),
        model=body.get("model") or "",
        previous=body.get("previous_response_id"),
        ignored=fields(body, READ, NEUTRAL),
    )


def _messages(items: list[Any]) -> list[Message]:
    """The messages that `items` amount to: a text of the assistant and the calls behind it are one."""
    found: list[Message] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            role = ROLES.get(item["role"], item["role"])
            text = text_of(item.get("content"))
            found.append(assistant(text, ()) if role == "assistant" else {"role": role, "content": text})
        elif kind == "function_call":
            calls = assistant("", [ReplyCall(item["call_id"], item["name"], item["arguments"])])["tool_calls"]
            if not found or found[-1]["role"] != "assistant":
                found.append(assistant("", ()))
            found[-1] = found[-1] | {"tool_calls": [*found[-1].get("tool_calls", ()), *calls]}
        elif kind == "function_call_output":
            answer = text_of(item["output"])
            found.append({"role": "tool", "content": answer, "tool_call_id": item["call_id"]})
        elif kind != "reasoning":
            raise RequestError(f"input has an item of type {kind!r}; send messages, calls of functions and outputs.")
    return found


def _output(reply: Reply) -> list[dict[str, Any]]:
    """The items of the answer."""
    found: list[dict[str, Any]] = []
    if reply.text or not reply.calls:
        part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{reply.number}", "role": "assistant", "status": "completed"}
        found.append(message | {"content": [part]})
    for place, call in enumerate(reply.calls):
        item = {"type": "function_call", "id": f"fc_{reply.number}_{place}", "status": "completed"}
        found.append(item | {"call_id": call.id, "name": call.name, "arguments": call.arguments})
    return found


def answer(request: Request, reply: Reply) -> dict[str, Any]:
    """The body that answers ``/v1/responses``."""
    whole, written = reply.finish != "length", len(reply.tokens)
    usage: dict[str, Any] = {
        "input_tokens": reply.num_read,
        "output_tokens": written,
        "total_tokens": reply.num_read + written,
    }
    usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in request.tools]
    return {
        "id": f"resp_{reply.number}",
        "object": "response",
        "created_at": reply.created,
        "status": "completed" if whole else "incomplete",
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "error": None,
        "model": request.model,
        "output": _output(reply),
        "usage": usage,
        "tools": tools,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "previous_response_id": request.previous,
        "metadata": {},
    }


def events(request: Request, reply: Reply) -> Iterator[Event]:
    """The events of a streamed answer."""
    whole = answer(request, reply)
    begun = whole | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    made: list[tuple[str, dict[str, Any]]] = [("created", {"response": begun}), ("in_progress", {"response": begun})]
    for place, item in enumerate(whole["output"]):
        at = {"output_index": place, "item_id": item["id"]}
        if item["type"] == "message":
            (part,) = item["content"]
            at_part, text = at | {"content_index": 0}, part["text"]
            made += [
                ("output_item.added", at | {"item": item | {"content": [], "status": "in_progress"}}),
                ("content_part.added", at_part | {"part": part | {"text": ""}}),
                ("output_text.delta", at_part | {"delta": text, "logprobs": []}),
                ("output_text.done", at_part | {"text": text, "logprobs": []}),
                ("content_part.done", at_part | {"part": part}),
            ]
        else:
            arguments = item["arguments"]
            made += [
                ("output_item.added", at | {"item": item | {"arguments": "", "status": "in_progress"}}),
                ("function_call_arguments.delta", at | {"delta": arguments}),
                ("function_call_arguments.done", at | {"arguments": arguments, "name": item["name"]}),
            ]
        made.append(("output_item.done", at | {"item": item}))
    made.append(("completed" if whole["status"] == "completed" else "incomplete", {"response": whole}))
    for number, (name, data) in enumerate(made):
        yield f"response.{name}", {"type": f"response.{name}", "sequence_number": number} | data


RESPONSES = API(read, answer, events, error)
