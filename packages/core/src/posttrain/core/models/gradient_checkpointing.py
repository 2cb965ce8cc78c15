"""Gradient checkpointing: recompute activations in the backward."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from posttrain.core.models.wrapping import base_model, input_embedding, is_peft_model, unwrap

#: What activation_checkpointing_kwargs may hold: options of torch.utils.checkpoint, two of transformers, and our own.
CHECKPOINT_OPTIONS = (
    "use_reentrant",
    "preserve_rng_state",
    "context_fn",
    "determinism_check",
    "debug",
    "early_stop",
    "every_n_layers",
    "offload",
    "mlp_tile",
)
#: Those of them that are on or off.
CHECKPOINT_SWITCHES = ("use_reentrant", "preserve_rng_state", "debug", "early_stop")

_HOOKS = "_require_grads_hooks"  # of transformers


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


def make_inputs_require_grads(part: nn.Module, given: Any, output: torch.Tensor) -> None:
    """A hook of embeddings, so that layers which are recomputed hand a gradient on; named as that of transformers."""
    output.requires_grad_()


def enable_gradient_checkpointing(model: nn.Module, kwargs: dict[str, Any] | None = None) -> None:
    """Recompute the activations of each layer in the backward; also switches the key/value cache off. Raises a
    `ValueError` for a problem from `checkpointing_problem`, and for a model without support.

    Args:
        kwargs: options of `torch.utils.checkpoint.checkpoint`, with `use_reentrant` False unless given; also
            `every_n_layers` and `offload`, if the installed transformers has them; and `mlp_tile`, the tokens for which
            an MLP is recomputed at a time.
    """
    if problem := checkpointing_problem(model):
        raise ValueError(problem)
    base = base_model(model)
    options = {"use_reentrant": False} | (kwargs or {})
    if (tile := options.pop("mlp_tile", None)) is not None:
        _tile_mlps(base, tile)
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
    if is_peft_model(model) and hasattr(base, "enable_input_require_grads") and not vars(base).get(_HOOKS):
        base.enable_input_require_grads()
    if not options["use_reentrant"] and vars(base).get(_HOOKS) and (inputs := input_embedding(base)) is not None:
        # transformers lets the inputs of all parts require a gradient: a frozen vision tower is computed backwards.
        base.disable_input_require_grads()
        setattr(base, _HOOKS, [inputs.register_forward_hook(make_inputs_require_grads)])
    if hasattr(base, "config"):
        base.config.use_cache = False


def _tile_mlps(base: nn.Module, tokens: int) -> None:
    """Let the MLPs of `base` be computed, and in the backward pass recomputed, for so many tokens at a time.

    A recomputed layer else holds six tensors of the MLP's width for all tokens of a micro-batch at once. The price is
    one more forward pass of the MLPs. Raises a `ValueError` where `tokens` is no number above 0, or the model has no
    MLP that is known.
    """
    if not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"activation_checkpointing_kwargs: mlp_tile={tokens!r} is no number of tokens; set 4096.")
    found = [module for module in base.modules() if _reads_tokens_alone(module)]
    if not found:
        raise ValueError(
            f"activation_checkpointing_kwargs: {type(base).__name__} has no module named MLP that mlp_tile could cut; "
            "leave mlp_tile out."
        )
    for module in found:
        forward: Any = module.forward
        whole = forward.args[0] if getattr(forward, "func", None) is _in_tiles else forward
        module.forward = functools.partial(_in_tiles, whole, tokens)


def _reads_tokens_alone(module: nn.Module) -> bool:
    """Whether `module` maps one tensor to one, each token by itself, going by its name in transformers: some of that
    name choose experts and return their choice too, others take a residual.
    """
    is_named = type(module).__name__.endswith("MLP") and not hasattr(module, "experts")
    return is_named and len(inspect.signature(module.forward).parameters) == 1


def _in_tiles(forward: Callable[..., torch.Tensor], tokens: int, hidden: torch.Tensor) -> torch.Tensor:
    """``forward(hidden)`` for (..., H) `hidden`, of which so many `tokens` are computed and recomputed at a time."""
    flat = hidden.flatten(0, -2)
    if len(flat) <= tokens:
        return forward(hidden)
    if torch.is_grad_enabled():
        forward = functools.partial(checkpoint, forward, use_reentrant=False)
    return torch.cat([forward(tile) for tile in flat.split(tokens)]).unflatten(0, hidden.shape[:-1])
