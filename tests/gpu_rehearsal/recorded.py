"""Takes down what a CUDA graph would hold of work on the emulated device."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map

from tests.gpu_rehearsal.emulated_cuda import EmulatedCuda


class Recorded(EmulatedCuda):
    """Takes down each operation as a CUDA graph would hold it: its numbers, and the addresses that it reads."""

    tape: list[tuple[Any, ...]] | None = None

    def begin(self) -> None:
        self.tape, self.made, self.outside, self.alive = [], {}, set(), []

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.tape is None:
            return super().run(func, args, kwargs)
        self.tape.append((func._schema.name, *(tree_map(self._named, given) for given in (args, kwargs))))
        out = super().run(func, args, kwargs)
        self.alive.append((args, kwargs, out))  # so that no address is used twice
        for tensor in (one for one in tree_iter(out) if isinstance(one, torch.Tensor)):
            storage = tensor.untyped_storage().data_ptr()
            if storage not in self.outside:
                self.made.setdefault(storage, len(self.tape))
        return out

    def _named(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_cuda and value.ndim == 0:  # a number of the host, which a graph holds by its value
            return value.item()
        storage = value.untyped_storage().data_ptr()
        if storage not in self.made:
            self.outside.add(storage)
        where = ("made by", self.made[storage]) if storage in self.made else ("at", storage)
        return value.device, where, value.storage_offset(), tuple(value.shape), value.stride(), value.dtype
