"""The command ``posttrain chat``: a conversation with a model in the terminal."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import Any

import torch
from torch import nn

from posttrain.cli.tools import load
from posttrain.core.errors import ConfigError
from posttrain.core.models.wrapping import is_peft_model
from posttrain.lm.loading import loading

WORDS = "/clear begins anew, /base answers the last message without the adapter, /quit ends it"
HELP = f"""posttrain chat MODEL [--compare] [--system TEXT] [--temperature T] [--max_new_tokens N] [--seed N] ...

Talk to a model, or to an adapter on its base, in the terminal. Answers appear as they are written. Without a chat
template the model continues your text.

  --compare            after each answer of an adapter, also that of its base
  --system TEXT        the system message
  --temperature T      0 takes the most probable token [default 0.7]
  --max_new_tokens N   length of an answer at most [default 256]
  --seed N             for answers that can be repeated
{load.FLAGS}

In the conversation: {WORDS}."""
KINDS = {"compare": bool, "system": str, "temperature": float, "max_new_tokens": int, "seed": int}


def run(words: list[str]) -> None:
    """Converse with a model."""
    name, given = load.read_words("chat", words, KINDS)
    if given.get("compare") and not loading.is_adapter(name):
        raise ConfigError("chat", [f"--compare needs the folder of an adapter, and {name} is none"])
    model, tokenizer = load.of_command("chat", name, given)
    if (seed := given.pop("seed", None)) is not None:
        torch.manual_seed(seed)
    converse(model, tokenizer, **given)


def reply(
    model: nn.Module,
    tokenizer: Any,
    messages: str | list[dict[str, Any]],
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.7,
    stream: bool = False,
) -> str:
    """The answer of a model.

    Args:
        messages: a conversation, or a text to go on with where the model has no chat template.
        temperature: 0 takes the most probable token.
        stream: also print it as it is written.
    """
    from transformers import TextStreamer

    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
    options = load.sampling(temperature) | {"max_new_tokens": max_new_tokens, "streamer": streamer}
    [ids] = load.write(model, tokenizer, [load.encode(tokenizer, messages)], **options)
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def converse(
    model: nn.Module, tokenizer: Any, system: str | None = None, compare: bool = False, **options: Any
) -> None:
    """Answer messages from the standard input until its end, or /quit; `options` are those of `reply`."""
    chats, interactive = tokenizer.chat_template is not None, sys.stdin.isatty()
    begin: list[dict[str, Any]] = [{"role": "system", "content": system}] if system and chats else []
    messages = list(begin)
    if interactive:
        print(f"Write a message. {WORDS}.")
        if not chats:
            print("This model has no chat template: it continues your text.")
    while True:
        line = _asked() if interactive else sys.stdin.readline()
        text = line.strip()
        if not line or text in ("/quit", "/exit"):
            return
        if text == "/clear":
            messages = list(begin)
        elif text == "/base":
            _answer_of_base(model, tokenizer, messages, options)
        elif re.fullmatch(r"/\w+", text):
            print(f"There is no {text}. {WORDS}.")
        elif text:
            messages = [*messages, {"role": "user", "content": text}] if chats else [{"content": text}]
            answer = _answer(model, tokenizer, messages, options)
            if compare:
                print("\n[without the adapter]")
                _answer_of_base(model, tokenizer, messages, options)
            if chats and answer is not None:
                messages.append({"role": "assistant", "content": answer})


def _asked() -> str:
    """What is typed at the prompt, with its newline; empty at the end of the input and after Ctrl-C."""
    with contextlib.suppress(ImportError):  # not on Windows: it lets `input` edit, and go back to earlier messages
        import readline  # noqa: F401
    try:
        return input("\n> ") + "\n"
    except (EOFError, KeyboardInterrupt):
        print()
        return ""


def _answer_of_base(model: nn.Module, tokenizer: Any, messages: list[dict[str, Any]], options: dict[str, Any]) -> None:
    asked = messages[:-1] if messages and messages[-1].get("role") == "assistant" else messages
    if not asked or asked[-1].get("role") == "system":
        print("Write a message first.")
    elif not is_peft_model(model):
        print("This model has no adapter.")
    else:
        with load.without_adapter(model):
            _answer(model, tokenizer, asked, options)


def _answer(model: nn.Module, tokenizer: Any, messages: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    """The answer; None where Ctrl-C cut it short, which ends only this answer."""
    try:
        prompt = messages if tokenizer.chat_template is not None else messages[-1]["content"]
        return reply(model, tokenizer, prompt, stream=True, **options)
    except KeyboardInterrupt:
        print("\n[cut short]")
        return None
