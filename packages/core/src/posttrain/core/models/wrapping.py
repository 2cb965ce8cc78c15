"""Unwraps models: torch.compile, DDP, FSDP, DeepSpeed and peft."""

from __future__ import annotations

from torch import nn


def unwrap(model: nn.Module) -> nn.Module:
    """`model` without the wrappers of torch.compile, DDP, FSDP and DeepSpeed; adapters stay."""
    wrappers = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine"}
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif wrappers & {kind.__name__ for kind in type(model).__mro__}:
            model = model.module
        else:
            return model


def is_peft_model(model: nn.Module) -> bool:
    """Whether `model`, unwrapped, is a `peft.PeftModel`. Does not import peft."""
    return any(kind.__name__ in ("PeftModel", "PeftMixedModel") for kind in type(unwrap(model)).__mro__)


def has_virtual_tokens(model: nn.Module) -> bool:
    """Whether an adapter adds virtual tokens before each row: prompt tuning, prefix tuning and variants."""
    return is_peft_model(model) and bool(getattr(unwrap(model).active_peft_config, "is_prompt_learning", False))


def base_model(model: nn.Module) -> nn.Module:
    """The model of transformers below all wrappers and adapters."""
    model = unwrap(model)
    return unwrap(model.get_base_model()) if is_peft_model(model) else model
