"""Dataset formats and chats: what a row is, how a conversation becomes tokens, which of them the assistant wrote.

Conversations are lists of messages, ``{"role": ..., "content": ...}``. The text of a conversation is made by the
tokenizer's chat template; what the assistant wrote is found in that text by rendering the conversation again up to
each of its turns, so that any template will do.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from posttrain.core.errors import DataError

Message = dict[str, Any]
Span = tuple[int, int]
"""Where something starts and stops in a text, in characters."""

FORMATS: dict[str, tuple[frozenset[str], ...]] = {
    "tokenized": (frozenset({"input_ids"}),),
    "preference": (frozenset({"chosen", "rejected"}),),
    "stepwise_supervision": (frozenset({"prompt", "completions", "labels"}),),
    "unpaired_preference": (frozenset({"prompt", "completion", "label"}),),
    "prompt_completion": (frozenset({"prompt", "completion"}),),
    "language_modeling": (frozenset({"messages"}), frozenset({"conversations"}), frozenset({"text"})),
    "prompt_only": (frozenset({"prompt"}),),
}
"""Format -> the columns that a row of it has, one of several sets. The first that fits is the format."""

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""ShareGPT's speakers -> the roles of a chat template."""

# A text that no conversation contains and no template changes, put in a message's place to find where it is rendered.
PLACEHOLDER = "posttrain4f1c9a"
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


def detect_format(columns: Iterable[str], among: Iterable[str] = FORMATS) -> str:
    """The format of a dataset with these columns (or of a row, whose keys are its columns).

    Args:
        columns: column names, or a row.
        among: the formats to choose from, best first.

    Raises:
        DataError: no format fits; names the columns found and wanted.
    """
    names, among = set(columns), list(among)
    for name in among:
        if any(wanted <= names for wanted in FORMATS[name]):
            return name
    wanted = "; ".join(
        f"{name}: " + " or ".join("+".join(sorted(columns)) for columns in FORMATS[name]) for name in among
    )
    raise DataError(f"The columns {sorted(names)} fit no format. Rename them to one of: {wanted}.")


def is_conversational(row: Mapping[str, Any]) -> bool:
    """Whether a row holds messages rather than text."""
    for name in ("messages", "conversations", "prompt", "completion", "chosen", "rejected"):
        value = row.get(name)
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            return "role" in value[0] or "from" in value[0]
    return False


def sharegpt_to_messages(row: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[Message]:
    """``{"from": "human", "value": "Hi"}`` -> ``{"role": "user", "content": "Hi"}``, for each turn of a row.

    Args:
        row: a row with a ``conversations`` column, or that column's value.

    Raises:
        DataError: a turn lacks ``from`` or ``value``, or an unknown speaker.
    """
    turns = row["conversations"] if isinstance(row, Mapping) else row
    messages = []
    for turn in turns:
        if "from" not in turn or "value" not in turn:
            raise DataError("a turn has no 'from' or no 'value'")
        if turn["from"] not in ROLES:
            raise DataError(f"unknown speaker {turn['from']!r}; known are {', '.join(ROLES)}")
        messages.append({"role": ROLES[turn["from"]], "content": turn["value"]})
    return messages


def to_messages(value: Any, name: str = "messages") -> list[Message]:
    """Check a conversation and bring it into the form that chat templates read.

    Reads ShareGPT turns too, and drops keys that are None: Arrow gives every message the keys of all others.

    Raises:
        DataError: what is wrong, without the value: the reason is used to count the rows it happens in.
    """
    if value is None:
        raise DataError(f"{name} is null")
    if not isinstance(value, (list, tuple)) or not all(isinstance(message, Mapping) for message in value):
        raise DataError(f"{name} is not a list of messages")
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
        messages.append({"content": ""} | _without_none(message))
    return messages


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


def load_template(source: str | os.PathLike[str], trust_remote_code: bool = False) -> str:
    """The chat template in a Jinja file, or of the tokenizer in a folder or under a name on the Hub.

    Raises:
        FileNotFoundError: there is no such file or folder, and the Hub gave nothing under that name.
        ValueError: the tokenizer there has no chat template.
    """
    path = os.fspath(source)
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            return file.read()
    if path.endswith((".jinja", ".j2", ".jinja2")) or (os.path.isabs(path) and not os.path.isdir(path)):
        raise FileNotFoundError(f"chat_template_path={path!r} is not a file here (looked from {os.getcwd()}).")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"chat_template_path={path!r} is neither a file here (looked from {os.getcwd()}) nor a tokenizer's folder or name: "
            f"{error}"
        ) from error
    if not tokenizer.chat_template:
        raise ValueError(f"chat_template_path={path!r}: the tokenizer there has no chat template.")
    return tokenizer.get_chat_template()


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
        if not getattr(tokenizer, "chat_template", None) and "chat_template" not in (chat_template_kwargs or {}):
            raise DataError(
                "The rows are conversations, but the tokenizer has no chat template. Load one with "
                "chat_template_path, set tokenizer.chat_template, or give rows of text."
            )
        self.tokenizer, self.tools, self.kwargs = tokenizer, tools, dict(chat_template_kwargs or {})

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, continue_final_message: bool = False
    ) -> str:
        """The text of a conversation.

        Raises:
            DataError: the template refused it (e.g. roles that do not alternate).
        """
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=self.tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **self.kwargs,
            )
        except Exception as error:  # a template is a program of its own: what it raises is up to its author
            raise DataError(f"the chat template refused the conversation ({type(error).__name__}: {error})") from error

    def prompt_length(self, prompt: Sequence[Message], text: str) -> int:
        """How many characters of `text`, a rendered conversation that begins with `prompt`, the prompt takes.

        The prompt is what the model is given before it writes: with the generation prompt, or, where it ends in an
        unfinished turn of the assistant, with that turn left open. Templates that render the end of a prompt
        otherwise in a longer conversation (an empty thought, for example) are followed as far as they agree.

        Raises:
            DataError: the template renders the prompt's messages otherwise in the conversation than alone.
        """
        unfinished = prompt[-1]["role"] == "assistant"
        asked = self.render(prompt, add_generation_prompt=not unfinished, continue_final_message=unfinished)
        if text.startswith(asked):
            return len(asked)
        agreed = len(os.path.commonprefix([asked, text]))
        if unfinished or agreed < len(self.render(prompt)):
            raise DataError("the chat template renders the prompt otherwise when the completion follows")
        return agreed

    def assistant_spans(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The text of a conversation, and what in it the assistant wrote, end-of-turn token included.

        A template that marks it with ``{% generation %}`` is believed. For any other the turn is what comes between
        the rendering of all before it with the generation prompt, and the rendering of all up to it. Where the text
        does not begin with these (templates that drop the thoughts of earlier turns), the turn is found by rendering
        the conversation with a placeholder in its place.

        Raises:
            DataError: neither way tells where a turn starts and stops.
        """
        if self._marks_generation:
            return self._marked_spans(messages)
        text, spans = self.render(messages), []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                earlier = spans[-1][1] if spans else 0
                spans.append(self._turn_by_prefix(messages, i, text) or self._turn_by_placeholder(messages, i, text))
                if not earlier <= spans[-1][0] <= spans[-1][1]:
                    raise DataError("the chat template does not show where the assistant's turns start and stop")
        return text, spans

    def _turn_by_prefix(self, messages: Sequence[Message], i: int, text: str) -> Span | None:
        if i == 0:  # few templates render an empty conversation
            return None
        before = self.render(messages[:i], add_generation_prompt=True)
        after = text if i + 1 == len(messages) else self.render(messages[: i + 1])
        if text.startswith(before) and text.startswith(after) and len(before) <= len(after):
            return len(before), len(after)
        return None

    def _turn_by_placeholder(self, messages: Sequence[Message], i: int, text: str) -> Span:
        turn = {"role": "assistant", "content": PLACEHOLDER}
        head, found, rest = self.render([*messages[:i], turn, *messages[i + 1 :]]).partition(PLACEHOLDER)
        _, _, ending = self.render([*messages[:i], turn]).partition(PLACEHOLDER)
        if not found or not text.endswith(rest):
            raise DataError("the chat template does not show where the assistant's turns start and stop")
        stop = len(text) - len(rest)
        start = len(os.path.commonprefix([head, text[:stop]]))
        if i > 0:  # what the template itself puts after the generation prompt (a thought) is the model's to write
            history, asked = (self.render(messages[:i], add_generation_prompt=ask) for ask in (False, True))
            opening = asked[len(history) :] if asked.startswith(history) else ""
            opened = text.rfind(opening, 0, start) if opening else -1
            if opened >= 0:
                start = opened + len(opening)
        return start, stop + self._agree_on_tokens(ending, rest)

    def _agree_on_tokens(self, ending: str, rest: str) -> int:
        """How many characters two texts begin with in common, without the beginning of a token that differs."""
        agreed = len(os.path.commonprefix([ending, rest]))
        if agreed and getattr(
            self.tokenizer, "is_fast", False
        ):  # "<|end|>" and "<|eos|>" agree on nothing, not on "<|"
            encoding = _encode_fast(self.tokenizer, [rest[: agreed + 64]])[0]
            token, crosses = _token_at(encoding, agreed, len(rest))
            return encoding.token_to_chars(token)[0] if crosses else agreed
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
            texts, marks = render_jinja_template(
                [list(messages)], tools=self.tools, return_assistant_tokens_mask=True, **variables
            )
        except Exception as error:
            raise DataError(f"the chat template refused the conversation ({type(error).__name__}: {error})") from error
        # A template that leaves the end-of-turn token out of its marks would teach the model never to stop.
        text, ending = texts[0], self._turn_ending.strip()
        return text, [(a, b + len(ending) if ending and text.startswith(ending, b) else b) for a, b in marks[0]]

    def turn_ending(self) -> str:
        """What the template writes after the assistant's last words, e.g. ``"<|im_end|>\\n"``; empty if it refuses."""
        return self._turn_ending

    @cached_property
    def _turn_ending(self) -> str:
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PLACEHOLDER}]
        try:
            return self.render(turn).partition(PLACEHOLDER)[2]
        except DataError:
            return ""


class Encoding(NamedTuple):
    """A text as tokens.

    ids: the token ids. mask: True where a token is trained on, None for everywhere.
    cut: the text was tokenized in pieces, because a token would have crossed the start or stop of a span.
    """

    ids: list[int]
    mask: np.ndarray | None
    cut: bool


def encode_texts(
    tokenizer: Any, texts: Sequence[str], spans: Sequence[list[Span] | None] | None = None
) -> list[Encoding]:
    """Tokenize texts, without special tokens around them, in one call.

    Args:
        tokenizer: a fast one does all texts at once on all its threads; a slow one works too.
        texts: N texts.
        spans: for each text what is to be trained on, sorted; None for all of it.

    Where a token would cross the edge of a span, the text is tokenized piece by piece between the edges: a prompt's
    tokens are then those that the model will be given. If that changes the text (tokenizers that put a space before
    each text), it stays whole and the token that crosses is trained on.
    """
    spans = spans or [None] * len(texts)
    if not getattr(tokenizer, "is_fast", False):
        whole = tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        return [
            Encoding(ids, None, False) if marks is None else _encode_pieces(tokenizer, text, marks, ids)
            for text, marks, ids in zip(texts, spans, whole, strict=True)
        ]
    bare = [i for i, marks in enumerate(spans) if marks is None]
    results: list[Any] = [None] * len(texts)
    for i, encoding in zip(bare, _encode_fast(tokenizer, [texts[i] for i in bare], positions=False), strict=True):
        results[i] = Encoding(encoding.ids, None, False)
    marked = [i for i, marks in enumerate(spans) if marks is not None]
    for i, encoding in zip(marked, _encode_fast(tokenizer, [texts[i] for i in marked]), strict=True):
        mask, crossing = np.zeros(len(encoding.ids), dtype=bool), False
        for start, stop in spans[i]:
            first, crosses_start = _token_at(encoding, start, len(texts[i]))
            last, crosses_stop = _token_at(encoding, stop, len(texts[i]))
            mask[first : last + crosses_stop] = True
            crossing |= crosses_start or crosses_stop
        whole = Encoding(encoding.ids, mask, False)
        results[i] = _encode_pieces(tokenizer, texts[i], spans[i], *whole[:2]) if crossing else whole
    return results


def _encode_fast(tokenizer: Any, texts: list[str], positions: bool = True) -> list[Any]:
    backend = tokenizer.backend_tokenizer
    # An earlier call of the tokenizer may have left its truncation or padding on. A post-processor adds special
    # tokens, and that of GPT-2 and Llama-3 takes white space out of the positions, where a turn's first line break is.
    backend.no_truncation()
    backend.no_padding()
    encode = backend.encode_batch if positions else backend.encode_batch_fast
    processor, backend.post_processor = backend.post_processor, None
    try:
        return encode(texts, add_special_tokens=False) if texts else []
    finally:
        backend.post_processor = processor


def _token_at(encoding: Any, position: int, length: int) -> tuple[int, bool]:
    """The token that holds the character at `position`, and whether the token began before it."""
    while position < length:
        token = encoding.char_to_token(position)
        if token is not None:
            return token, encoding.token_to_chars(token)[0] < position
        position += 1  # a character that the tokenizer's normalizer removed
    return len(encoding.ids), False


def _encode_pieces(
    tokenizer: Any, text: str, spans: list[Span], whole: list[int], mask: np.ndarray | None = None
) -> Encoding:
    edges = sorted({0, len(text), *(edge for span in spans for edge in span)})
    pieces = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    encoded = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces]
    ids = [token for piece in encoded for token in piece]
    if ids == whole or tokenizer.decode(ids) == tokenizer.decode(whole):
        inside = [
            any(start <= a and b <= stop for start, stop in spans) for a, b in zip(edges, edges[1:], strict=False)
        ]
        return Encoding(ids, np.repeat(inside, [len(piece) for piece in encoded]), ids != whole)
    if mask is None:
        raise DataError("this slow tokenizer cannot tell which tokens to train on; use its fast version")
    return Encoding(whole, mask, True)


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: list[Any] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    add_generation_prompt: bool = False,
) -> list[int]:
    """The token ids of a conversation. Nothing is added to what the template renders: no second bos.

    Raises:
        DataError: no chat template, messages that are none, or the template refused them.
    """
    template = Template(tokenizer, to_tools(tools), chat_template_kwargs)
    return encode_texts(tokenizer, [template.render(to_messages(messages), add_generation_prompt)])[0].ids


def assistant_mask(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: list[Any] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> tuple[list[int], np.ndarray]:
    """The token ids of a conversation, and a mask that is True at what the assistant wrote and at its end-of-turn.

    Works for any chat template, see `Template.assistant_spans`.

    Raises:
        DataError: as `encode_chat`, or the template does not show where the turns start and stop.
    """
    text, spans = Template(tokenizer, to_tools(tools), chat_template_kwargs).assistant_spans(to_messages(messages))
    encoding = encode_texts(tokenizer, [text], [spans])[0]
    return encoding.ids, encoding.mask


def special_tokens_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before (bos) and after (eos) a text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    ids = tokenizer("a")["input_ids"]
    for start in range(len(ids) - len(bare) + 1):
        if ids[start : start + len(bare)] == bare:
            return ids[:start], ids[start + len(bare) :]
    return [], []


def end_tokens(tokenizer: Any, eos_token_id: int | None = None) -> set[int]:
    """The ids after which generation stops: eos, and what the chat template ends the assistant's turn with."""
    ends = {tokenizer.eos_token_id, eos_token_id} - {None}
    if getattr(tokenizer, "chat_template", None):
        ending = tokenizer(Template(tokenizer).turn_ending().strip(), add_special_tokens=False)["input_ids"]
        ends.update(token for token in ending if token in tokenizer.added_tokens_decoder)
    return ends


def has_doubled_bos(tokenizer: Any, ids: Sequence[int]) -> bool:
    """Whether the tokens begin with bos twice: the template writes one and the tokenizer adds another."""
    return len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id
