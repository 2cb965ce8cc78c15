"""What is asked of this machine's accelerator, of any kind that torch knows: CUDA (ROCm too), XPU, MPS, others.

What one kind alone can do is named here; all else goes through `torch.accelerator` and the device's module in torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

CUDA = "cuda"
#: Kinds with generators of their own, for which torch compiles flex attention or has kernels of its own.
KINDS = (CUDA, "xpu", "mps")
#: Around each wait of the host for its device. Collectives of a device return at once, and the device waits for other
#: processes: in a run of several, the watchdog takes this place.
waiting: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


def gpu() -> str | None:
    """The kind of an accelerator with memory of its own; None without one, and on MPS, which shares the host's."""
    if torch.cuda.is_available():
        return CUDA
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None and has_memory(found) else None


def has_memory(device: torch.device) -> bool:
    """Whether `device` has memory of its own, which torch counts."""
    return device.type not in ("cpu", "mps", "meta")


def module(kind: str | torch.device) -> Any:
    """``torch.cuda``, ``torch.xpu``, ..."""
    return torch.get_device_module(kind)


def computes_bfloat16() -> bool:
    """Whether a GPU is there that computes in bfloat16."""
    return (kind := gpu()) is not None and bool(module(kind).is_bf16_supported())


def capability() -> tuple[int, int] | None:
    """The compute capability of a CUDA device, such as (9, 0); None without one."""
    return torch.cuda.get_device_capability() if gpu() == CUDA else None


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether kernels of our own run on `tensor`: it lies on a CUDA device, where Triton is."""
    is_plain = type(tensor) is torch.Tensor  # and holds numbers, which that of a memory plan does not
    return is_plain and tensor.is_cuda and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def for_float64(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, on the CPU where its device has no float64, as MPS."""
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def name(device: torch.device) -> str:
    """What the maker calls `device`; the empty string where there is no memory of its own."""
    return str(module(device).get_device_name(device)) if has_memory(device) else ""


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done all that it was given."""
    if device.type != "cpu":
        with waiting():
            torch.accelerator.synchronize()


def history(device: torch.device) -> Any:
    """Torch's record of the allocations on `device`, which CUDA alone has; else None."""
    return torch.cuda.memory if device.type == CUDA else None


class CaptureGraphs:
    """Captures CUDA graphs, one after the other: ``work -> (replay, result)``. The one before is not replayed any more.

    Each in a stream of its own, and in the memory of the one before, which must live until then. Without
    ``torch.cuda.graph``, which waits for the device and gives its free memory back at each capture.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._last: torch.cuda.CUDAGraph | None = None

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], Any], torch.Tensor]:
        graph, outside = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            pool = None if self._last is None else self._last.pool()
            # Another thread may train meanwhile: what it asks of CUDA does not end this capture.
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        outside.wait_stream(self._stream)
        self._last = graph
        return graph.replay, result
