"""Kernels of a GPU for documents of different lengths that lie in one row: in 16 bits, without a mask."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable

import torch

from posttrain.core.data import accelerator
from posttrain.lm.attention.segments import Segments

Kernel = Callable[..., torch.Tensor]


def document_kernel(with_softcap: bool) -> Kernel | None:
    """(N, H, D) queries, (N, G, D) keys and values, the borders of documents, the longest, scale, window and softcap ->
    (N, H, D). flash-attn's where it is installed; else torch's, which knows no softcap; None where neither is there."""
    return _choose(with_softcap, _has_flash_attn())


@functools.cache
def _choose(with_softcap: bool, has_flash_attn: bool) -> Kernel | None:
    if has_flash_attn:
        return _by_flash_attn
    if with_softcap or importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return None
    return _by_torch if (accelerator.capability() or (0, 0)) >= (8, 0) else None


def _has_flash_attn() -> bool:
    if (loaded := sys.modules.get("flash_attn")) is not None:
        return "flash_attn_varlen_func" in vars(loaded)
    spec = importlib.util.find_spec("flash_attn")
    return spec is not None and spec.origin is not None  # flash-attn-4 alone is a folder without a file of its own


def _by_flash_attn(query, key, value, bounds, longest, scale, window, softcap) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    sizes = bounds, bounds, longest, longest
    sees = (-1, -1) if window is None else (window - 1, 0)
    options = {"softmax_scale": scale, "causal": True, "window_size": sees, "softcap": softcap}
    return flash_attn_varlen_func(query, key, value, *sizes, **options)


def _by_torch(query, key, value, bounds, longest, scale, window, softcap) -> torch.Tensor:
    from torch.nn.attention import varlen

    sees = (-1 if window is None else window - 1, 0)
    options = {"scale": scale, "window_size": sees}
    if query.shape[1] != key.shape[1]:
        if _takes_groups(varlen.varlen_attn):
            options["enable_gqa"] = True
        else:  # torch 2.11
            key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    out = varlen.varlen_attn(query, key, value, bounds, bounds, longest, longest, **options)
    assert isinstance(out, torch.Tensor)  # a pair only if the logarithms of the normalisers are asked for
    return out


@functools.cache
def _takes_groups(kernel: Kernel) -> bool:
    return "enable_gqa" in inspect.signature(kernel).parameters


@functools.lru_cache(maxsize=8)
def bounds_of(segments: Segments, device: torch.device) -> torch.Tensor:
    """(S + 1,) where each segment begins, and the end of the last."""
    return torch.tensor([*segments.starts, segments.num_tokens], dtype=torch.int32).to(device, non_blocking=True)
