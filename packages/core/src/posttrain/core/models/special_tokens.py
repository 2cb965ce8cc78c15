"""Sets pad, eos and bos tokens of tokenizers and the matching ids of models."""

from __future__ import annotations

from typing import Any

from torch import nn

from posttrain.core.models.wrapping import base_model, config_of, generation_config, setting, text_config

PAD_CANDIDATES = (
    "<|pad|>",
    "<pad>",
    "[PAD]",
    "<|padding|>",
    "<|finetune_right_pad_id|>",  # Llama 3.1
    "<|vision_pad|>",  # Qwen 2 and later
    "<|endoftext|>",
    "<unk>",
)


def ensure_pad_token(processing_class: Any) -> str | None:
    """Give a tokenizer without a pad token one from its vocabulary, if possible other than its eos token.

    The vocabulary does not grow. Labels are masked by length, never by id, so that eos as pad costs no training signal.
    Returns a sentence about the change, or None.
    """
    tokenizer = tokenizer_of(processing_class)
    if tokenizer.pad_token is not None:
        return None
    vocabulary = tokenizer.get_vocab()
    for token in PAD_CANDIDATES:
        if token in vocabulary and token != tokenizer.eos_token:
            tokenizer.pad_token = token
            return f"The tokenizer had no pad token; {token!r}, which its vocabulary holds, is used."
    if tokenizer.eos_token is None:
        raise ValueError(
            "The tokenizer has neither a pad nor an eos token, so batches cannot be padded. Set tokenizer.pad_token."
        )
    tokenizer.pad_token = tokenizer.eos_token
    return f"The tokenizer had no pad token; its eos token {tokenizer.eos_token!r} is used for padding too."


def align_special_tokens(model: nn.Module, processing_class: Any) -> dict[str, int]:
    """Copy the pad, eos and bos ids that the tokenizer has to the model's config and generation config.

    A generation config that stops at several tokens still stops at them. Returns ``{name of the id: new id}`` for what
    changed in either config.
    """
    base = base_model(model)
    config, generation = config_of(base), generation_config(base)
    tokenizer = tokenizer_of(processing_class)
    if config is None or not hasattr(tokenizer, "eos_token_id"):
        return {}
    config = text_config(config)
    changed = {}
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        token = getattr(tokenizer, name, None)
        if token is None:
            continue
        if setting(config, name) != token:
            setattr(config, name, token)
            changed[name] = token
        known = setting(generation, name)
        stops = (
            [] if known is None or name != "eos_token_id" else [*known] if isinstance(known, (list, tuple)) else [known]
        )
        if generation is not None and known != token and token not in stops:
            setattr(generation, name, [token, *stops] if stops else token)
            changed[name] = token
    return changed


def tokenizer_of(processing_class: Any) -> Any:
    """The tokenizer itself, also where a processor holds it."""
    return getattr(processing_class, "tokenizer", processing_class)
