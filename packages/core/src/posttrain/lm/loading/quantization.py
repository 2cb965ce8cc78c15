"""Configures and detects weights in 4 or 8 bits."""

from __future__ import annotations

import logging
from typing import Any

import torch

from posttrain.core.errors import require
from posttrain.core.models.wrapping import PretrainedModel, setting

logger = logging.getLogger(__name__)

BITS = ("load_in_4bit", "load_in_8bit")


def to_one_type(model: PretrainedModel) -> PretrainedModel:
    """`model`, whose stored weights were read as what they stand for, with all of them in the dtype of its config.

    transformers computes float8 weights in that dtype where the device does not multiply them, and leaves norms,
    embeddings and the head in the one they are stored in. What the model keeps in float32 remains.
    """
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    for name, parameter in model.named_parameters():
        stays = parameter.dtype == torch.float32 and any(part in name.split(".") for part in kept)
        if parameter.is_floating_point() and not stays:
            parameter.data = parameter.data.to(model.config.dtype)
    return model


def asked_bits(kwargs: dict[str, Any] | None, quantization_config: Any = None) -> str | None:
    """``load_in_4bit`` or ``load_in_8bit`` where bitsandbytes is to quantize a model that is loaded so."""
    kwargs = kwargs if isinstance(kwargs, dict) else {}
    holders = (kwargs, kwargs.get("quantization_config"), quantization_config)
    return next((name for holder in holders for name in BITS if _asks(holder, name)), None)


def _asks(config: Any, name: str) -> bool:
    return bool(config.get(name) if isinstance(config, dict) else setting(config, name))


def tell_left(model: PretrainedModel) -> None:
    """Warn of experts that are one tensor of `model`: bitsandbytes quantizes linear layers alone."""
    left = [p for name, p in model.named_parameters() if ".experts." in name and p.ndim == 3 and p.is_floating_point()]
    if left:
        share = sum(p.nbytes for p in left) / sum(p.nbytes for p in model.parameters())
        what = f"linear layers alone: the experts of this {type(model).__name__}, {share:.0%} of its bytes, stay in"
        how = "For 4 bits, see bitsandbytes.nn.parametrize.replace_parameter_4bit; they then take no adapter."
        logger.warning("bitsandbytes quantizes %s %s. %s", what, left[0].dtype, how)


def quantization_kwargs(kwargs: dict[str, Any], given: Any | None) -> dict[str, Any]:
    """The `quantization_config` of ``from_pretrained``; what describes one is taken out of `kwargs`."""
    fields = {
        name: kwargs.pop(name) for name in list(kwargs) if name.startswith(("load_in_", "bnb_4bit_", "llm_int8_"))
    }
    inside = kwargs.pop("quantization_config", None)
    if given is not None and inside is not None:
        raise ValueError("quantization_config was given twice: as an argument and in model_init_kwargs. Keep one.")
    config = inside if given is None else given
    asked = [name for name in BITS if fields.get(name)]
    if config is None:
        config = fields if asked else None
    elif asked and not any(_asks(config, name) for name in asked):
        raise ValueError(f"model_init_kwargs has {asked[0]}=True, which contradicts quantization_config. Keep one.")
    if isinstance(config, dict) and any(config.get(name) for name in BITS):
        require("bitsandbytes", "posttrain-core[quantization]", why="load_in_4bit and load_in_8bit")
        from transformers import BitsAndBytesConfig

        config = BitsAndBytesConfig(**{name: value for name, value in config.items() if name != "quant_method"})
    return {} if config is None else {"quantization_config": config}
