"""Gradient checkpointing: recompute activations in the backward."""

from __future__ import annotations

from typing import Any

from torch import nn

from posttrain.core.models.wrapping import base_model, is_peft_model, unwrap

#: What activation_checkpointing_kwargs may hold: options of torch.utils.checkpoint, and two of transformers.
CHECKPOINT_OPTIONS = (
    "use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop", "every_n_layers",
    "offload",
)  # fmt: skip


def checkpointing_problem(model: nn.Module) -> str | None:
    """Why layers of `model` cannot be recomputed, and what to set, as a sentence; None if they can."""
    kind = unwrap(model).active_peft_config.peft_type if is_peft_model(model) else None
    if kind in ("PREFIX_TUNING", "CARTRIDGE"):  # the names of peft's enumeration, which are strings
        return (
            f"{kind.value} passes its prefix as a key/value cache, which gradient checkpointing disables. Set "
            "gradient_checkpointing=False, or train another adapter, such as peft.PromptTuningConfig or "
            "peft.LoraConfig."
        )
    return None


def enable_gradient_checkpointing(model: nn.Module, kwargs: dict[str, Any] | None = None) -> None:
    """Recompute the activations of each layer in the backward; also switches the key/value cache off.

    Args:
        kwargs: options of `torch.utils.checkpoint.checkpoint`, with `use_reentrant` False unless given; also
            `every_n_layers` and `offload`, if the installed transformers has them.

    Raises:
        ValueError: for a problem from `checkpointing_problem`, and for a model without support.
    """
    if problem := checkpointing_problem(model):
        raise ValueError(problem)
    base = base_model(model)
    options = {"use_reentrant": False} | (kwargs or {})
    extras = {name: options.pop(name) for name in ("every_n_layers", "offload") if name in options}
    if hasattr(base, "activation_checkpointing_enable"):
        base.activation_checkpointing_enable(activation_checkpointing_kwargs=options, **extras)
    elif hasattr(base, "gradient_checkpointing_enable"):
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options, **extras)
    else:
        raise ValueError(
            f"{type(base).__name__} has no gradient_checkpointing_enable(). Set activation_checkpointing=False, or "
            "define that method on the model."
        )
    if is_peft_model(model) and hasattr(base, "enable_input_require_grads"):
        base.enable_input_require_grads()
    if hasattr(base, "config"):
        base.config.use_cache = False
