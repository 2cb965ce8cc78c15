"""Ends the assistant's turns where a chat template does not: by the token that opens the next message.

Such are the templates of GLM, whose models stop by ``<|user|>``, and after calls of tools by ``<|observation|>``. A
model that is trained on turns without them does not learn to stop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.core.errors import DataError
from posttrain.core.models.special_tokens import tokenizer_of
from posttrain.lm.text.tokenization import Span

_QUESTION, _ANSWER = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "find", "arguments": {"what": "it"}}}
_RESULT = {"role": "tool", "name": "find", "content": "!", "tool_call_id": "call00000"}


def find(render: Callable[[list[dict[str, Any]]], str], tokenizer: Any) -> dict[str, str]:
    """The token that opens the message after a turn, by that message's role, user or tool; empty if there is none.

    Args:
        render: messages -> their text; raises `DataError` where the template refuses them.
        tokenizer: or a processor; its added tokens are those that may open a message.
    """
    tokens = [token.content for token in tokenizer_of(tokenizer).added_tokens_decoder.values()]

    def opening(turn: dict[str, Any], following: dict[str, Any], ending: str = "") -> str:
        try:
            before, after = render([_QUESTION, turn]), render([_QUESTION, turn, following])
        except DataError:
            return ""
        rest = after[len(before) :] if after.startswith(before) and before.endswith(ending) else ""
        return max(filter(rest.startswith, tokens), key=len, default="")

    if not (user := opening(_ANSWER, _QUESTION, ending=_ANSWER["content"])):
        return {}
    tool = opening(_ANSWER | {"tool_calls": [_CALL]}, _RESULT)
    return {"user": user} | ({"tool": tool} if tool else {})


def after(closers: Mapping[str, str], messages: Sequence[Mapping[str, Any]]) -> str:
    """What to add to the text of `messages`, whose last turn nothing follows; empty if it is not the assistant's."""
    last = messages[-1]
    return closers.get("tool" if last.get("tool_calls") else "user", "") if last["role"] == "assistant" else ""


def include(
    closers: Mapping[str, str], messages: Sequence[Mapping[str, Any]], text: str, spans: list[Span]
) -> tuple[str, list[Span]]:
    """`text` and the assistant's `spans` in it, each with the token that ends it; after a last turn it is added."""
    if not closers or not spans:
        return text, spans
    if spans[-1][1] == len(text):
        text += after(closers, messages)
    lengths = [
        max((len(end) for end in closers.values() if text.startswith(end, stop)), default=0) for _, stop in spans
    ]
    return text, [(start, stop + length) for (start, stop), length in zip(spans, lengths, strict=True)]
