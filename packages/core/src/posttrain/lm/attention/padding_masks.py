"""Lets the models of transformers take from the host what they would ask the device: whether a row has padding.

transformers looks into a padding mask before each forward, because a mask of ones needs no attention mask at all. On a
GPU each such look waits until the device has done all its work. The host made the mask and knows the answer:

    announce_masks(model)
    model(**to_device(batch, device))       # waits for nothing

The answer goes from a hook of the forward, which sees the mask that was sent, to the function that builds the attention
mask, which is looked up in transformers' `AttentionMaskInterface`. Masks that the host does not know are looked into as
before, and so are those that a model makes itself.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn

from posttrain.core.data.host_copies import host_copy
from posttrain.core.models.wrapping import base_model, is_encoder_decoder, is_of_transformers


class Known(NamedTuple):
    """What the host knows of the masks of a forward.

    Attributes:
        of: the module whose forward it is, by its `id`.
        masks: by whether they are the decoder's own, their shape and whether they are ones alone.
        decoder: whether the model has an encoder beside its decoder.
        model_type: of the part of the model that reads text; parts that read images have masks of their own.
    """

    of: int
    masks: dict[bool, tuple[torch.Size, bool]]
    decoder: bool
    model_type: str | None


#: Of the forwards that run, outermost first.
_KNOWN: ContextVar[tuple[Known, ...]] = ContextVar("what the host knows of the masks", default=())


def announce_masks(model: nn.Module) -> None:
    """Let the forward of `model`, and that of its encoder alone, build attention masks without waiting for the device.

    The results do not change. Nothing is done to models that are not of transformers. May be called again.
    """
    base = base_model(model)
    if not is_of_transformers(base):
        return
    parts = {base}
    if is_encoder_decoder(base) and isinstance(base.get_encoder(), nn.Module):
        parts.add(base.get_encoder())
    for part in parts:
        if _enter not in part._forward_pre_hooks.values():
            part.register_forward_pre_hook(_enter, with_kwargs=True)
            part.register_forward_hook(_leave, always_call=True)


def has_other_hooks(model: nn.Module) -> bool:
    """Whether forwards within `model` have hooks besides those of `announce_masks`, and those that let gradients into
    checkpointed layers, which do nothing where there are none.
    """
    hooks = {hook for m in model.modules() for hook in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())}
    names = [getattr(hook, "__name__", "") for hook in hooks - {_enter, _leave}]
    return any(not name.startswith("make_inputs_require_grad") for name in names)


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        _KNOWN.set((*_outside(module), _known(module, kwargs)))


def _leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if not torch.compiler.is_compiling():
        _KNOWN.set(_outside(module))


def _outside(module: nn.Module) -> tuple[Known, ...]:
    """Without `module` and what ran in it; an error before its forward may have left it there."""
    running = _KNOWN.get()
    return running[: next((i for i, known in enumerate(running) if known.of == id(module)), len(running))]


def _known(module: Any, kwargs: dict[str, Any]) -> Known:
    masks: dict[bool, tuple[torch.Size, bool]] = {}
    for is_decoders, name in enumerate(("attention_mask", "decoder_attention_mask")):
        mask = kwargs.get(name)
        if isinstance(mask, torch.Tensor) and mask.ndim == 2 and not mask.is_cpu:
            copy = host_copy(mask)
            if copy is not None:
                masks[bool(is_decoders)] = mask.shape, bool(copy.all())
    config = module.config
    if masks:
        _answer_for(config._attn_implementation or "eager")
    try:
        text = config.get_text_config()
    except ValueError:  # several parts read text
        masks, text = {}, config
    return Known(id(module), masks, bool(config.is_encoder_decoder), text.model_type)


@functools.cache
def _answer_for(implementation: str) -> None:
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    build = ALL_MASK_ATTENTION_FUNCTIONS[implementation] if implementation in ALL_MASK_ATTENTION_FUNCTIONS else None
    if build is not None and getattr(build, "func", None) is not _build:
        AttentionMaskInterface.register(implementation, functools.partial(_build, build))


def _build(build: Any, *args: Any, **kwargs: Any) -> Any:
    """What transformers calls for an attention mask: `build` of the same arguments, without a look into the mask."""
    running = () if torch.compiler.is_compiling() else _KNOWN.get()
    has_padding = None if args or not running else _has_padding(running[-1], kwargs)
    if has_padding is None:
        return build(*args, **kwargs)
    if not has_padding:
        return build(**kwargs | {"attention_mask": None})
    looks = [name for name in ("allow_is_causal_skip", "allow_is_bidirectional_skip") if name in kwargs]
    return build(**kwargs | dict.fromkeys(looks, False))


def _has_padding(known: Known, kwargs: dict[str, Any]) -> bool | None:
    """Whether the mask of a call is one that the host knows, and has zeros; None if it is another."""
    mask, is_causal = kwargs.get("attention_mask"), not kwargs.get("allow_is_bidirectional_skip", False)
    shape, ones = known.masks.get(known.decoder and is_causal, (torch.Size(), False))
    if mask is None or mask.shape != shape or kwargs.get("kv_offset") or kwargs.get("kv_length") != shape[1]:
        return None
    return not ones if getattr(kwargs.get("config"), "model_type", None) == known.model_type else None
