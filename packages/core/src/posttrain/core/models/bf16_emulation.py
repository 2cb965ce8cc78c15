"""Products in bfloat16 on processors without instructions for them.

There torch emulates each product, at a tenth to an eightieth of the speed of float32. Within `float32_products` they are
computed in float32 from the same rounded factors, and rounded to bfloat16 again: what instructions would give, to the rounding
of a last place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode


def emulates_bfloat16(device_type: str) -> bool:
    """Whether matrix products in bfloat16 are slower than in float32, for want of instructions: on older processors."""
    if device_type != "cpu" or not torch.backends.mkldnn.is_available():  # without oneDNN it cannot be asked
        return False
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def makes_emulated_products(model: nn.Module, autocast: bool = False) -> bool:
    """Whether `model` makes products of bfloat16 that the processor would emulate.

    Args:
        autocast: it runs under autocast to bfloat16.
    """
    parameters = list(model.parameters())
    if not parameters or not emulates_bfloat16(parameters[0].device.type):
        return False
    return autocast or any(p.dtype == torch.bfloat16 for p in parameters)


def float32_products(when: bool = True) -> contextlib.AbstractContextManager:
    """Where products of bfloat16 on the CPU go through float32, forward and backward, if `when`; else nothing."""
    return _Float32Products() if when else contextlib.nullcontext()


class _Float32Products(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        replaced = _REPLACED.get(func)
        if replaced is not None and not torch.compiler.is_compiling():
            return replaced(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _is_low(*factors: Any) -> bool:
    """Whether the product of these tensors would be in bfloat16."""
    if not all(isinstance(factor, torch.Tensor) and factor.device.type == "cpu" for factor in factors):
        return False
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16:
        return all(factor.dtype in (torch.float32, torch.bfloat16) for factor in factors)
    return all(factor.dtype == torch.bfloat16 for factor in factors)


def _rounded(factor: torch.Tensor) -> torch.Tensor:
    return factor.to(torch.bfloat16)


class _Linear(torch.autograd.Function):
    """``x @ weight.T + bias``, of which only bfloat16 numbers are kept for the backward."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        x = _rounded(x)
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        out = x.float() @ _rounded(weight).float().t()
        return _rounded(out if bias is None else out + _rounded(bias))

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        rows = gradient.float().flatten(0, -2)
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = _rounded(rows @ _rounded(weight).float()).view(x.shape)
        if ctx.needs_input_grad[1]:
            of_weight = (rows.t() @ x.float().flatten(0, -2)).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_x, of_weight, of_bias


def _linear(func: Callable, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    if not _is_low(input, weight) or input.ndim < 2:
        return func(input, weight, bias)
    with torch.autocast("cpu", enabled=False):
        return _Linear.apply(input, weight, bias)


def _product(func: Callable, *factors: Any, **kwargs: Any) -> Any:
    if kwargs or not _is_low(*factors):
        return func(*factors, **kwargs)
    with torch.autocast("cpu", enabled=False):
        return _rounded(func(*(_rounded(factor).float() for factor in factors)))


def _attention(func: Callable, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    if not _is_low(query, key, value):
        return func(query, key, value, *args, **kwargs)
    args, kwargs = ([_unrounded(a) for a in args], {name: _unrounded(value) for name, value in kwargs.items()})
    with torch.autocast("cpu", enabled=False):
        return _rounded(func(*(_rounded(factor).float() for factor in (query, key, value)), *args, **kwargs))


def _unrounded(value: Any) -> Any:
    """A mask of numbers must be of the type of the queries."""
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _backward(func: Callable, loss: Any, *args: Any, **kwargs: Any) -> None:
    """The backward of a loss, with the mode on: checkpointed activations are computed once more in there.

    Torch turns a mode off in a function that it is asked about, so the function itself cannot be called.
    """
    asks_more = any(value is not None and value is not False for value in (*args, *kwargs.values()))
    if asks_more or not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        return func(loss, *args, **kwargs)
    run, first = torch.autograd.Variable._execution_engine.run_backward, torch.ones_like(loss)
    with _Float32Products():
        run((loss,), (first,), False, False, (), allow_unreachable=True, accumulate_grad=True)


_REPLACED: dict[Callable, Callable] = {
    torch.Tensor.backward: _backward,
    torch.autograd.backward: _backward,
    F.linear: _linear,
    F.scaled_dot_product_attention: _attention,
    **dict.fromkeys(
        (torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.Tensor.matmul, torch.Tensor.__matmul__,
         torch.Tensor.mm, torch.Tensor.bmm),
        _product,
    ),
}  # fmt: skip
