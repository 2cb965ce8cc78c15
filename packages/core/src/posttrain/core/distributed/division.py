"""Divides a model over the processes of a run: split matrices, divided experts and shards, in this order.

Training does so over the processes that there are (`posttrain.core.distributed.strategies`), and a memory plan over
imagined ones (`posttrain.cli.tools.memory_mesh`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from posttrain.core.distributed import expert_parallel, shard_settings, sharding, tensor_parallel
from posttrain.core.errors import ConfigError


def argument_problems(sizes: dict[str, int], args: Any) -> Iterator[str]:
    """Why `args` cannot train with groups of processes of these `sizes`."""
    tp, cp, ep = (sizes.get(name, 1) for name in ("tp_size", "cp_size", "ep_size"))
    if tp > 1:
        yield from shard_settings.piece_problems("tp_size", tp, "split", "split matrices", args)
    if (sp := sizes.get("sp_size", 1)) > 1 and "mlp_tile" in (args.activation_checkpointing_kwargs or {}):
        yield f"activation_checkpointing_kwargs: mlp_tile does not work with sp_size={sp}; leave one of them out"
    if cp > 1:
        yield from shard_settings.context_problems(cp, tp, args)
    if ep > 1:
        yield from expert_parallel.problems(ep, sizes, args)


def problems(sizes: dict[str, int], processes: int, args: Any) -> list[str]:
    """Why a run of so many `processes` with `args` cannot divide its model into groups of these `sizes`."""
    return [*argument_problems(sizes, args), *shard_settings.world_problems(sizes, processes)]


def sizes_of_run(args: Any, model: nn.Module | None, processes: int) -> dict[str, int]:
    """The sizes of the groups of processes by name, with ``tp_size`` and ``ep_size``: of the arguments, or as `model`
    was loaded. Raises a `ConfigError` where so many `processes` do not divide into them, or the model was loaded
    otherwise.
    """
    sizes, found = dict(shard_settings.sizes_of(args.parallelism_config)), []
    loaded = {"tp_size": tensor_parallel.loaded_size(model), "ep_size": expert_parallel.loaded_size(model)}
    for name, size in loaded.items():
        if size > 1 and sizes.get(name, 1) not in (1, size):
            found.append(
                f"parallelism_config: {name}={sizes[name]}, and from_pretrained(distributed_config=...) loaded the "
                f"model with {name}={size}; leave {name} out, or load the model without distributed_config"
            )
        sizes[name] = max(size, sizes.get(name, 1))
    if sharding.is_sharded_by_transformers(model):
        found.append(
            "from_pretrained(distributed_config=...) sharded the model (fsdp_size); load it without "
            "distributed_config, and set fsdp='full_shard', and of parallelism_config ep_size, if experts were "
            "divided"
        )
    found += problems(sizes, processes, args)
    if found:
        raise ConfigError("TrainingArguments", found)
    return sizes


def model_problems(sizes: dict[str, int], config: Any) -> list[str]:
    """Why a model with this `config` cannot be divided into groups of these `sizes`, as far as the config shows it."""
    checks = {"tp_size": tensor_parallel.config_problem, "ep_size": expert_parallel.config_problem}
    found = (check(config, sizes[name]) for name, check in checks.items() if sizes.get(name, 1) > 1)
    return [problem for problem in found if problem]


def sharding_of(
    settings: shard_settings.Sharding | None, sizes: dict[str, int], processes: int
) -> shard_settings.Sharding | None:
    """How the weights are sharded where `settings` ask for it: not at all where no processes share them, and always
    where DDP would have to average weights of which each process has a part.
    """
    tp, cp, ep = (sizes.get(name, 1) for name in ("tp_size", "cp_size", "ep_size"))
    if processes == tp:
        return None
    if settings is None and processes // (tp * cp) > 1 and tp * ep > 1:
        return shard_settings.Sharding(replicas=sizes.get("dp_replicate_size", 1))
    return settings


def data_dims(mesh: Any) -> tuple[str, ...]:
    """The dimensions of `mesh` (`sharding.make_mesh`) along which rows are dealt."""
    return tuple(name for name in mesh.mesh_dim_names if name != "tp")


@dataclass(frozen=True)
class Division:
    """What `cut` does to a model."""

    settings: shard_settings.Sharding | None  # of FSDP; None: weights are not sharded
    mesh: Any  # all processes, see `sharding.make_mesh`
    experts: int = 1  # processes that have all experts of a mixture between them
    #: All processes by the experts that they keep, see `sharding.make_expert_mesh`, where those with different experts
    #: read rows of their own; else None.
    expert_mesh: Any = None
    by_rows: bool = False  # processes that split matrices have the tokens of a row between them elsewhere


def cut(model: nn.Module, division: Division, device: torch.device, precision: str, frozen: bool = False) -> None:
    """Divide `model` in place and move it to `device`, for products in the `precision` "no", "bf16" or "fp16";
    `frozen`: it is never trained.
    """
    mesh, over, options = division.mesh, division.mesh, {}
    if "tp" in mesh.mesh_dim_names:
        tensor_parallel.split(model, mesh["tp"], device, division.experts > 1, division.by_rows)
        over = mesh[data_dims(mesh)]
    if (keepers := division.expert_mesh) is not None:
        options["experts"] = expert_parallel.divide(model, keepers["expert"], keepers["alone"], device)
        options["expert_mesh"] = keepers[data_dims(mesh)]
    if division.settings is not None:
        sharding.shard(model, division.settings, over, device, precision, frozen=frozen, **options)
