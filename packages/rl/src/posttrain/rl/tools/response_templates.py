"""Makes response templates out of chat templates.

A response template (``tokenizer.response_template`` of transformers) holds the marks around thoughts, calls and
content, by which ``tokenizer.parse_response`` parses what a model writes into a message. Few tokenizers come with one.
The marks are found here by rendering short conversations, and a response template that does not parse them back is
refused.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from posttrain.core.errors import DataError
from posttrain.core.models.special_tokens import tokenizer_of
from posttrain.lm.text.chat_template import Message, Template
from posttrain.lm.text.layouts import template_of
from posttrain.rl.tools.formats import END, Form
from posttrain.rl.tools.protocol import (
    NAME,
    QUESTION,
    THOUGHTS,
    TOOL,
    ToolProtocol,
    has_parser,
    identifier,
    parse_response,
)

THOUGHT, CONTENT = "posttrain7a31d0", "posttrain90bb2e"  # words that no template contains
THOUGHT_KEYS = ("reasoning_content", "thinking")


def add_response_schema(processing_class: Any) -> Any:
    """Lets a tokenizer parse what the model writes: sets its ``response_template``, found out from its chat template.

    It is saved with the tokenizer; `parse_response` and transformers read it. Any chat template is taken whose calls
    have a format that a response template can describe. Calls that the template does not show are not parsed. The
    trainers here need no response template.

    Args:
        processing_class: a tokenizer, or a processor, whose tokenizer gets it. One that is set already stays.

    Returns:
        `processing_class`.

    Raises:
        ValueError: there is no chat template, or what it renders is not parsed back.
    """
    words = tokenizer_of(processing_class)
    if has_parser(words):
        return processing_class
    source = _chat_template(processing_class)
    if source is None:
        raise ValueError("There is no chat template to find marks in. Set chat_template of the tokenizer.")
    try:
        words.response_template = ResponseMarks(words, source).checked_template()
    except DataError as error:
        raise ValueError(
            f"No response template can be made of this chat template: {error}. The trainers need none; for other uses, "
            "set tokenizer.response_template by hand."
        ) from error
    return processing_class


def supports_tool_calling(processing_class: Any) -> bool:
    """Whether the chat template shows calls of the assistant and what tools answer, and the trainers can parse them."""
    words, source = tokenizer_of(processing_class), _chat_template(processing_class)
    try:
        return source is not None and bool(ToolProtocol(words, {"chat_template": source}).example)
    except ValueError:
        return False


def _chat_template(processing_class: Any) -> str | None:
    """The chat template of a tokenizer or processor; of named ones, that for tools."""
    source = template_of(processing_class) or template_of(tokenizer_of(processing_class))
    return source.get("tool_use", source.get("default")) if isinstance(source, dict) else source or None


@dataclass(frozen=True)
class Thoughts:
    """The marks around thoughts, and the key of a message that holds them."""

    key: str
    opening: str
    closing: str


class ResponseMarks:
    """The marks that a chat template, `source`, writes around the parts of an assistant's turn; `tokenizer` knows
    special tokens.
    """

    def __init__(self, tokenizer: Any, source: str) -> None:
        self.tokenizer, self.source = tokenizer, source
        self.template = Template(tokenizer, [TOOL], {"chat_template": source})
        try:
            self.protocol: ToolProtocol | None = ToolProtocol(tokenizer, {"chat_template": source}, [TOOL])
        except ValueError:  # no tools: content and thoughts alone
            self.protocol = None

    # ------------------------------------------------------------------------------------------------ the template

    def checked_template(self) -> dict[str, Any]:
        """The response template; a DataError where it does not parse back what the chat template renders."""
        made = self.response_template()
        reader = copy.copy(self.tokenizer)
        reader.response_template = made
        for prefix, response, wanted in self._probes():
            read = parse_response(reader, response, prefix, [TOOL])
            if _without_ids(read) != {"role": "assistant"} | _without_ids(wanted):
                raise DataError(f"{response!r} would be parsed as {read}")
        return made

    def response_template(self) -> dict[str, Any]:
        """The marks in the format of transformers, not yet checked."""
        content = {"close_pattern": self.ends, "content": "text", "repeats": True, "join": "\n"}
        if self.content_opening:  # of channels, those of a preamble too
            content["open_pattern"] = r"\s*" + re.escape(self.content_opening).replace("final", "(?:commentary|final)")
        fields: dict[str, Any] = {"content": content}
        anchor = "|".join(map(re.escape, sorted(self.anchors, key=len, reverse=True)))
        if self.thoughts is not None:
            opening, closing = re.escape(self.thoughts.opening), re.escape(self.thoughts.closing)
            begins = rf"\s*{opening}"
            if self._omits_closing:
                anchor = rf"(?:{anchor})(?:{opening}\s*(?:{closing}\s*)?)?"
                begins = rf"\s*{opening}|(?=.*?{closing})"
            fields[self.thoughts.key] = {
                "open_pattern": begins, "close_pattern": rf"{closing}\s*", "content": "text", "repeats": True,
                "join": "\n",
            }  # fmt: skip
        if self._form is not None:
            if self._form.field is None:
                raise DataError(f"a response template cannot describe calls in this format ({self._form.name})")
            field = {k: v.replace(END, self.ends) if isinstance(v, str) else v for k, v in self._form.field.items()}
            fields["tool_calls"] = field
        return {"defaults": {"role": "assistant"}, "start_anchor_pattern": anchor, "fields": fields}

    # ------------------------------------------------------------------------------------------------ the marks

    @property
    def _form(self) -> Form | None:
        return None if self.protocol is None else self.protocol.form

    @cached_property
    def _asked(self) -> str:
        return self.template.render([QUESTION], add_generation_prompt=True)

    @cached_property
    def opening(self) -> str:
        """What begins a turn of the assistant, without a thought that is begun for it."""
        history = self.template.render([QUESTION])
        opening = self._asked[len(history) :] if self._asked.startswith(history) else ""
        if not opening:  # the end of the question begins the answer
            question = {"role": "user", "content": CONTENT}
            opening = self.template.render([question], add_generation_prompt=True).partition(CONTENT)[2]
        if self.thoughts is not None:
            opening = opening.partition(self.thoughts.opening)[0]
        if not opening:
            raise DataError("it does not show where a turn of the assistant begins")
        return opening

    @cached_property
    def anchors(self) -> set[str]:
        """The texts after which the model writes: what begins a turn, or ends the answer of a tool."""
        if self.protocol is None or not self.protocol.example:
            return {self.opening}
        answer = {"role": "tool", "name": NAME, "content": CONTENT}
        ids = self.protocol.answer_ids([], [answer], [TOOL])
        behind = self.tokenizer.decode(ids).partition(CONTENT)[2]
        if self.opening in behind:
            return {self.opening}
        last = max((behind.rfind(token) for token in self._special), default=-1)
        return {self.opening, behind[last:]} if last >= 0 else {self.opening}

    @cached_property
    def thoughts(self) -> Thoughts | None:
        """The marks of thoughts, if the template has any: those that it writes around them, or known ones in it."""
        usual = THOUGHT_KEYS[::-1] if "<|channel|>" in self.source else THOUGHT_KEYS  # as the trainers have it
        keys = sorted(usual, key=lambda key: not self._names(key))  # `Template` renders a thought under either
        for key in keys:
            text = self._rendered({"content": CONTENT, key: THOUGHT})
            before, found, behind = text.partition(THOUGHT)
            if found and CONTENT in behind:
                between = behind.partition(CONTENT)[0]
                for opening, closing in THOUGHTS:
                    if opening in before and closing in between:
                        return Thoughts(key, opening, closing)
                mark = before[len(os.path.commonprefix([self._asked, before])) :].strip()
                if mark and (end := self._first_special(between)):
                    return Thoughts(key, mark, end)
        return next((Thoughts(keys[0], *marks) for marks in THOUGHTS if marks[1] in self.source), None)

    def _names(self, key: str) -> bool:
        """Whether the chat template reads `key` of a message."""
        return re.search(rf"[.'\"]{key}\b", self.source) is not None

    @cached_property
    def _omits_closing(self) -> bool:
        """Whether a thought is begun for the model, and a turn without one is written otherwise. Only a closed thought
        is then kept apart from content.
        """
        return self._begins_thought and not self._rendered({"content": CONTENT}).startswith(self._asked)

    @cached_property
    def _begins_thought(self) -> bool:
        begun, marks = self._asked.rpartition(self.opening)[2], self.thoughts
        return marks is not None and marks.opening in begun and marks.closing not in begun

    @cached_property
    def content_opening(self) -> str:
        """The mark before the content of a turn; empty if there is none."""
        before = self._response({"content": CONTENT}).partition(CONTENT)[0]
        if self.thoughts is not None:
            before = before.rpartition(self.thoughts.closing)[2].strip().removeprefix(self.thoughts.opening)
        return before.strip()

    @cached_property
    def ends(self) -> str:
        """A pattern of what ends a turn."""
        ending = self.template.turn_ending.partition(self.opening)[0].strip()
        answered = self._rendered({"content": CONTENT}, QUESTION).partition(CONTENT)[2]
        tokens = {self.tokenizer.eos_token, self._first_special(answered)}
        tokens.update([token for token in self._special if token in ending] or [ending])
        if self.protocol is not None:
            tokens.update(self.tokenizer.convert_ids_to_tokens(list(self.protocol.end_ids)))
        known = sorted((token for token in tokens if token), key=len, reverse=True)
        return rf"(?:{'|'.join(map(re.escape, known))})\s*" if known else r"\Z"

    @cached_property
    def _special(self) -> list[str]:
        return [str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special]

    def _first_special(self, text: str) -> str | None:
        found = [(place, token) for token in self._special if (place := text.find(token)) >= 0]
        return min(found, key=lambda each: (each[0], -len(each[1])), default=(0, None))[1]

    # ------------------------------------------------------------------------------------------------ the check

    def _probes(self) -> Iterator[tuple[str, str, Message]]:
        """Turns as the chat template renders them, ``(prefix, response, message)``; those that it leaves out are not
        tried.
        """
        turns: list[Message] = [{"content": CONTENT}]
        if self.thoughts is not None:
            turns.append({"content": CONTENT, self.thoughts.key: THOUGHT})
            if self._begins_thought:
                yield self._asked, f"{THOUGHT}\n{self.thoughts.closing}\n\n{CONTENT}", turns[-1]
        if self.protocol is not None and self.protocol.example:
            calls = [_call(number) for number in range(2)]
            turns += [{"content": "", "tool_calls": calls[:1]}, {"content": "", "tool_calls": calls}]
            if not self.content_opening:  # channels have another one for the content of a turn with calls
                turns.append({"content": CONTENT, "tool_calls": calls[:1]})
        for turn in turns:
            response = self._response(turn)
            if all(word in response for word in _words(turn)):
                yield "", response, turn
            elif turn in (turns[0], {"content": "", "tool_calls": [_call(0)]}):
                raise DataError(f"it leaves out what is in {turn}")

    def _response(self, message: Message) -> str:
        """The rendering of a turn of the assistant, from where its prompt ends, without a thought begun there."""
        ways = [message, message | {"content": None}] if message["content"] == "" else [message]
        for way in ways:  # some templates show a call only where the turn has no content
            text = self._rendered(way)
            start = text.find(self.opening, self._asked.rfind(self.opening))
            response = text[start + len(self.opening) :] if start >= 0 else ""
            if all(word in response for word in _words(way)):
                break
        said = max(response.rfind(word) for word in _words(message))
        return response[: response.find(self.opening, said)] if self.opening in response[said:] else response

    def _rendered(self, message: Message, *following: Message) -> str:
        """A question, the assistant's message, and those that follow; empty if the template refuses them."""
        try:
            return self.template.render([QUESTION, {"role": "assistant"} | message, *following])
        except DataError:
            return ""


def _call(number: int) -> dict[str, Any]:
    arguments = {"where": f"posttrain{number}", "how_often": number}
    return {"id": identifier(number), "type": "function", "function": {"name": NAME, "arguments": arguments}}


def _without_ids(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [{key: value for key, value in call.items() if key != "id"} for call in message["tool_calls"]]
    return message | {"tool_calls": calls}


def _words(message: Message) -> list[str]:
    """The words of a message that its rendering must hold."""
    return re.findall(r"posttrain\w+", str(message))
