"""Reward models that see images: a vision-language model with a head of one output.

transformers has such classes for some families (Gemma 3, Qwen3.5). For the others they are made here, of the same
parts: the family's model without its output head, and a linear layer on the last token before padding. A folder that
one was saved to is loaded by `load_reward_model` again.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import nn

from posttrain.core.models.wrapping import config_of, sees_images, setting
from posttrain.lm.loading import loading
from posttrain.lm.loading.loading import base_of_adapter, explain_missing, is_adapter, load_causal_lm, missing_folder

TASK = "AutoModelForSequenceClassification"


def score_class(config: Any) -> type:
    """The class of models with this vision-language config and a head of ``config.num_labels`` outputs; a TypeError
    where transformers has no model for that config.
    """
    import transformers

    known: Any = transformers.AutoModelForSequenceClassification._model_mapping
    kind: Any = type(config)
    return known[kind] if kind in known else _made_class(kind)


@functools.cache
def _made_class(config_class: type) -> type:
    from transformers import AutoModel, PreTrainedModel
    from transformers.modeling_layers import GenericForSequenceClassification

    known: Any = AutoModel._model_mapping
    if config_class not in known:
        raise TypeError(f"transformers has no model for a {config_class.__name__}, so it cannot get a score head.")
    model_class = known[config_class]
    parent = next(kind for kind in model_class.__mro__[1:] if issubclass(kind, PreTrainedModel))
    name = model_class.__name__.removesuffix("Model") + "ForSequenceClassification"
    # transformers looks in the module of a class for what its family can do.
    return type(name, (GenericForSequenceClassification, parent), {"__module__": model_class.__module__})


def with_score_head(model: nn.Module) -> nn.Module:
    """A reward model of a loaded vision-language `model`, whose weights it shares, with a new head of one output."""
    config: Any = model.config
    config.num_labels = 1
    with torch.device("meta"):
        made: Any = score_class(config)(config)
    made.model = model.model
    weight = next(parameter for parameter in made.model.parameters() if parameter.is_floating_point())
    made.score = nn.Linear(
        config.get_text_config().hidden_size, 1, bias=False, dtype=weight.dtype, device=weight.device
    )
    nn.init.normal_(made.score.weight, std=getattr(config.get_text_config(), "initializer_range", 0.02))
    return made


def load_reward_model(
    name_or_path: str | os.PathLike[str],
    model_init_kwargs: dict[str, Any] | None = None,
    quantization_config: Any = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Load a model that scores texts, with images where it is of a vision-language family; see `load_causal_lm`. Where
    the folder holds no head of one output, a new one is added.
    """
    options = {"num_labels": 1} | (model_init_kwargs or {})
    kind: Any = TASK
    if not trust_remote_code and missing_folder(name_or_path) is None:  # else loading says what is wrong
        with explain_missing(os.fspath(name_or_path), "model"):
            folder = os.fspath(name_or_path)
            adapted = is_adapter(folder)
            config = loading.config_of(base_of_adapter(folder) if adapted else folder, {} if adapted else options)
        kind = score_class(config) if sees_images(config) else TASK
    return load_causal_lm(name_or_path, options, quantization_config, trust_remote_code, kind)


def new_reward_model(config: Any, **kwargs: Any) -> nn.Module:
    """A model with this config and a head of ``config.num_labels`` outputs, with new weights; `kwargs` as transformers'
    ``from_config`` takes them.
    """
    import transformers

    if not sees_images(config):
        return getattr(transformers, TASK).from_config(config, **kwargs)
    kind: Any = score_class(config)
    return kind._from_config(config, **{name: value for name, value in kwargs.items() if name != "trust_remote_code"})


def set_pad_token(model: nn.Module, pad_token_id: int | None) -> None:
    """Let `model` find the last token of a padded row, off which the reward is read."""
    config: Any = config_of(model)
    for one in () if config is None else (config, config.get_text_config()):
        if setting(one, "pad_token_id") is None:
            one.pad_token_id = pad_token_id
