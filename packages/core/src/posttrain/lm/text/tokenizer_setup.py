"""Gives a tokenizer the chat template and the special tokens that a config names."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import torch

from posttrain.core.config import value_of
from posttrain.core.errors import did_you_mean
from posttrain.core.models.special_tokens import ensure_pad_token, tokenizer_of

logger = logging.getLogger(__name__)


def load_template(source: str | os.PathLike[str], trust_remote_code: bool = False) -> str:
    """The chat template in a Jinja file, or of the tokenizer in a folder or under a name on the Hub. Raises a
    `FileNotFoundError` where there is no such file or folder and the Hub gave nothing under that name, and a
    `ValueError` where the tokenizer there has no chat template.
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
            f"chat_template_path={path!r} is no file below {os.getcwd()} and no tokenizer's folder or name: {error}"
        ) from error
    if not tokenizer.chat_template:
        raise ValueError(f"chat_template_path={path!r}: the tokenizer there has no chat template.")
    return tokenizer.get_chat_template()


def set_up_tokenizer(tokenizer: Any, args: Any) -> None:
    """Set the chat template and special tokens that `args` name, and a pad token if there is none. `args`: a config; of
    ``chat_template_path``, ``eos_token`` and ``pad_token`` it may have any. Raises a `ValueError` for a token that is
    not in the vocabulary, and a `FileNotFoundError` where there is no chat template.
    """
    for problem in token_problems(tokenizer, args):
        raise problem
    if (path := value_of(args, "chat_template_path")) is not None:
        tokenizer.chat_template = load_template(path, args.trust_remote_code)
    words = tokenizer_of(tokenizer)  # a processor's
    for name in ("eos_token", "pad_token"):
        if (token := value_of(args, name)) is not None:
            setattr(words, name, token)
    if done := ensure_pad_token(tokenizer):
        logger.info(done)


def token_problems(tokenizer: Any, args: Any) -> Iterator[ValueError]:
    """Problems: special tokens in `args` that the tokenizer does not have, or a tokenizer that cannot be saved."""
    words = tokenizer_of(tokenizer)
    for name, value in getattr(words, "init_kwargs", {}).items():  # what is no tokenizer is refused elsewhere
        if isinstance(value, torch.dtype):
            yield ValueError(
                f"The tokenizer was loaded with {name}={value}, an argument of models with which it cannot be saved; "
                f"load it without {name}."
            )
    for name in ("eos_token", "pad_token"):
        token = value_of(args, name)
        if token is not None and words.convert_tokens_to_ids(token) in (None, words.unk_token_id):
            near = did_you_mean(token, words.all_special_tokens)
            yield ValueError(f"{name}={token!r} is not in the tokenizer's vocabulary{near}; name a token that is.")
