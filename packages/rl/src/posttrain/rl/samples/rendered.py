"""Prompts, calls and answers as the package `renderers` writes and reads them, which knows each model by hand
(https://pypi.org/project/renderers), in place of the chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.core.errors import require
from posttrain.lm.text.chat_template import to_messages
from posttrain.rl.samples.prompts import PromptCodec
from posttrain.rl.tools.formats import Call
from posttrain.rl.tools.protocol import QUESTION, ToolProtocol, Turn, names_all


class RenderedPrompts(PromptCodec):
    """A `PromptCodec` by the renderer `name`, or by that of the model for "auto".

    Raises:
        ValueError: there is no such renderer, or the tokenizer lacks one of its tokens.
    """

    def __init__(
        self, tokenizer: Any, name: str, chat_template_kwargs: dict[str, Any] | None = None, limit: int | None = None
    ) -> None:
        super().__init__(tokenizer, chat_template_kwargs, limit)
        self.renderer = made(tokenizer, name, chat_template_kwargs)
        self._by_template = PromptCodec(tokenizer, chat_template_kwargs, limit)
        self._first = list(self.renderer.render_ids([QUESTION], add_generation_prompt=True))

    def message_ids(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, show: Callable[[str], str] | None
    ) -> list[int]:
        if messages[-1]["role"] == "assistant":
            return super().message_ids(messages, tools, show)  # a renderer leaves no turn open
        return list(self.renderer.render_ids(messages, tools=tools or None, add_generation_prompt=True))

    def next_ids(
        self, written: Sequence[int], messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> list[int]:
        before = self._first, list(written)
        found = self.renderer.bridge_to_next_turn(*before, to_messages(messages), tools=list(tools) or None)
        if found is None:  # it would write the conversation again, from whose tokens the policy has gone on
            return self._by_template.next_ids(written, messages, tools)
        return list(found.token_ids[sum(map(len, before)) :])

    def make_protocol(self, schemas: Sequence[dict[str, Any]]) -> ToolProtocol:
        return RenderedTools(self, schemas)

    def decode(
        self, prompt: Any, ids: list[int], prompt_ids: Sequence[int] = (), tools: Sequence[dict[str, Any]] = ()
    ) -> Any:
        if isinstance(prompt, str):
            return super().decode(prompt, ids, prompt_ids, tools)
        return [self.protocol(tools).read(ids, tools, prompt_ids).message]


class RenderedTools(ToolProtocol):
    """Reads the calls of tools with these `schemas` by the renderer of `codec`."""

    def __init__(self, codec: RenderedPrompts, schemas: Sequence[dict[str, Any]]) -> None:
        self.renderer, self.example = codec.renderer, ""
        asked = list(self.renderer.render_ids([QUESTION], tools=list(schemas) or None, add_generation_prompt=True))
        self.describes = names_all(codec.tokenizer.decode(asked), schemas)
        self.end_ids = tuple(self.renderer.get_stop_token_ids())

    def read(self, ids: Sequence[int], schemas: Sequence[dict[str, Any]], prompt_ids: Sequence[int] = ()) -> Turn:
        found = self.renderer.parse_response(list(ids), tools=list(schemas) or None, prompt_ids=list(prompt_ids))
        calls = tuple(
            Call(call.name or "", call.arguments if isinstance(call.arguments, dict) else None, call.id)
            for call in found.tool_calls
        )
        message: dict[str, Any] = {"role": "assistant", "content": found.content}
        if found.reasoning_content:
            message["reasoning_content"] = found.reasoning_content
        if readable := [call.as_message() for call in calls if call.arguments is not None]:
            message["tool_calls"] = readable
        return Turn(message, calls)


def codec_of(
    tokenizer: Any, args: Any, chat_template_kwargs: dict[str, Any] | None = None, limit: int | None = None
) -> PromptCodec:
    """What makes tokens of the prompts of a run with these `args`, of which the model knows `limit`."""
    kwargs = chat_template_kwargs or args.chat_template_kwargs
    if args.renderer is None:
        return PromptCodec(tokenizer, kwargs, limit)
    return RenderedPrompts(tokenizer, args.renderer, kwargs, limit)


def made(tokenizer: Any, name: str, chat_template_kwargs: dict[str, Any] | None) -> Any:
    """The renderer `name` for `tokenizer`."""
    require("renderers", "posttrain-rl[environments]", f"renderer={name!r}")
    from renderers import base, configs

    model = str(tokenizer.name_or_path)
    try:
        if name == "auto" and model not in base.MODEL_RENDERER_MAP:
            raise ValueError(f"the package has none for the model {model!r}")
        config = configs.config_from_name(name)
        return base.create_renderer(tokenizer, config, chat_template_kwargs=chat_template_kwargs)
    except (ValueError, TypeError, RuntimeError, KeyError, AttributeError) as error:
        raise ValueError(f"renderer={name!r} cannot be used: {error}. Name another, or leave it out.") from error
