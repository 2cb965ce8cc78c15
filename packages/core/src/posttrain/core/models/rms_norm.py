"""RMS norms of transformers as one kernel of PyTorch, in place of the six operations that their forward is."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

#: ``(x, shape, weight, eps) -> (y, 1 / rms)``, with a kernel for its gradient too on CUDA, ROCm and Metal.
KERNEL: Any = torch.ops.aten._fused_rms_norm.default


class OneKernel:
    """The forward of a norm: ``y = weight * x / sqrt(mean(x**2) + eps)`` (https://arxiv.org/abs/1910.07467, eq. 4).

    It rounds once, where transformers rounds to 16 bits before it multiplies by the weight too. Its gradient needs `x`
    and one number a row; that of transformers keeps 4 bytes more for each number of `x`.

    Args:
        offset: what is added to the weight, in float32: 1 in Gemma's norms.
        like: the one of "x" and "weight" whose type `y` has; "both": the wider type.
    """

    def __init__(self, norm: nn.Module, eps: float, offset: int, like: str) -> None:
        self.norm, self.eps, self.offset, self.like = norm, eps, offset, like

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.norm.weight
        if self.offset:
            weight = weight.float() + self.offset
        if x.dtype == weight.dtype:
            return KERNEL(x, weight.shape, weight, self.eps)[0]
        wide = torch.promote_types(x.dtype, weight.dtype)
        y = KERNEL(x.to(wide), weight.shape, weight.to(wide), self.eps)[0]
        return y if self.like == "both" else y.to(x.dtype if self.like == "x" else self.norm.weight.dtype)


def use_kernels(model: nn.Module) -> None:
    """Run the RMS norms of `model` as `OneKernel`, but for those that compute something else, and those whose forward
    was replaced before, as Liger does.
    """
    known: dict[tuple[type, float, torch.Size], tuple[int, str] | None] = {}
    for norm in model.modules():
        kind: Any = type(norm)
        if not kind.__name__.endswith(("RMSNorm", "T5LayerNorm")) or isinstance(norm, nn.RMSNorm):
            continue
        eps = vars(norm).get("variance_epsilon", vars(norm).get("eps"))
        weights = dict(norm.named_parameters())
        is_plain = list(weights) == ["weight"] and weights["weight"].dim() == 1 and "forward" not in vars(norm)
        if eps is None or not is_plain or len(inspect.signature(norm.forward).parameters) != 1:
            continue
        key = kind, eps, weights["weight"].shape
        if key not in known:
            known[key] = _form(norm, eps, key[2])
        if (form := known[key]) is not None:
            norm.forward = OneKernel(norm, eps, *form)


def _form(norm: nn.Module, eps: float, shape: torch.Size) -> tuple[int, str] | None:
    """(`offset`, `like`) of `OneKernel`; None where `norm`, which is asked on the CPU, computes something else."""
    numbers = torch.arange(4 * shape[0], dtype=torch.float32, device="cpu").sin().view(4, -1)
    weight, x = numbers[0] + 2, numbers[1:] * eps**0.5  # so that eps counts

    def asked(of_x: torch.dtype, of_weight: torch.dtype) -> torch.Tensor:
        return functional_call(norm, {"weight": weight.to(of_weight)}, (x.to(of_x),))

    with torch.no_grad():
        y = asked(torch.float32, torch.float32)
        for offset in (0, 1):
            if torch.allclose(y, KERNEL(x, shape, weight + offset, eps)[0], rtol=1e-5, atol=1e-6):
                if asked(torch.bfloat16, torch.float32).dtype == torch.bfloat16:
                    return offset, "x"
                return offset, "both" if asked(torch.float32, torch.bfloat16).dtype == torch.float32 else "weight"
    return None
