"""Problems with a language model, its adapter and its tokenizer, found before the model is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch import nn

from posttrain.core.training.preflight import Parts, Problem, caught
from posttrain.lm.loading import adapters, loading, quantization
from posttrain.lm.text import chat_template


def model_problems(args: Any, parts: Parts, wanted: str) -> Iterator[Problem]:
    """Problems with the model, or with the loading options of a named one, and with its adapter.

    Args:
        parts: gets a `read_config`, where a named model can be read.
        wanted: what the trainer takes, for the message about anything else.
    """
    if parts.model_init is not None:
        if parts.model is not None:
            yield ValueError("model and model_init were both given; pass one of them.")
        if isinstance(parts.model_init, nn.Module):
            yield TypeError("model_init is a model; pass the function that makes it, without calling it.")
    elif not parts.is_named and not isinstance(parts.model, nn.Module):
        yield TypeError(f"model is of type {type(parts.model).__name__}; {wanted}")
    kwargs = getattr(args, "model_init_kwargs", None)
    if parts.is_named:
        if loading.missing_folder(parts.model) is None:
            read = loading.explain_missing(os.fspath(parts.model), "model")(loading.config_of)
            parts.read_config = lambda: read(parts.model, kwargs or {}, args.trust_remote_code)
        yield from loading.loading_problems(parts.model, kwargs, parts.quantization_config)
        bits = quantization.asked_bits(kwargs, parts.quantization_config)
        is_adapter = loading.is_adapter(parts.model)
        if bits and parts.peft_config is None and parts.train_dataset is not None and not is_adapter:
            yield (
                f"{bits}=True loads quantized weights, which cannot be trained themselves. Pass peft_config (e.g. "
                "peft.LoraConfig()) to train an adapter on them, or load the model unquantized"
            )
    elif kwargs is not None or parts.quantization_config is not None:
        yield ValueError("model_init_kwargs and quantization_config load a model by name, but a model was passed.")
    if isinstance(parts.ref_model, nn.Module) and parts.ref_model is parts.model:
        yield ValueError("ref_model is the model itself, so it would move with it. Leave it out: a copy is made.")
    if isinstance(parts.ref_model, (str, os.PathLike)):
        yield from loading.loading_problems(parts.ref_model, kwargs, None)
    if parts.peft_config is not None:
        yield from caught(adapters.check_peft_config, parts.peft_config)


def tokenizer_problems(args: Any, parts: Parts) -> Iterator[Problem]:
    """Problems with the tokenizer or the named special tokens; loads a named model's tokenizer, which is small."""
    if parts.processing_class is None and parts.is_named and loading.missing_folder(parts.model) is None:
        try:
            parts.processing_class = loading.load_tokenizer(parts.model, args.trust_remote_code, parts.auto_class)
        except (OSError, ValueError, ImportError) as error:
            yield error
    if parts.processing_class is not None:
        yield from chat_template.token_problems(parts.processing_class, args)
    if (template := getattr(args, "chat_template_path", None)) is not None:
        yield from caught(chat_template.load_template, template, args.trust_remote_code)
