"""Divides the model of a memory plan over processes that are not there, by the code that divides it in training.

The process group is torch's ``fake`` one, whose messages go nowhere. With fake tensors nothing is computed either, so
one process here is one of many: it holds its shards, gathers a layer's weights when the layer runs, and computes its
slice of a row.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from posttrain.core.distributed import shard_settings, sharding
from posttrain.core.errors import ConfigError
from posttrain.core.models import context_parallel


@contextlib.contextmanager
def imagined(processes: int) -> Iterator[None]:
    """Within this context the process is the first of so many, of which the others do not exist."""
    if processes == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    variables = {"WORLD_SIZE": str(processes), "RANK": "0", "LOCAL_RANK": "0"}
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def processes() -> int:
    """The number of processes of this context; 1 outside."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def cp_size(args: Any) -> int:
    """Processes that split a row."""
    return shard_settings.sizes_of(args.parallelism_config).get("cp_size", 1)


@dataclass(frozen=True)
class Mesh:
    """How a run's processes divide its model; see `Distributed`.

    Attributes:
        sharding: the settings of FSDP; None: DDP, which holds the model whole.
        shards: the processes of FSDP, a `DeviceMesh`. peers: those with the same rows, a process group.
    """

    sharding: shard_settings.Sharding | None = None
    shards: Any = None
    peers: Any = None

    @property
    def copies(self) -> bool:
        """Whether DDP keeps gradients in buckets beside the model's."""
        return processes() > 1 and self.sharding is None


def mesh_of(args: Any, device_type: str) -> Mesh:
    """How a run with `args` would be divided over the processes of this context. Made without fake tensors.

    Raises:
        ConfigError: the sizes do not fit the number of processes, or are not planned.
    """
    total, cp = processes(), cp_size(args)
    settings, problems = shard_settings.read(args.fsdp, args.fsdp_config, args.parallelism_config)
    for name in ("tp_size", "ep_size"):
        if (size := shard_settings.sizes_of(args.parallelism_config).get(name, 1)) > 1:
            problems.append(f"{name}={size} is not planned yet; fsdp and cp_size are")
    if total % cp:
        problems.append(f"cp_size={cp} does not divide {total} processes; set --processes")
    if problems:
        raise ConfigError("posttrain plan", problems)
    if total == 1:
        return Mesh()
    try:
        mesh = sharding.make_mesh(settings, device_type, total, total, cp=cp)
    except ValueError as error:
        raise ConfigError("posttrain plan", [str(error)]) from error
    return Mesh(settings, mesh, torch.distributed.new_group(list(range(cp))) if cp > 1 else None)


def divide(model: nn.Module, mesh: Mesh, device: torch.device, precision: str) -> None:
    """Divide `model`, of fake tensors, over the processes.

    Args:
        precision: of the products, ``"no"``, ``"bf16"`` or ``"fp16"``.
    """
    if mesh.peers is not None:
        context_parallel.enable(model, mesh.peers)
    if mesh.sharding is not None:
        sharding.shard(model, mesh.sharding, mesh.shards, device, precision)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of `tensor`."""
    return tensor.to_local() if sharding.is_piece(tensor) else tensor
