"""Gives a model the chat template and the special tokens of another tokenizer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from posttrain.core.models.loading import load_tokenizer

if TYPE_CHECKING:
    from posttrain.core.models.wrapping import PretrainedModel


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
