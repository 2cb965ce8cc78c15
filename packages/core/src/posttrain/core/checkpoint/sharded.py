"""Saves sharded state, one tree for each process, and loads it with any number of processes.

``<name>-<rank>-of-<processes>`` is a tree of `save_tree`. Instead of a sharded tensor it holds this process's shard and
its offset; the rest is equal in all trees and read from the first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posttrain.core.checkpoint import codec
from posttrain.core.distributed import sharding
from posttrain.core.errors import CheckpointError

_MARK = "piece of a tensor of shape"


@dataclass(frozen=True)
class Pieces:
    """A tensor stored in several files."""

    shape: torch.Size  # of the whole
    where: str
    parts: list[tuple[tuple[int, ...], torch.Tensor]]  # (offset, tensor) of each shard, mapped from its file

    def cut(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """The values from `offset` on, of `shape`; no others are read. Raises a `CheckpointError` where the shards do
        not cover them.
        """
        result = torch.empty(shape, dtype=self.parts[0][1].dtype if self.parts else None)
        covered = 0
        for start, part in self.parts:
            lows = [max(a, b) for a, b in zip(offset, start, strict=True)]
            sizes = [
                min(a + n, b + m) - low for a, n, b, m, low in zip(offset, shape, start, part.shape, lows, strict=True)
            ]
            if all(size > 0 for size in sizes):
                there = sharding.index(tuple(low - a for low, a in zip(lows, offset, strict=True)), tuple(sizes))
                here = sharding.index(tuple(low - b for low, b in zip(lows, start, strict=True)), tuple(sizes))
                result[there] = part[here]
                covered += part[here].numel()
        if covered != result.numel():
            raise CheckpointError(f"{self.where}: its shards cover {covered} of the {result.numel()} required values.")
        return result

    def whole(self) -> torch.Tensor:
        return self.cut((0,) * len(self.shape), self.shape)


def part(tree: Any) -> Any:
    """`tree` with this process's shard in place of each sharded tensor, for `save_tree`."""
    if sharding.is_piece(tree):
        offset, _ = sharding.extent(tree)
        own = tree.to_local().detach() if sharding.is_first_copy(tree) else None
        return {_MARK: list(tree.shape), "offset": list(offset), "values": own}
    if isinstance(tree, dict):
        return {key: part(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(part(value) for value in tree)
    return tree


def stem(name: str, rank: int, world_size: int) -> str:
    """The file name, without its ending, of a process' part."""
    return f"{name}-{rank}-of-{world_size}"


def processes(directory: Path, name: str) -> int:
    """The number of processes that saved shards of the tree `name`; 0: it is not sharded. Raises a `CheckpointError`
    where there are parts of several saves.
    """
    pattern = re.compile(rf"{re.escape(name)}-\d+-of-(\d+)\.json")
    counts = {int(match[1]) for path in Path(directory).glob(f"{name}-*") if (match := pattern.fullmatch(path.name))}
    if len(counts) > 1:
        raise CheckpointError(
            f"{directory} holds parts of {name} by {' and by '.join(map(str, sorted(counts)))} processes."
        )
    return max(counts, default=0)


def is_there(directory: Path, name: str) -> bool:
    """Whether `directory` holds the tree `name`, whole or in parts."""
    return (Path(directory) / f"{name}.json").is_file() or processes(directory, name) > 0


def load(directory: Path, name: str, mmap: bool = True) -> Any:
    """The tree `name`, with `Pieces` for sharded tensors; `mmap` as for `load_tree`, but parts are always mapped.
    Raises a `CheckpointError` where it or a part is missing.
    """
    count = processes(directory, name)
    if not count:
        return codec.load_tree(Path(directory) / name, mmap=mmap)
    return _joined([codec.load_tree(Path(directory) / stem(name, rank, count)) for rank in range(count)], name)


def own(directory: Path, name: str, rank: int, world_size: int) -> Any:
    """Process `rank`'s part of a tree that only as many processes can read as wrote it. Raises a `CheckpointError`
    where it was written by another number of them.
    """
    count = processes(directory, name)
    if count != world_size:
        raise CheckpointError(
            f"{directory} holds {name} of {count} processes and this run has {world_size}. Resume with {count}."
            if count
            else f"{directory} holds no {name}: it was saved without it."
        )
    return codec.load_tree(Path(directory) / stem(name, rank, world_size), mmap=False)


def _joined(trees: list[Any], where: str) -> Any:
    first = trees[0]
    if isinstance(first, dict) and _MARK in first:
        parts = [(tuple(tree["offset"]), tree["values"]) for tree in trees if tree["values"] is not None]
        return Pieces(torch.Size(first[_MARK]), where, parts)
    if isinstance(first, dict):
        return {key: _joined([tree[key] for tree in trees], f"{where}[{key!r}]") for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(_joined(list(values), f"{where}[{i}]") for i, values in enumerate(zip(*trees, strict=True)))
    return first


def fitted(tensor: Any, like: Any) -> torch.Tensor:
    """`tensor`, whole or `Pieces`, sharded or gathered like `like`, without communication."""
    if sharding.is_piece(like) and not sharding.is_piece(tensor):
        own = tensor.cut(*sharding.extent(like)) if isinstance(tensor, Pieces) else sharding.part_of(tensor, like)
        return sharding.piece_like(own, like)
    return tensor.whole() if isinstance(tensor, Pieces) else tensor


def fitted_to(tensors: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """`tensors`, each `fitted` to the one of its name in `own`, a state dict."""
    return {name: fitted(tensor, own.get(name)) for name, tensor in tensors.items()}


def load_optimizer(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Put what `load` gave of an optimizer into it, cut as its parameters are now. What has another shape than its
    parameter keeps its type, which torch would change to that of the parameter.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    of = dict(zip([number for group in saved["param_groups"] for number in group["params"]], parameters, strict=False))

    def cut(number: Any, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: cut(number, part) for name, part in value.items()}
        parameter = of.get(number)
        is_like_it = parameter is not None and getattr(value, "shape", None) == parameter.shape
        fit = fitted(value, parameter if is_like_it else None)
        return fit.clone() if fit is value and sharding.is_piece(parameter) and isinstance(fit, torch.Tensor) else fit

    state = {number: cut(number, value) for number, value in saved["state"].items()}
    optimizer.load_state_dict(saved | {"state": state})
    for number, parameter in of.items():
        now = optimizer.state.get(parameter, {})
        for name, value in state.get(number, {}).items():
            if isinstance(value, torch.Tensor) and value.shape != parameter.shape and name in now:
                now[name] = now[name] if now[name].dtype == value.dtype else value.to(now[name].device)
