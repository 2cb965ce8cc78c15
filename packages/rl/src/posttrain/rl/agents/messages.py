"""What an agent asks of the policy and what it gets back, apart from the API that the agent speaks: an `API` of
`posttrain.rl.agents.openai_api` or `anthropic_api`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Event = tuple[str | None, dict[str, Any] | str]
"""The name of an event of a stream, None in APIs without names, and its data."""


class RequestError(Exception):
    """The request cannot be answered; the agent gets `status` and the message in its API's form of errors.

    Attributes:
        status: of HTTP. code: in the words of OpenAI's API. retry_after: seconds after which it may be asked again.
    """

    def __init__(self, message: str, status: int = 400, code: str | None = None, retry_after: int | None = None):
        super().__init__(message)
        self.status, self.code, self.retry_after = status, code, retry_after


@dataclass(frozen=True)
class Request:
    """One request of an agent.

    Attributes:
        history: messages as chat templates read them; or of completions without a chat, a text or token ids.
        tools: schemas, in the form of OpenAI's chat API. calls_tools: whether the answer may call them.
        max_tokens: of the answer at most; None: as many as the trajectory may still have.
        stop: texts that end the answer and are not part of it.
        stream: as events. wants_usage: the last of them has the number of tokens. wants_logprobs: of each token.
        counts: only the tokens of the conversation are asked for.
        model: the name that the agent has for the policy.
        previous: the id of the answer that `history` follows. instructed: its first message is the instructions, which
            stand in place of those of the conversation before. same_tools: the tools are those of that answer.
        ignored: arguments that were set and change nothing.

    Raises:
        RequestError: `max_tokens` is no number above 0, or `stop` holds something other than texts.
    """

    history: list[Message] | str | list[int]
    tools: tuple[dict[str, Any], ...] = ()
    calls_tools: bool = True
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    wants_usage: bool = False
    wants_logprobs: bool = False
    counts: bool = False
    model: str = ""
    previous: str | None = None
    instructed: bool = False
    same_tools: bool = False
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens is not None and not (type(self.max_tokens) is int and self.max_tokens > 0):
            raise RequestError(f"An answer of at most {self.max_tokens!r} tokens: send a whole number above 0.")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise RequestError(f"stop holds {list(self.stop)}: send texts that end the answer.")


@dataclass(frozen=True)
class Reply:
    """The policy's answer to a request.

    Attributes:
        number: unique among all replies of a process, for the identifiers of the APIs. created: seconds since 1970.
        text: without thoughts and calls. thoughts: before it. calls: with ids, arguments as JSON.
        finish: "stop", "length" or "tool_calls". stop: the text of the request that ended it; None: none did.
        num_read, num_written: tokens that the policy has read, and written. tokens: the text of each, where the
            request wants log-probabilities. logps: of each.
    """

    number: int
    created: int
    text: str
    thoughts: str
    calls: tuple[ReplyCall, ...]
    finish: str
    num_read: int
    num_written: int = 0
    tokens: tuple[str, ...] = ()
    logps: tuple[float, ...] | None = None
    stop: str | None = None


@dataclass(frozen=True)
class ReplyCall:
    """A call of a tool in a reply; `arguments` are JSON. In requests they may be a dict."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class API:
    """How agents of one API ask, and are answered.

    Attributes:
        read: of the JSON of a request. answer, events: of a reply to that request.
        error: ``(message, status, code)`` -> the JSON of an error.
    """

    read: Callable[[Mapping[str, Any]], Request]
    answer: Callable[[Request, Reply], dict[str, Any]]
    events: Callable[[Request, Reply], Iterator[Event]]
    error: Callable[[str, int, str | None], dict[str, Any]]


def messages_of(body: Mapping[str, Any]) -> list[Any]:
    """The conversation of a request; a RequestError where there is none."""
    found = body.get("messages")
    if not isinstance(found, list) or not found:
        raise RequestError("messages is missing or empty: send the conversation.")
    return found


def functions_of(body: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The tools of a request of OpenAI's APIs; a RequestError where one is no function."""
    tools = tuple(body.get("tools") or ())
    if kinds := {tool.get("type") for tool in tools} - {"function"}:
        raise RequestError(f"tools has the type {kinds.pop()!r}; the policy calls functions alone.")
    return tools


def fields(body: Mapping[str, Any], used: Sequence[str], neutral: Mapping[str, Any]) -> tuple[str, ...]:
    """The arguments of `body` that change nothing: not `used`, and set to another value than the `neutral` one."""
    return tuple(
        name
        for name, value in body.items()
        if name not in used and value not in (None, [], {}) and value != neutral.get(name)
    )


def text_of(content: Any, kinds: Sequence[str] = ("text", "input_text", "output_text", "refusal")) -> str:
    """The text of a message's content, which is a text, nothing, or a list of parts of these `kinds`; a RequestError
    where it has other parts, such as images.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(f"content is of type {type(content).__name__}; send a text, or a list of parts.")
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind not in kinds:
            raise RequestError(f"content has a part of type {kind!r}; the policy reads text alone.")
        texts.append(part.get("text") or part.get("refusal") or "")
    return "".join(texts)


def assistant(
    text: str | None, calls: Sequence[ReplyCall], thoughts: str = "", arguments: Callable[[str], Any] | None = None
) -> Message:
    """A message of the policy, as chat templates read it. `arguments` makes those of calls of JSON; None: as dicts."""
    message: Message = {"role": "assistant", "content": text}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = [
            {
                "id": c.id,
                "type": "function",
                "function": {"name": c.name, "arguments": (arguments or _parsed)(c.arguments)},
            }
            for c in calls
        ]
    return message


def with_names(messages: Sequence[Message]) -> list[Message]:
    """`messages` in which the answers of tools have the names of the tools, found by the ids of the calls."""
    names: dict[Any, str] = {}
    found = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool":
            message = {"name": names.get(message.get("tool_call_id"), "tool")} | message
        found.append(message)
    return found


def signature(message: Message) -> tuple[Any, ...]:
    """What of a message must be the same where a conversation goes on: what agents send back as they got it."""
    made = [call["function"] for call in message.get("tool_calls") or ()]
    calls = ((one["name"], json.dumps(one["arguments"], sort_keys=True)) for one in made)
    return message["role"], message["content"].strip(), tuple(calls)


def _parsed(arguments: Any) -> Any:
    if isinstance(arguments, Mapping):
        return dict(arguments)
    try:
        found = json.loads(arguments or "{}")
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments
