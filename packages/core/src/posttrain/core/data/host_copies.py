"""Keeps the CPU's copy of tensors that were sent to a device, so that nothing waits to read them back.

The number of labels and the ends of the rows decide the shapes of later tensors. The host knows both before it sends a
batch. To read them back from a GPU would cost a wait in every micro-batch, and would break a CUDA graph.
"""

from __future__ import annotations

import torch

_NAME = "_posttrain_host_copy"


def send(tensor: torch.Tensor, device: torch.device | str, non_blocking: bool = True) -> torch.Tensor:
    """`tensor` on `device`; `host_copy` of it is then this one, if it holds numbers that count or mark."""
    moved = tensor.to(device, non_blocking=non_blocking)
    return moved if tensor.is_floating_point() else know(moved, tensor)


def know(tensor: torch.Tensor, copy: torch.Tensor | None) -> torch.Tensor:
    """`tensor`, of which `copy` is known to hold the values on the CPU; None: nothing is known."""
    if copy is not None and copy.is_cpu and not tensor.is_cpu and not tensor.is_inference():
        setattr(tensor, _NAME, (copy, 0 if copy.is_inference() else copy._version, tensor._version))
    return tensor


def host_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of `tensor` on the CPU, without waiting; None where only its device knows them.

    Known are tensors that `send` has moved, until one of the two is changed in place. What is computed from them is not
    known, unless `know` was called.
    """
    if tensor.is_cpu:
        return tensor
    if torch.compiler.is_compiling():  # a graph would be compiled for each batch
        return None
    copy, at, version = getattr(tensor, _NAME, (None, 0, 0))
    if copy is None or tensor._version != version or (not copy.is_inference() and copy._version != at):
        return None
    return copy


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The values of `tensor` on the CPU, for which this waits unless `host_copy` knows."""
    copy = host_copy(tensor)
    return tensor.cpu() if copy is None else copy


def places_of(mask: torch.Tensor) -> torch.Tensor:
    """(M,) where the flattened bool `mask` holds, on its device, for which this waits unless `host_copy` knows."""
    copy = host_copy(mask)
    if copy is None:
        return mask.reshape(-1).nonzero().squeeze(1)
    return send(copy.reshape(-1).nonzero().squeeze(1), mask.device)
