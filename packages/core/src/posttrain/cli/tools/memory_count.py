"""Counts the memory of tensors while they live: on the device, and on the host for those that are moved there.

A memory plan runs a step with fake tensors, which are all of one device. What training would move to the host is
known by who moves it.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from posttrain.cli.tools import memory_mesh
from posttrain.core.models.wrapping import local_part, replaced

aten = torch.ops.aten
#: Operations whose results are known without a tensor.
CONSTANTS = {aten.arange, aten.zeros, aten.ones, aten.full, aten.scalar_tensor}


@dataclass
class _Held:
    """A storage that lives: its bytes, and whether they are on the host."""

    size: int
    on_host: bool


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make while they live.

    Attributes:
        now, peak: on the device, at this moment and at most. high: the most since it was last set.
        host, host_peak: of those that were moved to the host.
        most: elements of a result whose size hangs on numbers, at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.high = self.peak = self.host = self.host_peak = 0
        self.most = sys.maxsize
        self.paused = False
        self._makes_on_host = False
        self._known: weakref.WeakKeyDictionary[Any, _Held] = weakref.WeakKeyDictionary()
        self._numbers = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # what is done with a process's part of it is counted
        numbers = self._computed(func, args, kwargs or {}) if self._numbers else None
        if isinstance(numbers, (bool, int, float)):
            return numbers
        if isinstance(numbers, torch.Tensor) and torch.Tag.dynamic_output_shape in func.tags:
            found = torch.empty(numbers.shape, dtype=numbers.dtype, device=_tensors(args)[0].device)
        elif func is aten.nonzero.default:  # its size hangs on numbers: all of them, up to `most`
            found = args[0].new_empty(min(args[0].numel(), self.most), args[0].ndim, dtype=torch.long)
        elif func is aten.index.Tensor and any(_is_mask(index) for index in args[1]):  # as if it kept everything
            everything = (one.new_empty(one.numel(), dtype=torch.long) if _is_mask(one) else one for one in args[1])
            found = func(args[0], [*everything])
        elif func is aten._grouped_mm.default:  # torch knows the shape of its result in bfloat16 alone
            ends = args[2] if len(args) > 2 else (kwargs or {})["offs"]
            # (S, K) @ (G, K, N) is (S, N), and (K, S) @ (S, N) the (G, K, N) of its groups.
            of_groups = () if args[1].ndim == 3 else (len(ends),)
            found = args[0].new_empty(*of_groups, args[0].shape[-2], args[1].shape[-1])
        elif func is aten._local_scalar_dense.default:  # any number: sizes do not hang on those that optimizers read
            return args[0].dtype == torch.bool or 1
        elif func is torch.ops._c10d_functional.wait_tensor.default:  # only the fake one gives a copy
            return args[0]
        else:
            found = func(*args, **(kwargs or {}))
        if numbers is not None:
            self._numbers.update(zip(_tensors(found), _tensors(numbers), strict=True))
        if not self.paused:
            self.add(found)
        return found

    def known(self, make: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Tensors like `make`'s, of known numbers: sizes may hang on what follows from them, as places of images."""
        with _disable_current_modes(), torch.device("cpu"):
            numbers = make()
        found = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in numbers.items()}
        self._numbers.update((found[name], value) for name, value in numbers.items())
        return found

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The numbers of a result that follows from known ones alone; None where it does not."""
        given = _tensors([args, kwargs])
        known = [self._numbers.get(one, one if type(one) is torch.Tensor else None) for one in given]
        if any(one is None for one in known) or (not given and func.overloadpacket not in CONSTANTS):
            return None
        replaced = dict(zip(map(id, given), known, strict=True))
        args, kwargs = tree_map(lambda one: replaced.get(id(one), one), (args, kwargs))
        kwargs |= {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}
        with _disable_current_modes():
            return func(*args, **kwargs)

    def __enter__(self) -> Any:
        resize, live = torch.UntypedStorage.resize_, self

        def counted(storage: torch.UntypedStorage, size: int) -> Any:  # FSDP frees and takes memory so
            result = resize(storage, size)
            if (held := live._known.get(storage)) is not None:
                live._count(held, size)
            return result

        self._within = contextlib.ExitStack()
        self._within.enter_context(replaced(torch.UntypedStorage, "resize_", counted))
        self._within.enter_context(memory_mesh.shapes_within(self._pause))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._within.__exit__(*error)
        super().__exit__(*error)

    def _pause(self) -> contextlib.AbstractContextManager[None]:
        """What is made in here is not counted."""
        return replaced(self, "paused", True)

    def add(self, tree: Any) -> int:
        """Count the tensors in `tree` that are not counted yet; returns the bytes on the device."""
        before = self.now
        for tensor in tree_leaves(tree):
            storage = local_part(tensor).untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage not in self._known:
                self._known[storage] = held = _Held(0, self._makes_on_host)
                self._count(held, storage.nbytes())
                weakref.finalize(storage, self._count, held, 0)
        return self.now - before

    def to_host(self, tensors: Iterable[torch.Tensor]) -> None:
        """From now on count `tensors`, which were counted before, on the host."""
        for tensor in tensors:
            held = self._known[local_part(tensor).untyped_storage()]
            size = held.size
            self._count(held, 0)
            held.on_host = True
            self._count(held, size)

    def on_host(self) -> contextlib.AbstractContextManager[None]:
        """What is made in here is on the host."""
        return replaced(self, "_makes_on_host", True)

    def saves_on_host(self) -> contextlib.AbstractContextManager[None]:
        """What is saved in here for the backward pass waits for it on the host."""

        def away(tensor: torch.Tensor) -> torch.Tensor:
            with self.on_host():
                return torch.empty_like(tensor)

        return torch.autograd.graph.saved_tensors_hooks(away, torch.empty_like)

    def _count(self, held: _Held, size: int) -> None:
        """The storage now takes `size` bytes."""
        more, held.size = size - held.size, size
        if held.on_host:
            self.host += more
            self.host_peak = max(self.host_peak, self.host)
        else:
            self.now += more
            self.high, self.peak = max(self.high, self.now), max(self.peak, self.now)


def _tensors(tree: Any) -> list[Any]:
    return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype == torch.bool and index.ndim == 1
