"""Functions that bring a row into another format by hand, under the names that scripts for trl call.

No trainer here needs them: each renders messages, reads ShareGPT turns and places images itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.core.errors import DataError
from posttrain.lm.images.vision import place_images
from posttrain.lm.text.chat_template import Message, is_conversational, to_messages

TALKS = ("messages", "conversations")
COMPLETIONS = ("completion", "chosen", "rejected")
#: What the last message of a prompt asks of the chat template.
NEXT = {
    "user": {"add_generation_prompt": True},
    "tool": {"add_generation_prompt": True},
    "assistant": {"continue_final_message": True},
}


def is_conversational_from_value(row: Mapping[str, Any]) -> bool:
    """Whether a row has ShareGPT turns, ``{"from": ..., "value": ...}``, in a column ``conversations``."""
    turns = row.get("conversations")
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], Mapping) and "from" in turns[0]


def maybe_convert_to_chatml(row: Mapping[str, Any]) -> dict[str, Any]:
    """`row` with messages in place of ShareGPT turns, and ``messages`` in place of ``conversations``.

    Speakers are named as chat templates know them ("human" is "user", "gpt" is "assistant").

    Raises:
        DataError: a speaker is unknown, or a turn has no text.
    """
    made = {name: to_messages(value, name) if _is_talk(value) else value for name, value in row.items()}
    if "conversations" in made:
        made["messages"] = made.pop("conversations")
    return made


def apply_chat_template(
    row: Mapping[str, Any], processing_class: Any, tools: Sequence[Any] | None = None, **template_kwargs: Any
) -> dict[str, Any]:
    """The texts of a conversational row, rendered by the chat template of `processing_class`.

    ``messages`` become ``text``. A prompt is rendered up to where the answer begins, and ``completion``, ``chosen`` and
    ``rejected`` are what follows: the prompt and one of them are the whole conversation. A ``label`` is kept.

    Args:
        row: a ``chat_template_kwargs`` in it goes to the template.
        tools: functions or their JSON schemas, which the template describes.
        template_kwargs: variables of the template.

    Raises:
        DataError: the row holds no messages, or its prompt ends with a message that no answer follows.
    """
    options = {**(row.get("chat_template_kwargs") or {}), **template_kwargs, "tools": list(tools or ()) or None}

    def render(messages: list[Message], **more: Any) -> str:
        return processing_class.apply_chat_template(messages, tokenize=False, **options, **more)

    if (name := next((name for name in TALKS if name in row), None)) is not None:
        return {"text": render(to_messages(row[name], name))}
    prompt = to_messages(row["prompt"], "prompt") if "prompt" in row else []
    given = {name: to_messages(row[name], name) for name in COMPLETIONS if name in row}
    if not prompt and not given:
        raise DataError(
            f"apply_chat_template: the row has the columns {', '.join(row)}, and none of messages, prompt, completion, "
            "chosen and rejected. Rename the one that holds the messages."
        )
    made = {name: render(prompt + messages) for name, messages in given.items()}
    if prompt:
        # Some templates begin an answer with marks that a given one need not have.
        begun = os.path.commonprefix([render(prompt, **_next(prompt)), *made.values()])
        made = {"prompt": begun} | {name: text[len(begun) :] for name, text in made.items()}
    return made | ({"label": row["label"]} if "label" in row else {})


def maybe_apply_chat_template(
    row: Mapping[str, Any], processing_class: Any, tools: Sequence[Any] | None = None, **template_kwargs: Any
) -> Mapping[str, Any]:
    """`apply_chat_template` of a conversational row; any other row as it is."""
    return apply_chat_template(row, processing_class, tools, **template_kwargs) if is_conversational(row) else row


def prepare_multimodal_messages(
    messages: Sequence[Mapping[str, Any]], images: Sequence[Any] | None = None
) -> list[Message]:
    """`messages` whose contents are lists of parts, with `images` in the parts that wait for one.

    Where no part waits, they come before the text of the user's first message.

    Raises:
        DataError: there are more images than places for them, or fewer.
    """
    row, shown = place_images({"messages": list(messages), "images": list(images or ())}, ("messages",))
    waiting = iter(shown)
    for message in row["messages"]:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part["type"] in ("image", "video"):
                part[part["type"]] = next(waiting)
    return row["messages"]


def _is_talk(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, Mapping) and ("role" in first or "from" in first)


def _next(prompt: Sequence[Message]) -> dict[str, bool]:
    role = prompt[-1]["role"]
    if role not in NEXT:
        raise DataError(
            f"apply_chat_template: the prompt ends with a message of the role {role!r}; end it with one of "
            f"{', '.join(NEXT)}"
        )
    return NEXT[role]
