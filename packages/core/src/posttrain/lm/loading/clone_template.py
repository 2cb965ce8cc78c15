"""Gives a model the chat template and the special tokens of another tokenizer."""

from __future__ import annotations

import os
from typing import Any

from posttrain.core.models.wrapping import PretrainedModel, generation_config
from posttrain.lm.loading.loading import load_tokenizer


def clone_chat_template(
    model: PretrainedModel,
    tokenizer: Any,
    source_tokenizer_path: str | os.PathLike[str],
    resize_to_multiple_of: int | None = 64,
) -> tuple[PretrainedModel, Any, list[int]]:
    """Let `tokenizer` write chats as the tokenizer at `source_tokenizer_path` does, and `model` know the tokens for it.

    The added tokens that `tokenizer` lacks are taken over, its eos token becomes that of the source, in the configs of
    the model too, and the embeddings grow. The rows of new tokens are to be trained.

    Args:
        resize_to_multiple_of: round the number of embeddings up to a multiple of this; unused tokens fill the
            vocabulary up to it. None: no rounding.

    Returns:
        (model, tokenizer, ids of the tokens that are new); both are changed in place.

    Raises:
        ValueError: the source has no chat template.
    """
    source = load_tokenizer(source_tokenizer_path)
    if source.chat_template is None:
        raise ValueError(f"The tokenizer at {os.fspath(source_tokenizer_path)!r} has no chat template to clone.")
    tokenizer.chat_template = source.chat_template
    known = tokenizer.get_vocab()
    new = [token for token in source.added_tokens_decoder.values() if token.content not in known]
    tokenizer.add_tokens(new)
    tokenizer.eos_token = source.eos_token
    model.config.get_text_config().eos_token_id = tokenizer.eos_token_id
    if model.can_generate():
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.resize_token_embeddings(len(tokenizer.get_vocab()), pad_to_multiple_of=resize_to_multiple_of)
    words, number = [token.content for token in new], 0
    while len(tokenizer.get_vocab()) < model.config.get_text_config().vocab_size:
        word, number = f"<extra_id_{number}>", number + 1
        words += [word] * tokenizer.add_tokens([word])
    return model, tokenizer, tokenizer.convert_tokens_to_ids(words)


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def setup_chat_format(
    model: PretrainedModel, tokenizer: Any, format: str = "chatml", resize_to_multiple_of: int | None = None
) -> tuple[PretrainedModel, Any]:
    """Let a base model and its tokenizer, which has no chat template, write chats as ChatML. As early versions of trl
    had it; `clone_chat_template` takes over the template of another tokenizer.

    The tokens ``<|im_start|>`` and ``<|im_end|>`` become begin and end of a text, the latter also its padding. The rows
    of new tokens are to be trained.

    Args:
        format: ``"chatml"``, the only one.

    Returns:
        (model, tokenizer), changed in place.

    Raises:
        ValueError: the tokenizer has a chat template, or another format is asked for.
    """
    if tokenizer.chat_template is not None:
        raise ValueError(
            "The tokenizer has a chat template already. Leave setup_chat_format out to use it, or set "
            "tokenizer.chat_template = None first to replace it."
        )
    if format != "chatml":
        raise ValueError(f"format={format!r} is not 'chatml'; use posttrain.core.clone_chat_template for another one.")
    start, end = "<|im_start|>", "<|im_end|>"
    tokenizer.add_special_tokens(
        {"bos_token": start, "eos_token": end, "pad_token": end, "additional_special_tokens": [start, end]}
    )
    tokenizer.chat_template = CHATML
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=resize_to_multiple_of)
    for config in (model.config.get_text_config(), generation_config(model)):
        if config is not None:
            config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
            config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer
