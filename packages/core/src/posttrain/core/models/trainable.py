"""Models to train: made by ``model_init``, and with something in them that can be trained."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from posttrain.core.models.wrapping import adapters_of, base_model, is_peft_model, setting

logger = logging.getLogger(__name__)


def takes_trial(model_init: Callable[..., nn.Module]) -> bool:
    """Whether `model_init` is called with the trial of a search."""
    return any(
        p.name == "trial" or (p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD)
        for p in inspect.signature(model_init).parameters.values()
    )


def model_of(model_init: Callable[..., nn.Module], trial: Any = None) -> nn.Module:
    """A fresh model from `model_init`, called with the trial where it takes one. Raises a `RuntimeError` where it
    returned None.
    """
    model = model_init(trial) if takes_trial(model_init) else model_init()
    if model is None:
        raise RuntimeError("model_init returned None; it must return a model.")
    return model


def switch(model: nn.Module, switched: dict[str, bool]) -> dict[str, bool]:
    """Freeze (False) or train (True) the parameters in `switched`, as callbacks had when a checkpoint was saved;
    returns whether each was trained before.
    """
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(switched.get(name, before[name]))
    if names := [name for name, now in switched.items() if before.get(name, now) != now]:
        logger.info("Frozen or trained as when the checkpoint was saved: %s (%d).", ", ".join(names[:3]), len(names))
    return before


def is_quantized(model: nn.Module) -> bool:
    """Whether the weights of the base are stored in quantized form."""
    base = base_model(model)
    marks = ("is_quantized", "is_loaded_in_8bit", "is_loaded_in_4bit")
    return any(setting(base, mark) for mark in marks) or setting(base, "hf_quantizer") is not None


def check_trainable(model: nn.Module) -> None:
    """Raise ValueError if nothing can be trained: quantized weights without an adapter, which round small changes away
    (unless transformers' ``is_qat_trainable`` is True), or a frozen adapter.
    """
    base = base_model(model)
    adapted = is_peft_model(model) or getattr(base, "_hf_peft_config_loaded", False)
    for config in adapters_of(model).values() if is_peft_model(model) else ():
        check_base_can_be_found_again(config)
    if is_quantized(model) and not adapted and not getattr(setting(base, "hf_quantizer"), "is_qat_trainable", False):
        raise ValueError(
            f"This {type(base).__name__} is quantized, and quantized weights cannot be trained themselves. "
            "Pass peft_config (e.g. peft.LoraConfig()) to train an adapter on them, or load the model unquantized."
        )
    if is_peft_model(model) and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"The adapter of this {type(base).__name__} is frozen, so there is nothing to train. Load it with "
            "PeftModel.from_pretrained(model, folder, is_trainable=True)."
        )
    _keep_products_differentiable(base)


def _keep_products_differentiable(model: nn.Module) -> None:
    """Hold bitsandbytes' layers of 4 bits in the form through which gradients flow.

    On processors with AVX512-BF16 an evaluation packs them for good for a kernel without a backward pass: every layer
    before them would get no gradient from then on, in silence.
    """
    module: Any
    for module in model.modules():
        if not getattr(module, "support_avx512bf16_for_cpu", False):
            continue
        module.support_avx512bf16_for_cpu = False
        state = getattr(module.weight, "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            module.state_dict()  # writing it down unpacks it in place


def check_base_can_be_found_again(peft_config: Any) -> None:
    """Raise ValueError if the adapter began by changing the weights below by numbers that no checkpoint holds.

    PiSSA, OLoRA and LoftQ compute what they take off these weights from the weights alone, and so does who loads them.
    """
    init = str(vars(peft_config).get("init_lora_weights"))
    if init.startswith("pissa_niter_") or init in ("corda", "lora_ga"):
        raise ValueError(
            f"init_lora_weights={init!r} changes the weights below the adapter by numbers that depend on chance or on "
            "data. A saved adapter holds none of them, so loaded on the model it would compute something else. Set "
            "'pissa' or 'olora'; or save model.get_base_model() as the new base, and set "
            "init_lora_weights=True in the adapter's config."
        )
