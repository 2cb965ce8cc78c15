"""Divides the model of a memory plan over processes that are not there, by the code that divides it in training.

The process group is torch's ``fake`` one, whose messages go nowhere. With fake tensors nothing is computed either, so
one process here is one of many: it holds its shards, gathers a layer's weights when the layer runs, and computes its
slice of a row.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from posttrain.core.distributed import division, shard_settings, sharding, tensor_parallel
from posttrain.core.distributed.division import Division
from posttrain.core.errors import ConfigError
from posttrain.core.models.wrapping import replaced
from posttrain.lm.attention import context_parallel

Context = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def imagined(processes: int) -> Iterator[None]:
    """Within this context the process is the first of so many, of which the others do not exist."""
    if processes == 1:
        yield
        return
    from accelerate.utils import patch_environment
    from torch.distributed.tensor import debug
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with patch_environment(world_size=processes, rank=0, local_rank=0):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()
            # torch keeps by mesh what operations on divided tensors give, and takes one for another whose groups are
            # gone.
            debug._clear_sharding_prop_cache()


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
        division: None in one process, and under DDP, which holds the model whole.
        peers: those with the same rows where rows are cut, a process group.
    """

    division: Division | None = None
    peers: Any = None

    @property
    def copies(self) -> bool:
        """Whether DDP keeps gradients in buckets beside the model's."""
        return processes() > 1 and self.division is None

    @property
    def offloads(self) -> bool:
        """Whether weights, gradients and optimizer state are in host memory."""
        settings = None if self.division is None else self.division.settings
        return settings is not None and settings.cpu_offload


def mesh_of(args: Any, device_type: str, config: Any) -> Mesh:
    """How a run with `args` would divide a model with this `config` over the processes of this context. Made without
    fake tensors; `ConfigError` where the sizes do not fit the number of processes, or the model.
    """
    total, sizes = processes(), shard_settings.sizes_of(args.parallelism_config)
    settings, problems = shard_settings.read(args.fsdp, args.fsdp_config, args.parallelism_config)
    problems += [*division.problems(sizes, total, args), *division.model_problems(sizes, config)]
    if problems:
        raise ConfigError("posttrain plan", problems)
    if total == 1:
        return Mesh()
    tp, cp, ep = (sizes.get(name, 1) for name in ("tp_size", "cp_size", "ep_size"))
    settings = division.sharding_of(settings, sizes, total)
    try:
        mesh = sharding.make_mesh(settings, device_type, total, total, tp=tp, cp=cp)
        keepers = sharding.make_expert_mesh(mesh, ep) if ep > 1 and tp == 1 else None
    except ValueError as error:
        raise ConfigError("posttrain plan", [str(error)]) from error
    peers = torch.distributed.new_group(list(range(cp))) if cp > 1 else None
    is_whole = settings is None and tp * ep == 1
    return Mesh(None if is_whole else Division(settings, mesh, ep, keepers, sizes.get("sp_size", 1) > 1), peers)


def divide(model: nn.Module, mesh: Mesh, device: torch.device, precision: str) -> None:
    """Divide `model`, of fake tensors, over the processes. `precision` of products: "no", "bf16" or "fp16"."""
    if mesh.peers is not None:
        context_parallel.enable(model, mesh.peers)
    if mesh.division is not None:
        from torch.distributed.device_mesh import DeviceMesh

        # FSDP joins its mesh with that of split matrices, and looks a process up in it by numbers.
        with _called_within(_numbers, DeviceMesh, "_concatenate"):
            division.cut(model, mesh.division, device, precision)


@contextlib.contextmanager
def _numbers() -> Iterator[None]:
    """Within this context new tensors are real ones, on the host."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), torch.device("cpu"):
        yield


def even_routes(mesh: Mesh) -> contextlib.AbstractContextManager[None]:
    """Within, every process sends each that keeps experts as many tokens: fake tensors have shapes and no routes."""
    if mesh.division is None or mesh.division.experts == 1:
        return contextlib.nullcontext()
    exchange: Any = importlib.import_module("transformers.distributed.expert_parallel")

    def evenly(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> tuple[Any, ...]:
        tokens, parts, size = len(hidden), self.tp_mesh.size(), self.ep_mesh.size()
        if parts > 1:  # each sends its part of the tokens that all have
            hidden, index, weights = (given[: -(-tokens // parts)] for given in (hidden, index, weights))
        order = torch.argsort(index.reshape(-1))
        sizes = [len(order) // size + (i < len(order) % size) for i in range(size)]
        sent = exchange.all_to_all_single_autograd(
            hidden[order // index.shape[-1]], sizes, sizes, self.ep_mesh.get_group()
        )
        sent = exchange._WaitTensor.apply(sent)
        ids = index.new_zeros(len(order), 1)
        return (
            sent,
            ids,
            torch.ones_like(ids, dtype=sent.dtype),
            exchange._AllToAllState(weights, order, sizes, sizes, tokens),
        )

    return replaced(exchange.AllToAllEP, "_dispatch_tokens", evenly)


def step(optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    """A step of `optimizer`, as training makes it."""
    found = mesh.division
    # Some weights are divided over other processes than others.
    several = found is not None and (found.experts > 1 or "tp" in (found.mesh.mesh_dim_names or ()))
    tensor_parallel.step(optimizer) if several else optimizer.step()


def shapes_within(context: Context) -> contextlib.AbstractContextManager[None]:
    """Within this context DTensor finds the shapes of results inside of a `context()` of its own each time.

    It finds them by running an operation on fake tensors of the whole size, which no process ever holds.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    return _called_within(context, ShardingPropagator, "_propagate_tensor_meta_non_cached")


def _called_within(context: Context, owner: type, name: str) -> contextlib.AbstractContextManager[None]:
    """Within this context each call of the method `name` of the class `owner` happens inside of a `context()`."""
    asked = getattr(owner, name)

    def within(*args: Any, **kwargs: Any) -> Any:
        with context():
            return asked(*args, **kwargs)

    # What `getattr` has bound already, or needs no binding, must not be bound again.
    return replaced(owner, name, within if vars(owner)[name] is asked else staticmethod(within))
