"""Stores an evaluation's predictions in host memory with a peak of one copy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from posttrain.core.data.host_copies import host_copy
from posttrain.core.logging.memory import free_memory

logger = logging.getLogger(__name__)

BLOCK = 33 * 2**20
"""Bytes of small batches that are joined immediately. glibc returns freed arrays above 32 MiB to the system at once,
but not smaller ones.
"""


class Kept:
    """Batches that become one array: small ones are joined immediately, and copied ones are freed."""

    def __init__(self, concatenate: bool, fill: int = -100) -> None:
        self.concatenate, self.fills = concatenate, (fill, -100, -100, -100)
        self.blocks: list[Any] = []
        self.small: list[Any] = []
        self.size = 0

    def add(self, entries: Iterable[Any]) -> None:
        for entry in entries:
            self.small.append(entry)
            self.size += nbytes(entry)
        if self.concatenate and self.size >= BLOCK:
            self.blocks.append(self._join(self.small))
            self.size = 0

    def joined(self) -> tuple[Any, ...]:
        """(predictions, labels, inputs, losses), or lists of them by batch where they are not concatenated."""
        self.blocks += self.small
        self.small.clear()
        if not self.blocks:
            return (None, None, None, None) if self.concatenate else ([], [], None, None)
        if self.concatenate:
            return self._join(self.blocks)
        columns = map(list, zip(*self.blocks, strict=True))
        return tuple(None if all(part is None for part in column) else column for column in columns)

    def _join(self, entries: list[Any]) -> tuple[Any, ...]:
        columns = list(map(list, zip(*entries, strict=True)))
        entries.clear()
        return tuple(join(column, fill) for column, fill in zip(columns, self.fills, strict=True))


def join(parts: list[Any], padding: int = -100) -> Any:
    """Concatenate arrays along rows, or tuples and dicts of arrays; ragged later dimensions are filled with `padding`.

    Each part is taken out of `parts` before the next is written: the peak is the whole and one part.
    """
    parts[:] = [part for part in parts if part is not None]
    if not parts:
        return None
    first = parts[0]
    if isinstance(first, (tuple, list)):
        columns = list(map(list, zip(*parts, strict=True)))
        parts.clear()
        return type(first)(join(column, padding) for column in columns)
    if isinstance(first, dict):
        named = {key: [part[key] for part in parts] for key in first}
        parts.clear()
        return {key: join(column, padding) for key, column in named.items()}
    parts[:] = [np.atleast_1d(part) for part in parts]
    del first
    if len(parts) == 1:
        return parts.pop()
    widest = tuple(max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True))
    whole = _empty((sum(len(part) for part in parts), *widest), np.result_type(*parts))
    row = 0
    parts.reverse()
    while parts:
        part = parts.pop()
        target = whole[row : row + len(part)]
        if part.shape[1:] != widest:
            target.fill(padding)
        target[(slice(None), *(slice(0, size) for size in part.shape[1:]))] = part
        row += len(part)
    return whole


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array of torch's allocator: numpy asks for huge pages, which may cost 1 s per GB on a virtual machine."""
    try:
        return torch.empty(shape, dtype=torch.from_numpy(np.empty(0, dtype)).dtype).numpy()
    except TypeError:  # texts, objects
        return np.empty(shape, dtype)


def restore(value: Any, order: np.ndarray) -> Any:
    """Reorder arrays, whose row i belongs to row ``order[i]`` of the dataset, to the order of the dataset.

    Several rows of one dataset row (generated sequences) stay together.
    """
    if isinstance(value, (tuple, list)):
        return type(value)(restore(item, order) for item in value)
    if isinstance(value, dict):
        return {key: restore(item, order) for key, item in value.items()}
    if not isinstance(value, np.ndarray) or not len(order) or len(value) % len(order):
        return value
    return value.reshape(len(order), -1, *value.shape[1:])[np.argsort(order)].reshape(value.shape)


def detach(value: Any) -> Any:
    """`value` with every tensor in it detached."""
    return map_tensors(value, lambda tensor: tensor.detach())


def to_numpy(value: Any) -> Any:
    """`value` with every tensor in it as a numpy array (bfloat16, which numpy lacks, as float32)."""
    return map_tensors(value, _array)


def _array(tensor: torch.Tensor) -> np.ndarray:
    known = host_copy(tensor)
    tensor = (tensor if known is None else known).detach()
    tensor = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu()
    if tensor.untyped_storage().nbytes() > tensor.nbytes or tensor.is_shared():
        tensor = tensor.clone()  # a view would keep all that it is a part of, and a worker's batch an open file
    return tensor.numpy()


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """`value` with `function` applied to every tensor in it; tuples and mappings stay tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return tuple(map_tensors(item, function) for item in value)
    if hasattr(value, "items"):
        return {key: map_tensors(item, function) for key, item in value.items()}
    return value


def nbytes(value: Any) -> int:
    """Bytes of the arrays in `value`, or of those that its tensors will be."""
    leaves = tree_leaves(value)
    wider = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bfloat16]  # as float32
    return sum(getattr(leaf, "nbytes", 0) for leaf in [*leaves, *wider])


def check_size(need: int, num_batches: int) -> None:
    """Warn where `need` bytes are more than half of the free memory; raise MemoryError where they are more than all."""
    free = free_memory()
    if need <= free / 2:
        return
    said = (
        f"Storing the predictions of {num_batches} evaluation batches takes about {need / 2**30:.1f} GiB, and "
        f"{free / 2**30:.1f} GiB of memory are free. Pass preprocess_logits_for_metrics (for example an argmax) to "
        "store less, or metrics that are computed batch by batch (an object with update and compute, or "
        "batch_eval_metrics=True), or set prediction_loss_only=True."
    )
    if need > free:
        raise MemoryError(said)
    logger.warning("%s", said)
