"""OpenAI's APIs: chat completions and completions, https://platform.openai.com/docs/api-reference/chat, and responses,
https://platform.openai.com/docs/api-reference/responses, of texts and calls of functions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
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
    functions_of,
    messages_of,
    text_of,
)

READ = ("model", "stop", "stream", "stream_options", "max_tokens", "max_completion_tokens", "logprobs", "n", "user")
OF_CHAT = (*READ, "messages", "tools", "tool_choice", "parallel_tool_calls", "store", "metadata")
NEUTRAL = {"n": 1, "top_logprobs": 0, "presence_penalty": 0, "frequency_penalty": 0, "best_of": 1, "suffix": ""}
ROLES = {"developer": "system", "function": "tool"}
OF_RESPONSES = (
    "model input instructions tools tool_choice parallel_tool_calls stream max_output_tokens previous_response_id "
    "store include metadata user prompt_cache_key background"
).split()
UNSET = {
    "text": {"format": {"type": "text"}},
    "truncation": "disabled",
    "service_tier": "auto",
}


def read_chat(body: Mapping[str, Any]) -> Request:
    """The request of ``/v1/chat/completions``."""
    return Request(
        history=[read_message(message) for message in messages_of(body)],
        tools=functions_of(body),
        calls_tools=body.get("tool_choice") != "none",
        ignored=fields(body, OF_CHAT, NEUTRAL | {"response_format": {"type": "text"}}),
        **_common(body),
    )


def read_message(message: Any) -> Message:
    """A message of the API, as chat templates read it."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError("messages holds something without a role; a message has role and content.")
    role, text = ROLES.get(message["role"], message["role"]), text_of(message.get("content") or message.get("refusal"))
    if role == "assistant":
        calls = [
            ReplyCall(c.get("id", ""), c["function"]["name"], c["function"].get("arguments") or "{}")
            for c in message.get("tool_calls") or ()
            if c.get("type", "function") == "function"
        ]
        return assistant(text, calls)
    found = {"role": role, "content": text}
    return found | {name: message[name] for name in ("tool_call_id", "name") if role == "tool" and message.get(name)}


def read_completion(body: Mapping[str, Any]) -> Request:
    """The request of ``/v1/completions``: of one prompt, a text or token ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt):
        raise RequestError("prompt holds several prompts; send one request for each.")
    if not prompt or not isinstance(prompt, (str, list)):
        raise RequestError("prompt is missing or empty: send a text, or token ids.")
    if body.get("echo"):
        raise RequestError("echo is not supported: the answer is what the policy writes behind the prompt.")
    return Request(prompt, ignored=fields(body, (*READ, "prompt", "echo"), NEUTRAL), **_common(body))


def _common(body: Mapping[str, Any]) -> dict[str, Any]:
    if body.get("n", 1) not in (1, None):
        raise RequestError(f"n={body['n']}: a trajectory goes on in one way; leave n out, or send several requests.")
    limit, stop = body.get("max_completion_tokens"), body.get("stop") or ()
    return {
        "max_tokens": body.get("max_tokens") if limit is None else limit,
        "stop": (stop,) if isinstance(stop, str) else tuple(stop),
        "stream": bool(body.get("stream")),
        "wants_usage": bool((body.get("stream_options") or {}).get("include_usage")),
        "wants_logprobs": body.get("logprobs") is not None and body["logprobs"] is not False,  # 0 asks for them
        "model": body.get("model") or "",
    }


def _head(request: Request, reply: Reply, kind: str, prefix: str = "chatcmpl") -> dict[str, Any]:
    return {"id": f"{prefix}-{reply.number}", "object": kind, "created": reply.created, "model": request.model}


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.num_read,
        "completion_tokens": reply.num_written,
        "total_tokens": reply.num_read + reply.num_written,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def _logprobs(reply: Reply) -> dict[str, Any] | None:
    if reply.logps is None:
        return None
    pairs = zip(reply.tokens, reply.logps, strict=True)
    return {
        "content": [
            {"token": text, "logprob": logp, "bytes": list(text.encode()), "top_logprobs": []} for text, logp in pairs
        ],
        "refusal": None,
    }


def _message(reply: Reply) -> Message:
    return assistant(reply.text if reply.text or not reply.calls else None, reply.calls, reply.thoughts, str)


def answer_chat(request: Request, reply: Reply) -> dict[str, Any]:
    """The body that answers ``/v1/chat/completions``."""
    choice = {"index": 0, "message": {"refusal": None} | _message(reply), "finish_reason": reply.finish}
    choice["logprobs"] = _logprobs(reply)
    return _head(request, reply, "chat.completion") | {"choices": [choice], "usage": _usage(reply)}


def stream_chat(request: Request, reply: Reply) -> Iterator[Event]:
    """The chunks of a streamed answer: role, thoughts, text, each call, the reason of the end, and what was used."""
    head = _head(request, reply, "chat.completion.chunk")
    message = _message(reply)
    calls = [{"index": i} | call for i, call in enumerate(message.pop("tool_calls", ()))]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
    deltas += [{"tool_calls": [call]} for call in calls]
    for delta in deltas:
        choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}
        if delta.get("content"):
            choice["logprobs"] = _logprobs(reply)
        yield None, head | {"choices": [choice]}
    yield None, head | {"choices": [{"index": 0, "delta": {}, "finish_reason": reply.finish}]}
    if request.wants_usage:
        yield None, head | {"choices": [], "usage": _usage(reply)}
    yield None, "[DONE]"


def answer_completion(request: Request, reply: Reply) -> dict[str, Any]:
    """The body that answers ``/v1/completions``."""
    logprobs = None
    if reply.logps is not None:
        offsets = [0, *itertools.accumulate(map(len, reply.tokens))][: len(reply.tokens)]
        logprobs = {"tokens": [*reply.tokens], "token_logprobs": [*reply.logps], "text_offset": offsets}
        logprobs["top_logprobs"] = None
    choice = {"index": 0, "text": reply.text, "finish_reason": reply.finish, "logprobs": logprobs}
    return _head(request, reply, "text_completion", "cmpl") | {"choices": [choice], "usage": _usage(reply)}


def stream_completion(request: Request, reply: Reply) -> Iterator[Event]:
    """The chunks of a streamed completion."""
    whole = answer_completion(request, reply)
    yield None, whole if request.wants_usage else {name: whole[name] for name in whole if name != "usage"}
    yield None, "[DONE]"


def error(message: str, status: int, code: str | None) -> dict[str, Any]:
    """The body of an error of OpenAI's APIs."""
    kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(status)
    kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def read_response(body: Mapping[str, Any]) -> Request:
    """The request of ``/v1/responses``."""
    given, instructions = body.get("input"), body.get("instructions")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not items or not isinstance(items, list):
        raise RequestError("input is missing or empty: send a text, or a list of items.")
    if held := [name for name in ("conversation", "prompt", "background") if body.get(name)]:
        raise RequestError(f"{held[0]} is kept by OpenAI's server alone; send the items, or previous_response_id.")
    own = ("name", "description", "parameters")
    return Request(
        history=[*([{"role": "system", "content": instructions}] if instructions else []), *_messages(items)],
        tools=tuple({"type": "function", "function": {name: t.get(name) for name in own}} for t in functions_of(body)),
        calls_tools=body.get("tool_choice") != "none",
        max_tokens=body.get("max_output_tokens"),
        stream=bool(body.get("stream")),
        model=body.get("model") or "",
        previous=body.get("previous_response_id"),
        instructed=bool(instructions),
        ignored=fields(body, OF_RESPONSES, UNSET),
    )


def _messages(items: list[Any]) -> list[Message]:
    """The messages that `items` amount to: a text of the assistant and the calls behind it are one."""
    found: list[Message] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            found.append(read_message(item))
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


def answer_response(request: Request, reply: Reply) -> dict[str, Any]:
    """The body that answers ``/v1/responses``."""
    whole, written = reply.finish != "length", reply.num_written
    usage: dict[str, Any] = {"input_tokens": reply.num_read, "output_tokens": written}
    usage["total_tokens"] = reply.num_read + written
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


def stream_response(request: Request, reply: Reply) -> Iterator[Event]:
    """The events of a streamed answer."""
    whole = answer_response(request, reply)
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


CHAT = API(read_chat, answer_chat, stream_chat, error)
COMPLETIONS = API(read_completion, answer_completion, stream_completion, error)
RESPONSES = API(read_response, answer_response, stream_response, error)
