"""The inputs and limits of flash attention in transformers."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import torch
from torch import nn

from posttrain.core.models.trainable import is_quantized
from posttrain.core.models.wrapping import base_model, config_of, setting


def reads_boundaries(model: nn.Module) -> bool:
    """Whether the attention of `model` gets document borders as ``cu_seq_lens_q`` etc., as flash attention does."""
    forward = inspect.signature(base_model(model).forward).parameters.values()
    return _is_flash(model) and any(parameter.kind is parameter.VAR_KEYWORD for parameter in forward)


def precision_problem(model: nn.Module, precision: str) -> str | None:
    """Why `model` cannot run in `precision` ("no", "bf16" or "fp16", of autocast), as a sentence; None if it can."""
    base = base_model(model)
    if precision != "no" or not _is_flash(model) or is_quantized(base):
        return None
    if any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in base.parameters()):
        return None
    return (
        f"attn_implementation={base.config._attn_implementation!r} computes in bfloat16 or float16 alone, and the "
        f"weights of {type(base).__name__} are {str(next(base.parameters()).dtype).removeprefix('torch.')} without "
        "mixed precision. Set bf16=True, load the model with dtype='bfloat16', or with attn_implementation='sdpa'."
    )


@contextlib.contextmanager
def plain_attention(model: nn.Module) -> Iterator[None]:
    """Within this context `model` does not use flash attention."""
    if not _is_flash(model):
        yield
        return
    base = base_model(model)
    before = base.config._attn_implementation
    try:
        base.set_attn_implementation("eager")
        yield
    finally:
        base.set_attn_implementation(before)


def _is_flash(model: nn.Module) -> bool:
    config = config_of(model)
    return "flash" in (setting(config, "_attn_implementation") or "")
