"""Weights of a sharded model as ``from_pretrained`` reads them, in files of which each process writes some.

A process gathers the whole tensors of its files alone, so no process ever holds the model whole.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import nn

from posttrain.core.checkpoint import weights
from posttrain.core.distributed import sharding
from posttrain.core.errors import CheckpointError
from posttrain.core.files import naming
from posttrain.core.models.wrapping import adapters_of, is_pretrained

_LARGEST = "50GB"  # file that transformers writes, if nothing is asked for
_LAYER = re.compile(r".*?\.\d+\.")


def divide(model: nn.Module, processes: int) -> list[set[str]]:
    """Which entries of the state dict each of `processes` writes: its layers in order, about as many bytes for each.

    The tensors of a layer stay together, because transformers joins and divides some of them when it saves, and so do
    tied ones.
    """
    groups: dict[str, set[str]] = {}
    sizes: dict[str, int] = {}
    of_tensor: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        layer = _LAYER.match(name)
        group = of_tensor.setdefault(id(tensor), layer[0] if layer else name)
        groups.setdefault(group, set()).add(name)
        sizes[group] = sizes.get(group, 0) + math.prod(sharding.whole_shape(tensor)) * tensor.element_size()
    found: list[set[str]] = [set() for _ in range(processes)]
    before, total = 0, max(sum(sizes.values()), 1)
    for group, names in groups.items():
        found[min(before * processes // total, processes - 1)] |= names
        before += sizes[group]
    return found


def save(model: nn.Module, directory: str | Path, dist: Any, max_shard_size: int | str | None) -> bool:
    """Write `model` (not wrapped) into `directory`, each process its share; the main one adds the config and the index.

    Every process must call it. When it returns True, all are written, or copied where a checkpoint is saved in the
    background. It returns False, with nothing written, where one process is to write all: the model is not sharded by
    us, or has adapters, or one file holds it, or no other process sees the folder of the main one. Raises a
    `CheckpointError` or an `OSError` where a process could not write its files.
    """
    in_pieces = is_pretrained(model) and not adapters_of(model) and sharding.is_in_pieces(*model.parameters())
    if not in_pieces or _fits_one_file(model, max_shard_size):
        return False
    directory = Path(directory)
    writers = _who_sees(directory, dist)
    if len(writers) == 1:
        return False
    own = dict(zip(writers, divide(model, len(writers)), strict=True)).get(dist.process_index, set())
    if (tensors := dist.whole_state_dict(model, keep=own.__contains__)) is None:
        return False
    files: list[dict[str, torch.Tensor]] = []

    def convert() -> list[dict[str, int]]:
        folder = directory if dist.is_main else None
        files.extend(weights.files(model, folder, tensors, max_shard_size) if tensors else [])
        return [{name: tensor.nbytes for name, tensor in file.items()} for file in files]

    contents = _together(dist, directory, convert)
    number, count = sum(map(len, contents[: dist.process_index])), sum(map(len, contents))
    names = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]

    def write() -> None:
        for name, file in zip(names[number:], files, strict=False):
            weights.write_file(file, directory / name)
        if dist.is_main:
            sizes = dict(zip(names, [sizes for of_one in contents for sizes in of_one], strict=True))
            _write_index(directory, sizes, sharding.count(model.parameters()))

    _together(dist, directory, write)
    return True


def _who_sees(directory: Path, dist: Any) -> list[int]:
    """The processes whose `directory` is that of the main one: on another machine it may be another."""
    name = f".seen-{secrets.token_hex(8)}"

    def mark() -> str:
        if dist.is_main:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / name).touch()
        return name

    name = _together(dist, directory, mark)[0]
    sees = dist.gather_patiently((directory / name).is_file())
    if dist.is_main:
        (directory / name).unlink()
    return [rank for rank, there in enumerate(sees) if there]


def _write_index(directory: Path, sizes: dict[str, dict[str, int]], num_parameters: int) -> None:
    (directory / weights.WEIGHTS).unlink(missing_ok=True)  # of an earlier model: from_pretrained would prefer it
    total = sum(nbytes for file in sizes.values() for nbytes in file.values())
    index = {
        "metadata": {"total_parameters": num_parameters, "total_size": total},
        "weight_map": {tensor: name for name, file in sizes.items() for tensor in file},
    }
    (directory / weights.INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _together(dist: Any, directory: Path, work: Callable[[], Any]) -> list[Any]:
    """What `work()` gave on each process; where it failed on one, an error on all."""
    result, error = None, None
    try:
        with naming(directory):
            result = work()
    except (OSError, CheckpointError) as caught:
        error = caught
    answers = dist.gather_patiently((result, error and f"{type(error).__name__}: {error}"), "that all write weights")
    if error is not None:
        raise error
    if failed := [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text]:
        raise CheckpointError(f"The weights were not written: {'; '.join(failed)}")
    return [result for result, _ in answers]


def _fits_one_file(model: nn.Module, max_shard_size: int | str | None) -> bool:
    described = {
        name: torch.empty(sharding.whole_shape(tensor), dtype=tensor.dtype, device="meta")
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    return not split_torch_state_dict_into_shards(described, max_shard_size=max_shard_size or _LARGEST).is_sharded
