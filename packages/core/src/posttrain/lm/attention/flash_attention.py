"""The inputs and limits of flash attention in transformers.

Its names are ``flash_attention_2``, ``_3`` and ``_4``, and kernels of the Hub (``kernels-community/flash-attn3``),
which transformers takes for the former too where only the package `kernels` is installed.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import torch
from torch import nn

from posttrain.core.models.trainable import is_quantized
from posttrain.core.models.wrapping import PretrainedModel, base_model, config_of, setting


def reads_boundaries(model: nn.Module) -> bool:
    """Whether the attention of `model` gets document borders as ``cu_seq_lens_q`` etc., as flash attention does."""
    forward = inspect.signature(base_model(model).forward).parameters.values()
    return is_flash(model) and any(parameter.kind is parameter.VAR_KEYWORD for parameter in forward)


def precision_problem(model: nn.Module, precision: str) -> str | None:
    """Why `model` cannot run in `precision` ("no", "bf16" or "fp16", of autocast), as a sentence; None if it can."""
    base = base_model(model)
    if precision != "no" or not is_flash(model) or is_quantized(base):
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
    if not is_flash(model):
        yield
        return
    base = base_model(model)
    before = base.config._attn_implementation
    try:
        base.set_attn_implementation("eager")
        yield
    finally:
        base.set_attn_implementation(before)


def without_flash(reader: PretrainedModel) -> str:
    """The attention of `reader`, which has flash attention, for what that cannot compute."""
    bounded = setting(reader.config, "attn_logit_softcapping")
    return "sdpa" if reader._supports_sdpa and not bounded else "eager"


def is_flash(model: nn.Module) -> bool:
    """Whether `model` has flash attention of any version, from any package."""
    return is_flash_name(setting(config_of(model), "_attn_implementation"))


def is_flash_name(implementation: str | None) -> bool:
    """Whether this `attn_implementation` is flash attention."""
    return "flash" in (implementation or "")
