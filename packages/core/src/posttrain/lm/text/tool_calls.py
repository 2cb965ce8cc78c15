"""Checks that a chat template renders the tool calls of training conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.core.errors import DataError
from posttrain.lm.text.chat_template import PLACEHOLDER, Message, Template


def require_calls(template: Template, messages: Sequence[Message], chosen: Sequence[bool] | None = None) -> None:
    """Reject a conversation whose tool calls the template omits: it would train on empty turns.

    Args:
        chosen: the messages to check; None: all.

    Raises:
        DataError: the template omits a call.
    """
    named, count = [], 0
    for i, message in enumerate(messages):
        calls = message.get("tool_calls") if chosen is None or chosen[i] else None
        if isinstance(calls, list) and calls:
            message = message | {"tool_calls": [_renamed(call, count + n) for n, call in enumerate(calls)]}
            count += len(calls)
        named.append(message)
    if not count:
        return
    try:
        text = template.render(named)
    except DataError:  # a template may use tool names; another check covers the row itself
        return
    if any(_name(n) not in text for n in range(count)):
        name = getattr(template.tokenizer, "name_or_path", "") or type(template.tokenizer).__name__
        raise DataError(
            f"the chat template of {name} leaves out tool_calls, and turns would be learned without them; set "
            "chat_template_path to a template that shows calls, or write them into content"
        )


def _name(number: int) -> str:
    return f"{PLACEHOLDER}x{number}x"


def _renamed(call: Any, number: int) -> Any:
    """A call of a tool under a name that is found nowhere else."""
    if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
        return {**call, "function": _renamed(call["function"], number)}
    return {**call, "name": _name(number)} if isinstance(call, Mapping) else call
