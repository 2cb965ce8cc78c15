"""Wraps a chat template so that it marks what the assistant writes and renders history alike in longer conversations.

The trainers here need no such template: they find the assistant's turns under any. It is for code that asks tokenizers
for ``return_assistant_tokens_mask=True``, and for templates that drop the thoughts of earlier turns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from posttrain.core.errors import DataError
from posttrain.core.models.special_tokens import tokenizer_of
from posttrain.lm.text import turn_closers
from posttrain.lm.text.chat_template import GENERATION_TAG, PLACEHOLDER, Message, Template
from posttrain.lm.text.layouts import template_of

# The whole template becomes a macro, which renders the conversation up to each turn. A turn is what its rendering adds
# to the generation prompt. What follows the turn is found by the length of its rendering or, where the template renders
# it otherwise in a longer conversation, behind a placeholder in its place. A turn that has no end of its own ends in
# the token that opens the next message.
_WRAPPER = """\
{%- macro posttrain_agreed(one, other) -%}
{%- set at = namespace(length=0) -%}
{%- for power in range(24) -%}
{%- set length = at.length + 2 ** (23 - power) -%}
{%- if length <= one | length and other.startswith(one[:length]) -%}{%- set at.length = length -%}{%- endif -%}
{%- endfor -%}
{{- at.length -}}
{%- endmacro -%}
{%- macro posttrain_show(messages, add_generation_prompt) %}
<SOURCE>{{ '' }}{% endmacro -%}
{%- macro posttrain_hidden(number, stop, add_generation_prompt) -%}
{%- set content = '<MARK>' if messages[number].content is not iterable or messages[number].content is string
    else [{'type': 'text', 'text': '<MARK>'}] -%}
{%- set shown = posttrain_show(messages[:number] + [dict(messages[number], content=content)]
    + messages[number + 1:stop], add_generation_prompt) -%}
{%- if '<MARK>' not in shown -%}
{{- raise_exception('the chat template leaves out the content of message ' ~ number
    ~ ', and renders it otherwise in a longer conversation') -}}
{%- endif -%}
{{- shown -}}
{%- endmacro -%}
{%- macro posttrain_closer(text) -%}
{%- for closer in <ENDS> -%}{{- closer if text.startswith(closer) -}}{%- endfor -%}
{%- endmacro -%}
{%- macro posttrain_write(posttrain, asked, stop, agreed, add_generation_prompt) -%}
{%- set posttrain.start = 0 -%}{%- set posttrain.end = posttrain.done | length -%}
{%- if posttrain.last >= 0 and asked.startswith(posttrain.done) -%}
{%- set posttrain.start = posttrain.done | length -%}
{%- elif posttrain.last >= 0 -%}
{%- set rest = posttrain_hidden(posttrain.last, stop, add_generation_prompt).split('<MARK>', 1)[1] -%}
{%- set ending = posttrain_hidden(posttrain.last, posttrain.last + 1, false).split('<MARK>', 1)[1] -%}
{%- set both = rest[:posttrain_agreed(rest, ending) | int] -%}
{%- set both = both[:both.rfind('<')] if both.rfind('<') > both.rfind('>') else both -%}
{%- set posttrain.start = asked | length - rest | length + both | length -%}
{%- set posttrain.end = posttrain.done | length - ending | length + both | length -%}
{%- endif -%}
{%- if agreed < posttrain.start -%}
{{- raise_exception('the chat template renders earlier messages otherwise when message ' ~ stop ~ ' follows') -}}
{%- endif -%}
{%- endmacro -%}
{%- set posttrain = namespace(last=-1, done='', began=0, start=0, end=0) -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- set here = loop.index0 -%}
{%- set asked = posttrain_show(messages[:here], true) if here
    else posttrain_hidden(0, 1, false).split('<MARK>', 1)[0] -%}
{%- set done = posttrain_show(messages[:here + 1], false) -%}
{%- set agreed = posttrain_agreed(asked, done) | int -%}
{%- if here and not done.startswith(asked)
    and agreed < posttrain_agreed(asked, posttrain_show(messages[:here], false)) | int -%}
{{- raise_exception('the chat template renders the messages before message ' ~ here ~ ' otherwise with its answer') -}}
{%- endif -%}
{{- posttrain_write(posttrain, asked, here, agreed, true) -}}
{%- if posttrain.last >= 0 -%}
{%- set closer = posttrain_closer(asked[posttrain.start:agreed]) -%}
{%- generation -%}{{- posttrain.done[posttrain.began:posttrain.end] ~ closer -}}{%- endgeneration -%}
{%- set posttrain.start = posttrain.start + closer | length -%}
{%- endif -%}
{{- asked[posttrain.start:agreed] -}}
{%- set posttrain.last = here -%}{%- set posttrain.done = done -%}{%- set posttrain.began = agreed -%}
{%- endif -%}
{%- endfor -%}
{%- set asked = posttrain_show(messages, add_generation_prompt | default(false)) -%}
{{- posttrain_write(posttrain, asked, messages | length, asked | length, add_generation_prompt | default(false)) -}}
{%- if posttrain.last >= 0 -%}
{%- set closer = posttrain_closer(asked[posttrain.start:]) if asked[posttrain.start:]
    else <CLOSERS>.get('tool' if messages[posttrain.last].tool_calls else 'user', '') -%}
{%- generation -%}{{- posttrain.done[posttrain.began:posttrain.end] ~ closer -}}{%- endgeneration -%}
{%- set posttrain.start = posttrain.start + closer | length -%}
{%- endif -%}
{{- asked[posttrain.start:] -}}
"""

# Before `_WRAPPER`, for a template that takes the arguments of calls as JSON text.
_WITH_TEXT = """\
{%- set posttrain_read = namespace(messages=[], calls=[]) -%}
{%- for message in messages -%}
{%- set posttrain_read.calls = [] -%}
{%- for call in message.tool_calls or [] -%}
{%- set one = call.function or call -%}
{%- set one = dict(one, arguments=one.arguments | tojson) if one.arguments is mapping else one -%}
{%- set posttrain_read.calls = posttrain_read.calls + [dict(call, function=one) if call.function else one] -%}
{%- endfor -%}
{%- set message = dict(message, tool_calls=posttrain_read.calls) if message.tool_calls else message -%}
{%- set posttrain_read.messages = posttrain_read.messages + [message] -%}
{%- endfor -%}
{%- set messages = posttrain_read.messages -%}
"""

_QUESTIONS = [{"role": "user", "content": f"posttrainq{n}"} for n in range(2)]
_CALL = {"id": "call00000", "type": "function", "function": {"name": "find", "arguments": {"what": "posttrainword"}}}
_ANSWERS = [{"role": "assistant", "content": f"posttraina{n}"} for n in range(2)]
#: Conversations that a wrapped template must render; those that the template itself refuses are left out.
_PROBES: tuple[list[Message], ...] = (
    [_QUESTIONS[0], _ANSWERS[0], _QUESTIONS[1], _ANSWERS[1]],
    [
        _QUESTIONS[0],
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "name": "find", "content": "posttrainfound", "tool_call_id": "call00000"},
        _ANSWERS[1],
    ],
)


def get_training_chat_template(processing_class: Any) -> str | None:
    """A chat template that marks what the assistant writes by ``{% generation %}``, and that renders the messages of a
    conversation alike when more messages follow.

    Any template is taken, not a list of known ones: it stays as it is, within a macro that is called for each turn of
    the assistant. Single turns render as before; where the template does not end them, the token that opens the next
    message is added, by which such models stop. A thought that the template drops from earlier turns stays, and the
    system's words are in each question if the template writes them into the last one. Arguments of calls may be dicts,
    also where the template takes JSON text.

    Args:
        processing_class: a tokenizer or a processor with a chat template. Of named ones, ``default`` is read.

    Returns:
        The template to set as ``processing_class.chat_template``; None if the present one does both already.

    Raises:
        ValueError: there is no chat template, or it does not show where the turns start and stop.
    """
    words = tokenizer_of(processing_class)
    source = template_of(processing_class) or template_of(words)
    source = source.get("default") if isinstance(source, dict) else source
    if not source:
        raise ValueError("There is no chat template to mark. Set chat_template of the tokenizer, or load one with it.")
    probes = list(_shown(words, source))
    if GENERATION_TAG.search(source) and not list(_faults(words, source, source, probes)):
        return None
    wrapped = _wrapped(source, Template(words, chat_template_kwargs={"chat_template": source}))
    if faults := list(_faults(words, source, wrapped, probes)) or ["it refuses a question and an answer"][: not probes]:
        raise ValueError(
            f"The chat template cannot be made to mark the assistant's turns: {faults[0]}. Write {{% generation %}} "
            "and {% endgeneration %} around them in the template, or keep it: SFTTrainer finds the turns itself."
        )
    return wrapped


def _wrapped(source: str, template: Template) -> str:
    # Marks within a macro would be counted from its beginning. `if true` keeps their control of white space.
    inner = re.sub(r"(\{%-?\s*)generation(\s*-?%\})", r"\1if true\2", source)
    inner = re.sub(r"(\{%-?\s*)endgeneration(\s*-?%\})", r"\1endif\2", inner)
    # Jinja drops one line break at the very end of a template.
    closers, ends = template.turn_closers, {*template.turn_closers.values(), template.inner_ending}
    wrapper = _WITH_TEXT * template.takes_text + _WRAPPER
    marked = wrapper.replace("<MARK>", PLACEHOLDER).replace("<CLOSERS>", json.dumps(closers))
    marked = marked.replace("<ENDS>", json.dumps(sorted(ends - {""})))
    return marked.replace("<SOURCE>", inner.removesuffix("\n")).removesuffix("\n")


def _shown(words: Any, source: str) -> Iterator[list[Message]]:
    """The probes that the template renders whole, with contents as texts or as lists of parts."""
    template = Template(words, chat_template_kwargs={"chat_template": source})
    for probe in _PROBES:
        for messages in (probe, [message | {"content": _parts(message["content"])} for message in probe]):
            try:
                text = template.render(messages)
            except DataError:
                continue
            if all(word in text for word in _words(messages)):
                yield messages
                break


def _parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if content else []


def _words(messages: Sequence[Message]) -> list[str]:
    """The words of the probe that a rendering must hold."""
    return re.findall(r"posttrain\w+", str(list(messages)))


def _faults(words: Any, source: str, template: str, probes: Sequence[list[Message]]) -> Iterator[str]:
    """What `template` does wrong on the probes, compared with its `source`."""
    before, after = (Template(words, chat_template_kwargs={"chat_template": text}) for text in (source, template))
    for messages in probes:
        try:
            text, spans = after.trained_spans(messages)
            earlier = [after.render(messages[: n + 1]) for n in range(len(messages) - 1)]
        except DataError as error:
            yield str(error)
            continue
        marked = "".join(text[start:stop] for start, stop in spans)
        said = _words([message for message in messages if message["role"] == "assistant"])
        if _words([{"role": "assistant", "content": marked}]) != said:
            yield "the marks are not around the assistant's turns alone"
        # Without the tokens that end it: some templates end a conversation otherwise than a turn.
        ends = (max(found.end() for found in re.finditer(r"posttrain\w+", shorter)) for shorter in earlier[1:])
        if not all(text.startswith(shorter[:end]) for shorter, end in zip(earlier[1:], ends, strict=True)):
            yield "earlier turns are rendered otherwise in a longer conversation"
        if earlier[1] != before.render(messages[:2]) + turn_closers.after(before.turn_closers, messages[:2]):
            yield "a single turn is rendered otherwise"
