"""Detects dataset formats, renders conversations with chat templates and finds the assistant's tokens.

Conversations are lists of messages, ``{"role": ..., "content": ...}``. The assistant's spans are found by rendering the
conversation up to each turn, so any chat template works.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import compress
from typing import Any

from posttrain.core.errors import DataError
from posttrain.lm.text import call_arguments, layouts, turn_closers
from posttrain.lm.text.tokenization import (
    Encoding,
    Span,
    encode_fast,
    encode_texts,
    has_doubled_bos,
    is_fast,
    special_tokens_around,
    token_at,
)
from posttrain.lm.text.tokenizer_setup import load_template, set_up_tokenizer, token_problems

__all__ = [
    "FORMATS", "ROLES", "Encoding", "Message", "Span", "Template", "detect_format", "encode_texts", "end_tokens",
    "has_doubled_bos", "is_conversational", "load_template", "message_choice", "require_calls", "set_up_tokenizer",
    "sharegpt_to_messages", "special_tokens_around", "to_messages", "to_tools", "token_problems",
]  # fmt: skip

Message = dict[str, Any]

FORMATS: dict[str, tuple[frozenset[str], ...]] = {
    "tokenized": (frozenset({"input_ids"}),),
    "preference": (frozenset({"chosen", "rejected"}),),
    "stepwise_supervision": (frozenset({"prompt", "completions", "labels"}),),
    "unpaired_preference": (frozenset({"prompt", "completion", "label"}),),
    "prompt_completion": (frozenset({"prompt", "completion"}),),
    "language_modeling": (frozenset({"messages"}), frozenset({"conversations"}), frozenset({"text"})),
    "prompt_only": (frozenset({"prompt"}),),
}
"""Format -> sets of columns. A row has the first format of which it has one whole set."""

ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
"""ShareGPT's speakers -> the roles of a chat template."""

MESSAGE_FLAGS = ("train", "weight")
"""Keys that mark a message as trained or not. Chat templates never see them."""

# A placeholder that no conversation contains and no template changes; it shows where a message is rendered.
PLACEHOLDER = "posttrain4f1c9a"
UNCLEAR = "the chat template does not show where the messages that are trained on start and stop"
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


def detect_format(columns: Iterable[str], among: Iterable[str] = FORMATS) -> str:
    """The format of a dataset with these columns (or of a row, whose keys are its columns). Raises a `DataError` where
    no format fits, which names the columns found and wanted.

    Args:
        columns: column names, or a row.
        among: the formats to choose from, best first.
    """
    names, among = set(columns), list(among)
    for name in among:
        if any(wanted <= names for wanted in FORMATS[name]):
            return name
    wanted = "; ".join(" and ".join(sorted(columns)) for name in among for columns in FORMATS[name])
    fits = {"prompt_completion": ("prompt", "completion"), "preference": ("prompt", "chosen", "rejected")}
    hint = next((hint for one in among if (hint := layouts.rename_hint(columns, fits.get(one, ())))), "")
    raise DataError(f"The columns {sorted(names)} fit no format. Rename them to one of: {wanted}.{hint}")


def is_conversational(row: Mapping[str, Any]) -> bool:
    """Whether a row holds messages rather than text."""
    for name in ("messages", "conversations", "prompt", "completion", "chosen", "rejected"):
        value = row.get(name)
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            return "role" in value[0] or "from" in value[0]
    return False


def sharegpt_to_messages(row: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[Message]:
    """``{"from": "human", "value": "Hi"}`` -> ``{"role": "user", "content": "Hi"}``, for each turn of a row. `row`: a
    row with a ``conversations`` column, or that column's value. Raises a `DataError` where a turn lacks ``from`` or
    ``value``, or has an unknown speaker.
    """
    messages = []
    for turn in row["conversations"] if isinstance(row, Mapping) else row:
        if "from" not in turn or "value" not in turn:
            raise DataError("a turn has no 'from' or no 'value'")
        if turn["from"] not in ROLES:
            raise DataError(f"unknown speaker {turn['from']!r}; known are {', '.join(ROLES)}")
        messages.append({"role": ROLES[turn["from"]], "content": turn["value"]})
    return messages


def to_messages(value: Any, name: str = "messages") -> list[Message]:
    """Check a conversation and convert it to the form that chat templates read.

    Reads ShareGPT turns too and drops keys that are None, which Arrow adds. Raises DataError without the value.
    """
    if value is None:
        raise DataError(f"{name} is null")
    if not isinstance(value, (list, tuple)):
        raise DataError(f"{name} is not a list of messages but of type {type(value).__name__}")
    if others := {type(message).__name__ for message in value if not isinstance(message, Mapping)}:
        raise DataError(f"{name} is not a list of messages but holds {min(others)}")
    if not value:
        raise DataError(f"{name} is empty")
    if "from" in value[0]:
        value = sharegpt_to_messages(value)
    messages = []
    for message in value:
        if not isinstance(message.get("role"), str):
            raise DataError(f"a message in {name} has no role")
        content = message.get("content")
        if content is None and not any(message.get(key) for key in ("tool_calls", "reasoning_content", "thinking")):
            raise DataError(f"the content of a message in {name} is null")
        if not isinstance(content, (str, list, type(None))):
            raise DataError(f"the content of a message in {name} is neither text nor a list of parts")
        kept = {key: value for key, value in message.items() if key not in MESSAGE_FLAGS}
        messages.append({"content": ""} | _without_none(kept))
    return messages


def message_choice(
    value: Sequence[Mapping[str, Any]], train_on: str | Sequence[str] | None = None
) -> list[bool] | None:
    """The messages of a conversation to train on; None for all of its text, headers of turns included. Raises a
    `DataError` for a flag that is neither true nor false.

    Args:
        value: messages or ShareGPT turns; a message's ``"train": true`` or ``"weight": 1`` wins over its role.
        train_on: roles, "all" or "last" (the assistant's last). None: all; the assistant's if any message is flagged.
    """
    if not any(name in message for message in value for name in MESSAGE_FLAGS) and train_on in (None, "all"):
        return None
    roles = [message["role"] if "role" in message else ROLES.get(message.get("from", "")) for message in value]
    if train_on == "last":
        last = max((i for i, role in enumerate(roles) if role == "assistant"), default=-1)
        chosen = [i == last for i in range(len(roles))]
    else:
        wanted = {train_on or "assistant"} if isinstance(train_on, str | None) else set(train_on)
        chosen = [role in wanted or "all" in wanted for role in roles]
    flags = [_flag(message) for message in value]
    return [by_role if flag is None else flag for by_role, flag in zip(chosen, flags, strict=True)]


def _flag(message: Mapping[str, Any]) -> bool | None:
    for name in MESSAGE_FLAGS:
        if (flag := message.get(name)) is not None:
            if isinstance(flag, str) or flag not in (0, 1):
                raise DataError(f"the {name} of a message is neither true nor false (1 nor 0)")
            return bool(flag)
    return None


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, (list, tuple)) else value


def to_tools(value: Any) -> list[Any] | None:
    """The ``tools`` column: a list of schemas, or the same as JSON; None where there are none."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise DataError("tools is not valid JSON") from None
    if value is None or isinstance(value, list):
        return [_without_none(tool) if isinstance(tool, Mapping) else tool for tool in value or ()] or None
    raise DataError("tools is not a list")


class Template:
    """A tokenizer's chat template with fixed arguments.

    Args:
        tokenizer: has ``apply_chat_template`` and a ``chat_template``.
        tools: schemas or functions that the template describes to the model.
        chat_template_kwargs: variables for the template, e.g. ``{"enable_thinking": False}``.
    """

    def __init__(
        self, tokenizer: Any, tools: list[Any] | None = None, chat_template_kwargs: dict[str, Any] | None = None
    ) -> None:
        if not tokenizer.chat_template and "chat_template" not in (chat_template_kwargs or {}):
            raise DataError(
                "The rows are conversations, but the tokenizer has no chat template. Load one with "
                "chat_template_path, set tokenizer.chat_template, or give rows of text"
            )
        self.tokenizer, self.tools, self.kwargs = tokenizer, tools, dict(chat_template_kwargs or {})

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, continue_final_message: bool = False
    ) -> str:
        """The text of a conversation. Raises a `DataError` where the template refused it (e.g. roles that do not
        alternate), or arguments of calls are no JSON.
        """
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        return self._render(self._with_arguments(messages), **options)

    def _with_arguments(self, messages: Sequence[Message]) -> list[Message]:
        """`messages` with the arguments of their calls in the form that the template takes."""
        if not any(message.get("tool_calls") for message in messages):
            return list(messages)
        return call_arguments.put(messages, self.takes_text)

    @cached_property
    def takes_text(self) -> bool:
        """Whether the template takes the arguments of calls as JSON text, and not as dicts."""
        return call_arguments.are_text(self._render)

    def _render(self, messages: list[Message], **options: Any) -> str:
        options = {"tools": self.tools, "tokenize": False, **options, **self.kwargs}
        try:
            return self.tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # a template is a program and may raise anything
            raise DataError(f"the chat template refused the conversation ({type(error).__name__}: {error})") from error

    def prompt_length(self, prompt: Sequence[Message], text: str, next_role: str = "assistant") -> int:
        """The number of characters that `prompt` takes of `text`, a rendered conversation that begins with it.

        The prompt is what the model is given before it writes: with the generation prompt, or, where it ends in an
        unfinished turn of the assistant, with that turn left open. If a template renders the end of a prompt
        differently in a longer conversation (an empty thought, for example), the common part counts. Where the
        completion begins with a message of another role, `next_role`, the prompt is what its messages render to. Raises
        a `DataError` where the template renders the prompt's messages differently in the conversation.
        """
        answers = next_role == "assistant"
        unfinished = answers and prompt[-1]["role"] == "assistant"
        asked = self.render(prompt, add_generation_prompt=answers and not unfinished, continue_final_message=unfinished)
        if text.startswith(asked):
            return len(asked)
        agreed = len(os.path.commonprefix([asked, text]))
        if unfinished or agreed < len(self.render(prompt)):
            raise DataError("the chat template renders the prompt differently when the completion follows")
        return agreed

    def trained_spans(
        self, messages: Sequence[Message], chosen: Sequence[bool] | None = None
    ) -> tuple[str, list[Span]]:
        """The text of a conversation, and where in it the `chosen` messages stand, end-of-turn token included; None:
        those of the assistant.

        The assistant's text begins where the generation prompt ends. Marks of the template, ``{% generation %}``, are
        used where there are any. Otherwise the turn is the difference between two renderings, of all messages before it
        with the generation prompt and of all up to it; its content must be in there. Where that fails (templates that
        drop the thoughts of earlier turns), and for other roles, a rendering with a placeholder locates the message:
        the text before and after it must not change.

        Of a template that ends no turn of the assistant, the token that opens the next message ends it, see
        `posttrain.lm.text.turn_closers`; after a last turn it is added to the text. Raises a `DataError` where neither
        way finds where a message starts and stops.
        """
        spans: list[Span] = []
        is_answer = [message["role"] == "assistant" for message in messages]
        chosen = is_answer if chosen is None else chosen
        if self._marks_generation:
            text, marks = self._marked_spans(messages)
            if list(chosen) == is_answer:
                return turn_closers.include(self.turn_closers, messages, text, marks)
        else:
            text, marks = self.render(messages), None
        for i in compress(range(len(messages)), chosen):
            earlier = spans[-1][1] if spans else 0
            span = self._turn_by_prefix(messages, i, text) if is_answer[i] else None
            start, stop = span or self._turn_by_placeholder(messages, i, text, earlier)
            if not earlier <= start <= stop:
                raise DataError(UNCLEAR)
            if marks is not None and is_answer[i]:
                spans += [(max(a, start), min(b, stop)) for a, b in marks if a < stop and b > start]
            else:
                spans.append((start, stop))
            if is_answer[i]:
                text, spans[-1:] = turn_closers.include(self.turn_closers, messages, text, spans[-1:])
        return text, spans

    @cached_property
    def turn_closers(self) -> dict[str, str]:
        """The tokens that end turns of the assistant in place of the template; see `turn_closers.find`."""
        return {} if self.turn_ending.strip() else turn_closers.find(self.render, self.tokenizer)

    def _turn_by_prefix(self, messages: Sequence[Message], i: int, text: str) -> Span | None:
        if i == 0:  # few templates render an empty conversation
            return None
        before = self.render(messages[:i], add_generation_prompt=True)
        after = text if i + 1 == len(messages) else self.render(messages[: i + 1])
        if not text.startswith(before) or not text.startswith(after) or len(before) > len(after):
            return None
        content = messages[i]["content"]
        # The last line: the template may have moved or dropped thoughts before it.
        if isinstance(content, str) and content.strip().rpartition("\n")[2] not in text[len(before) : len(after)]:
            return None  # the template renders the turn elsewhere, or leaves its content out
        return len(before), len(after)

    def _turn_by_placeholder(self, messages: Sequence[Message], i: int, text: str, earlier: int) -> Span:
        role = messages[i]["role"]
        shown = [{"type": "text", "text": PLACEHOLDER}] if isinstance(messages[i]["content"], list) else PLACEHOLDER
        # Thoughts and calls belong to the assistant's turn and are left out with it; other keys stay.
        turn = {"role": role, "content": shown} if role == "assistant" else {**messages[i], "content": shown}
        head, found, rest = self.render([*messages[:i], turn, *messages[i + 1 :]]).partition(PLACEHOLDER)
        if not found or not text.endswith(rest):
            raise DataError(UNCLEAR)
        stop = len(text) - len(rest)
        start = len(os.path.commonprefix([head, text[:stop]]))
        begins = text.startswith(head)
        if i > 0 and role == "assistant":  # what the template puts after the generation prompt is the model's to write
            history, asked = (self.render(messages[:i], add_generation_prompt=ask) for ask in (False, True))
            opening = asked[len(history) :] if asked.startswith(history) else ""
            opened = text.rfind(opening, earlier, start) if opening else -1
            start = opened + len(opening) if opened >= 0 else start
            # If the turn replaces a thought in the prompt, the common part counts.
            begins |= opened >= 0 or len(history) < len(os.path.commonprefix([asked, text])) <= start
        if not begins:
            raise DataError(UNCLEAR)  # the text before the message depends on its content
        agreed = self._agree_on_tokens(self._ending([*messages[:i], turn]), rest)
        if not agreed and role == "assistant" and rest.startswith(self.inner_ending):
            agreed = len(self.inner_ending)
        return start, stop + agreed

    def _ending(self, messages: Sequence[Message]) -> str:
        """The text after the last message, a placeholder; empty if the messages do not render alone."""
        try:
            return self.render(messages).partition(PLACEHOLDER)[2]
        except DataError:
            return ""

    def _agree_on_tokens(self, ending: str, rest: str) -> int:
        """The length of the common prefix of two texts, without the start of a token that differs."""
        agreed = len(os.path.commonprefix([ending, rest]))
        # "<|end|>" and "<|eos|>" agree on nothing, not on "<|".
        if agreed and is_fast(self.tokenizer):
            for text in (ending, rest):
                encoding = encode_fast(self.tokenizer, [text[: agreed + 64]])[0]
                token, crosses = token_at(encoding, agreed, min(len(text), agreed + 64))
                agreed = encoding.token_to_chars(token)[0] if crosses else agreed
        return agreed

    @cached_property
    def _marks_generation(self) -> bool:
        return bool(GENERATION_TAG.search(self._source()))

    def _source(self) -> str:
        if "chat_template" in self.kwargs:
            return self.kwargs["chat_template"]
        if isinstance(self.tokenizer.chat_template, str):
            return self.tokenizer.chat_template
        return self.tokenizer.get_chat_template(tools=self.tools)

    def _marked_spans(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        variables = {**self.tokenizer.special_tokens_map, **self.kwargs, "chat_template": self._source()}
        try:
            rendered: Any = render_jinja_template(
                [self._with_arguments(messages)], tools=self.tools, return_assistant_tokens_mask=True, **variables
            )
        except Exception as error:
            raise DataError(f"the chat template refused the conversation ({type(error).__name__}: {error})") from error
        # A template that leaves the end-of-turn token out of its marks would teach the model never to stop.
        ((text,), (marks,)), ending = rendered, self.turn_ending.strip()
        return text, [(a, b + len(ending) if ending and text.startswith(ending, b) else b) for a, b in marks]

    @cached_property
    def turn_ending(self) -> str:
        """The text that the template adds after an assistant's turn, such as "<|im_end|>"; empty on an error."""
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PLACEHOLDER}]
        return self._ending(turn)

    @cached_property
    def inner_ending(self) -> str:
        """What the template adds to a turn of the assistant that another message follows, where it is no part of
        `turn_ending`: "<|end|>" of gpt-oss, whose last turn ends in "<|return|>". Empty otherwise, and on an error.
        """
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PLACEHOLDER}]
        try:
            asked, more = (self.render(part, add_generation_prompt=True) for part in (turn[:1], turn))
            opening = asked.removeprefix(self.render(turn[:1]))
        except DataError:
            return ""
        ending = more.partition(PLACEHOLDER)[2]
        ending = ending.removesuffix(opening) if ending.endswith(opening) else ""
        return "" if self._agree_on_tokens(ending, self.turn_ending) else ending


def end_tokens(tokenizer: Any, eos_token_id: int | None = None) -> set[int]:
    """The ids that stop generation: eos, and the tokens that end an assistant's turn in the chat template."""
    ends = {tokenizer.eos_token_id, eos_token_id} - {None}
    if tokenizer.chat_template:
        template = Template(tokenizer)
        ending = tokenizer(template.turn_ending.strip(), add_special_tokens=False)["input_ids"]
        ending += tokenizer.convert_tokens_to_ids(list(template.turn_closers.values()))
        ends.update(token for token in ending if token in tokenizer.added_tokens_decoder)
    return ends


def require_calls(template: Template, messages: Sequence[Message], chosen: Sequence[bool] | None = None) -> None:
    """Reject a conversation whose tool calls the template omits: it would train on empty turns. `chosen`: the messages
    to check; None: all. Raises a `DataError` where the template omits a call.
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
    if any(_call_name(n) not in text for n in range(count)):
        name = template.tokenizer.name_or_path or type(template.tokenizer).__name__
        raise DataError(
            f"the chat template of {name} leaves out tool_calls, and turns would be learned without them; set "
            "chat_template_path to a template that shows calls, or write them into content"
        )


def _call_name(number: int) -> str:
    return f"{PLACEHOLDER}x{number}x"


def _renamed(call: Any, number: int) -> Any:
    """A call of a tool under a name that is found nowhere else."""
    if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
        return {**call, "function": _renamed(call["function"], number)}
    return {**call, "name": _call_name(number)} if isinstance(call, Mapping) else call
