"""Detects how a chat template describes tools and formats calls and answers.

It renders a short conversation, so no list of models is needed. The policy's own tokens are never rendered again: the
template's tokens between a call and the next turn are appended to them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from posttrain.core.errors import DataError
from posttrain.lm.text import chat_template
from posttrain.lm.text.tokenization import is_fast
from posttrain.rl.tools.formats import FORMS, Block, Call, Form, marked_calls, typed

QUESTION = {"role": "user", "content": "?"}
# Words that no template contains, where a template might omit content.
NAME, VALUE, ANSWER = "posttrain_look_up", chat_template.PLACEHOLDER, "posttrain5e2b7d"
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {
                "where": {"type": "string", "description": "Where."},
                "how_often": {"type": "integer", "description": "How often."},
            },
            "required": ["where"],
        },
    },
}
THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
CHANNEL = re.compile(
    r"<\|channel\|>\s*(analysis|commentary|final)[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
    r"(.*?)(?=<\|(?:end|return|call|start|channel)\|>|\Z)",
    re.DOTALL,
)
LONGEST_END = 8
MARK = 40


@dataclass(frozen=True)
class Turn:
    """One turn of the policy: the message that it amounts to, and its calls, those that cannot be read among them."""

    message: dict[str, Any]
    calls: tuple[Call, ...]


class ToolProtocol:
    """Parses a policy's calls and renders tool answers in the format of a chat template.

    Args:
        tokenizer: its chat template is tested on a conversation of two turns.
        chat_template_kwargs: variables for the template.
        schemas: of the tools.

    Attributes:
        form: the format of calls; None if the template shows none (then every marked format is parsed) or if only the
            tokenizer's response template parses them.
        example: a call as the template renders it.
        describes: whether the template describes the tools to the model.
        end_ids: the tokens that end a turn with a call.

    Raises:
        ValueError: the template renders no tools, calls or answers, or calls in an unknown format.
    """

    form: Form | None

    def __init__(
        self, tokenizer: Any, chat_template_kwargs: dict[str, Any] | None = None, schemas: Sequence[dict[str, Any]] = ()
    ) -> None:
        self.tokenizer, self.kwargs = tokenizer, chat_template_kwargs
        try:
            self._try(schemas)
        except DataError as error:
            raise ValueError(
                f"Tools cannot be used with this chat template: {error}. Set chat_template_path to one that supports "
                "the role 'tool', or leave tools out."
            ) from error

    # ------------------------------------------------------------------------------------------------ reading

    def read(self, ids: Sequence[int], schemas: Sequence[dict[str, Any]], prompt_ids: Sequence[int] = ()) -> Turn:
        """What the policy has written, as a message with ``tool_calls`` (arguments are dicts), and its calls; a call
        that cannot be read stands in the message as it was written.
        """
        if self._parser_reads:
            message = parse_response(self.tokenizer, ids, prompt_ids, schemas)
            made = message.get("tool_calls") or ()
            return Turn(message, tuple(Call(*_function(call), call.get("id")) for call in made))
        text = self.tokenizer.decode(ids)
        stop = self._end_of_thoughts(text)
        blocks = [
            Block(b.start + stop, b.stop + stop, b.calls) for b in self._blocks(self._without_end(text[stop:]), schemas)
        ]
        calls = tuple(call for block in blocks for call in block.calls)
        read = [b for b in blocks if not b.calls or any(call.arguments is not None for call in b.calls)]
        message = {"role": "assistant", **self._contents(text, stop, read, ids)}
        if readable := [call.as_message() for call in calls if call.arguments is not None]:
            message["tool_calls"] = readable
        return Turn(message, calls)

    def _blocks(self, text: str, schemas: Sequence[dict[str, Any]]) -> list[Block]:
        types = argument_types(schemas)
        return marked_calls(text, types) if self.form is None else self.form.read(text, types)

    def _without_end(self, text: str) -> str:
        """`text` without the token that ends it, for a form that is the whole turn."""
        if self.form is None or self.form.is_marked:
            return text
        text = text.rstrip()
        while end := max((t for t in self._special if t and text.endswith(t)), key=len, default=""):
            text = text.removesuffix(end).rstrip()
        return text

    def _contents(self, text: str, begin: int, blocks: list[Block], ids: Sequence[int]) -> dict[str, str]:
        """The rest of a turn: `content`, and the thoughts up to where it begins."""
        if self._has_channels and "<|message|>" in text:
            said: dict[str, list[str]] = {"analysis": [], "commentary": [], "final": []}
            for found in CHANNEL.finditer(text):
                if not any(b.start < found.end() and found.start() < b.stop for b in blocks):
                    said[found[1]].append(found[2])
            thinking = {"thinking": "\n".join(said["analysis"])} if said["analysis"] else {}
            return {"content": "\n".join(said["commentary"] + said["final"])} | thinking
        if not blocks and not begin:
            return {"content": self.tokenizer.decode(ids, skip_special_tokens=True)}
        edges = [begin, *(edge for block in blocks for edge in (block.start, block.stop)), len(text)]
        content = "".join(text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True))
        contents = {"content": self._plain(content).strip()}
        thoughts = text[:begin].strip()
        for opening, closing in THOUGHTS:
            thoughts = thoughts.removeprefix(opening).removesuffix(closing)
        thoughts = self._plain(thoughts).strip()
        return contents | {"reasoning_content": thoughts} if thoughts else contents

    def _end_of_thoughts(self, text: str) -> int:
        """Where the thoughts that a turn begins with stop; no calls are made in there. A call that can be read ends
        thoughts that nothing else ends, as in the engines that serve these models.
        """
        for opening, closing in THOUGHTS:
            opened = opening == self._opened or text.lstrip().startswith(opening)
            stop = text.find(closing)
            if stop >= 0 and (opened or opening not in text[:stop]):
                return stop + len(closing)
            if opened and stop < 0:
                made = (b.start for b in self._blocks(text, ()) if all(call.arguments is not None for call in b.calls))
                return min(made, default=len(text))
        return 0

    def _plain(self, text: str) -> str:
        return self._special_pattern.sub("", text) if self._special else text

    @cached_property
    def _special(self) -> list[str]:
        return [str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special]

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self._special, key=len, reverse=True))))

    # ------------------------------------------------------------------------------------------------ writing

    def answer_ids(
        self,
        written: Sequence[int],
        answers: Sequence[Mapping[str, Any]],
        schemas: Sequence[dict[str, Any]],
        following: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """The tokens between a turn of the policy and its next one: the end of its turn, the `answers`, messages of the
        role ``tool`` in the order of the calls, those `following`, and the next beginning. `written`: the tokens of the
        policy, or the last of them.
        """
        ids, ends = self._encode(self._tail(answers, schemas, following))
        return behind(written, ids, ends, self.tokenizer)

    def _tail(
        self,
        answers: Sequence[Mapping[str, Any]],
        schemas: Sequence[dict[str, Any]],
        following: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """What the template writes behind a call, up to the policy's next turn."""
        template = self._template(schemas)
        ids = [answer.get("tool_call_id") or identifier(i) for i, answer in enumerate(answers)]
        own = [identifier(i) for i in range(len(answers))]
        # The template may refuse a model's identifier or support only one call in a turn.
        ways = [ids, *([own] if ids != own else []), *([own[:1]] if len(answers) > 1 else [])]
        for way in ways:
            said = self._asking([answer["name"] for answer in answers[: len(way)]], way)
            answered = [dict(answer) | {"tool_call_id": way[min(i, len(way) - 1)]} for i, answer in enumerate(answers)]
            try:
                text = template.render([QUESTION, said, *answered, *map(dict, following)], add_generation_prompt=True)
            except DataError:
                if way is ways[-1]:
                    raise
                continue
            closing = self._closing.replace(identifier(0), way[-1])
            _, found, tail = text.partition(f"{VALUE}{len(way) - 1}" + closing)
            if found:
                return tail
        raise DataError("it renders a call differently when tools have answered")

    def _encode(self, tail: str) -> tuple[list[int], int]:
        """The tokens of `tail` after a call, and how many of them (at least one) end the turn."""
        ending = len(self._ending) if tail.startswith(self._ending) else 0
        before = self._closing[-1:]
        if before and is_fast(self.tokenizer):
            text = before + tail
            encoding = chat_template.encode_fast(self.tokenizer, [text])[0]
            first, crosses = chat_template.token_at(encoding, len(before), len(text))
            if not crosses:
                stop = chat_template.token_at(encoding, len(before) + ending, len(text))[0]
                return encoding.ids[first:], max(stop - first, 1)
        ids, ends = (encoding.ids for encoding in chat_template.encode_texts(self.tokenizer, [tail, tail[:ending]]))
        return ids, max(len(ends), 1)

    def _asking(self, names: Sequence[str], ids: Sequence[str]) -> dict[str, Any]:
        """A turn of the assistant that calls these tools, each with an argument that can be found."""
        if not self._shows_calls:
            return {"role": "assistant", "content": f"{VALUE}{len(names) - 1}"}
        made = [{"name": name, "arguments": {"where": f"{VALUE}{number}"}} for number, name in enumerate(names)]
        calls = [{"id": id, "type": "function", "function": one} for id, one in zip(ids, made, strict=True)]
        return {"role": "assistant", "content": self._content, "tool_calls": calls}

    def _template(self, schemas: Sequence[dict[str, Any]]) -> chat_template.Template:
        return chat_template.Template(self.tokenizer, list(schemas) or None, self.kwargs)

    # ------------------------------------------------------------------------------------------------ finding out

    def _try(self, schemas: Sequence[dict[str, Any]]) -> None:
        template = self._template([TOOL])
        asked = template.render([QUESTION], add_generation_prompt=True)
        own = self._template(schemas).render([QUESTION])  # a template may reject a tool
        self.describes = NAME in asked or names_all(own, schemas)
        self._opened = next((a for a, b in THOUGHTS if asked.rfind(a) > asked.rfind(b)), None)
        self._has_channels = "<|channel|>" in asked or "<|channel|>" in str(self.tokenizer.chat_template)
        self.form, self.example, self._closing, self._ending, self._parser_reads = None, "", "", "", False
        self._shows_calls = True
        text = self._conversation(template)
        self._shows_calls = text is not None
        if text is not None:
            self._find_form(text, len(os.path.commonprefix([asked, text])))
        elif not self.describes:
            raise DataError("it shows no tools: neither which there are, nor the calls of the assistant")
        self._find_ending(template)

    def _conversation(self, template: chat_template.Template) -> str | None:
        """A conversation with a call, in the first variant that the template renders; None if it renders none."""
        for self._content in ("", None):  # some templates show a call only where the turn has no content
            try:
                text = template.render([QUESTION, self._asking([NAME], [identifier(0)]), self._answer("0")])
            except DataError:
                continue
            if f"{VALUE}0" in text:
                return text
        self._content = ""
        return None

    def _answer(self, content: str) -> dict[str, Any]:
        return {"role": "tool", "name": NAME, "content": content, "tool_call_id": identifier(0)}

    def _find_form(self, text: str, start: int) -> None:
        """The format that parses the call in `text`, whose turn begins at `start` or a few characters before."""
        stop = text.index(f"{VALUE}0") + len(f"{VALUE}0")
        end = min((p for t in self._special if (p := text.find(t, stop)) >= 0), default=len(text))
        if has_parser(self.tokenizer):
            turn = parse_response(self.tokenizer, text[start:end], text[:start], [TOOL])
            self._parser_reads = [_function(call) for call in turn.get("tool_calls") or ()] == [PROBE]
        for form in FORMS:
            # Its mark may begin as the generation prompt does; a form without marks is the whole turn.
            first, last = (max(start - MARK, 0), len(text)) if form.is_marked else (start, end)
            for block in form.read(text[first:last], argument_types([TOOL])):
                if [(call.name, call.arguments) for call in block.calls] == [PROBE]:
                    self.form, self._closing = form, text[stop : first + block.stop]
                    call = text[first + block.start : first + block.stop]
                    self.example = call.replace(f"{VALUE}0", "...").replace(NAME, "name").strip()
                    return
        if not self._parser_reads:
            raise DataError(
                f"it renders a call as {text[start:end]!r}, an unknown format; set tokenizer.response_template to "
                "parse it"
            )
        self._closing = text[stop:end]

    def _find_ending(self, template: chat_template.Template) -> None:
        """The text that ends a turn with a call before an answer."""
        answer = self._answer(ANSWER)
        tail = self._tail([answer], [TOOL])
        if ANSWER not in tail:
            raise DataError("it leaves out what tools answer")
        mark = f"{VALUE}0" + self._closing
        try:
            alone = template.render([QUESTION, self._asking([NAME], [identifier(0)])]).partition(mark)[2]
        except DataError:
            alone = ""
        self._ending = os.path.commonprefix([alone, tail])
        ids, ends = self._encode(tail)
        special = [token for token in ids[:ends] if token in self.tokenizer.added_tokens_decoder]
        self.end_ids = tuple(special[:1])


def behind(written: Sequence[int], ids: list[int], ends: int, tokenizer: Any) -> list[int]:
    """Those of `ids`, from the end of a turn to the next one's beginning, that are still to come after what the policy
    has `written`, which may have ended its turn itself. The first `ends` of them end the turn.
    """
    for length in range(min(len(written), len(ids), LONGEST_END), 0, -1):
        # A plain word that the next message begins with is part of that message, though the policy wrote it last.
        if list(written[-length:]) == ids[:length] and (
            length <= ends or written[-1] in tokenizer.added_tokens_decoder  # which takes long to make
        ):
            return ids[length:]
    if written and written[-1] in ids[: max(ends, 1)] and written[-1] in tokenizer.added_tokens_decoder:
        return ids[ids.index(written[-1]) + 1 :]  # the policy has left out white space before the end of its turn
    return ids


def has_parser(tokenizer: Any) -> bool:
    """Whether the tokenizer has a response template."""
    return getattr(tokenizer, "response_template", None) is not None


def parse_response(
    tokenizer: Any, ids: Any, prefix: Any = None, tools: Sequence[dict[str, Any] | Callable[..., Any]] | None = None
) -> dict[str, Any]:
    """An assistant's message, parsed with the tokenizer's response template; plain text if that fails.

    Args:
        ids: the model's output, prefix: its input (begun thoughts are in there); both as tokens or as texts.
        tools: schemas or functions. Arguments get the types of their parameters; without tools, those written as plain
            text become what they read as, numbers or lists for instance.

    Returns:
        ``{"role": "assistant", "content": ...}``, with ``tool_calls`` and thoughts where there are any.

    Raises:
        ValueError: the tokenizer has no response template.
    """
    if not has_parser(tokenizer):
        raise ValueError(
            "The tokenizer has no response_template to parse a response with: call add_response_schema(tokenizer)."
        )
    response, before = (value if isinstance(value, str) else list(value) for value in (ids, prefix or ()))
    try:
        message = tokenizer.parse_response(response, prefix=before, tools=list(tools or ()) or None)
        calls = message.get("tool_calls") or ()
        if all(isinstance(name, str) and isinstance(arguments, dict) for name, arguments in map(_function, calls)):
            for call in calls:  # a call without arguments may leave them out, and chat templates read them
                call.get("function", call).setdefault("arguments", {})
            if not tools and _has_plain_arguments(tokenizer):
                for _, arguments in map(_function, calls):
                    arguments.update(
                        {key: typed(text, None) for key, text in arguments.items() if isinstance(text, str)}
                    )
            ended = {"content": (message.get("content") or "").removesuffix(tokenizer.eos_token or "")}
            return {"role": "assistant"} | message | ended
    except (ValueError, TypeError, AttributeError, KeyError):  # not what the template expects, or cut in the middle
        pass
    text = response if isinstance(response, str) else tokenizer.decode(response, skip_special_tokens=True)
    return {"role": "assistant", "content": text}


def _has_plain_arguments(tokenizer: Any) -> bool:
    """Whether the response template reads arguments as texts, which say nothing of their types."""
    field = tokenizer.response_template["fields"].get("tool_calls", {})
    parser = field.get("content_args", {}).get("value_parser", {})
    return field.get("content") == "xml-inline" and parser.get("name", "text") == "text"


def argument_types(schemas: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Name of a tool -> name of an argument -> its JSON schema."""
    functions = [schema.get("function", schema) for schema in schemas]
    return {f["name"]: (f.get("parameters") or {}).get("properties") or {} for f in functions}


def names_all(text: str, schemas: Sequence[dict[str, Any]]) -> bool:
    """Whether a text names each of these tools (and there are any)."""
    names = argument_types(schemas)
    return bool(names) and all(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for name in names)


def _function(call: Mapping[str, Any]) -> tuple[Any, Any]:
    function = call.get("function", call)
    return function.get("name"), function.get("arguments") or {}


def identifier(number: int) -> str:
    """An id of a call."""
    return f"call{number:05}"  # nine letters and digits, as the strictest templates require


PROBE = (NAME, {"where": f"{VALUE}0"})
