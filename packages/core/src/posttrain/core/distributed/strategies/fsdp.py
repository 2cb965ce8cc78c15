"""Training where each process holds its part of the weights alone: sharded data parallel, and model parallel."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from posttrain.core.data import accelerator
from posttrain.core.distributed import division, expert_parallel, sharding, tensor_parallel
from posttrain.core.distributed.strategies.base import LOW, Distributed, Names, round_weights
from posttrain.core.distributed.world import NOTHING


class FSDP(Distributed):
    """Shards weights, gradients and the optimizer's state by torch's `fully_shard` (`sharding`)."""

    shards = True
    _mesh: Any = None

    def shard(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
        if self.sharding is not None and sharding.is_sharded(model):
            sharding.scatter(model, self.sharding)  # after a forward without a backward
            return model
        self._slice_rows(model)
        before = {id(parameter): name for name, parameter in model.named_parameters()}
        self._cut(model)
        sharding.follow(optimizer, before, model)
        return model

    def prepare_frozen(self, model: nn.Module, rounds: bool = False) -> nn.Module:
        dtype = self.sharding.param_dtype if self.sharding is not None else None
        if rounds and (dtype := dtype or LOW.get(self.precision)) is not None:
            round_weights(model, dtype, everything=True)
        self._use_device(model)
        self._slice_rows(model)
        self._cut(model, frozen=True)
        return model

    def _cut(self, model: nn.Module, frozen: bool = False) -> None:
        """Divide `model` over the processes."""
        # torch counts its own use of a deprecated call against us.
        with self._waiting("sharding the model"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            division.cut(model, self._division(), self.device, self.precision, frozen)

    def _division(self) -> division.Division:
        return division.Division(self.sharding, self._processes())

    def _processes(self) -> Any:
        """All processes, as a device mesh."""
        if self._mesh is None:
            total, local = self.num_processes, int(os.environ.get("LOCAL_WORLD_SIZE", self.num_processes))
            sizes = {"tp": self.tp_size, "cp": self.cp_size}
            self._mesh = sharding.make_mesh(self.sharding, self.device.type, total, local, **sizes)
        return self._mesh

    @contextlib.contextmanager
    def _whole(self, model: nn.Module) -> Iterator[None]:
        if self.sharding is None or not sharding.is_sharded(model):
            yield
            return
        with self._waiting("gathering the weights"):
            sharding.gather(model)
        try:
            yield
        finally:
            sharding.scatter(model, self.sharding)

    def whole_state_dict(
        self, model: nn.Module, only: Names = lambda name: True, keep: Names | None = None
    ) -> dict[str, torch.Tensor] | None:
        if not self._is_divided(model):
            return None
        with self._waiting("gathering the weights"):
            found = sharding.whole_state_dict(model, keep or (lambda name: self.is_main), only)
        accelerator.synchronize(self.device)  # a process that keeps nothing may end before the others have it
        return found

    def _is_divided(self, model: nn.Module) -> bool:
        return sharding.is_sharded(model)

    def sync_gradients(self, model: nn.Module, when: bool) -> contextlib.AbstractContextManager[Any]:
        if self.sharding is not None:
            sharded: Any = model
            sharded.set_requires_gradient_sync(when)
        return NOTHING

    def _clip(self, parameters: Sequence[torch.Tensor], max_norm: float | None) -> torch.Tensor:
        return sharding.whole(super()._clip(parameters, max_norm))


class ModelParallel(FSDP):
    """Divides some weights over other processes than others, which no kernel takes together: processes split the
    matrices of a model (`tensor_parallel`), or have all experts of a mixture between them (`expert_parallel`). Groups
    of such processes shard the weights as under FSDP.
    """

    _expert_mesh: Any = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._split: WeakSet[nn.Module] = WeakSet()

    def _groups(self) -> tuple[Any, Any]:
        if self.tp_size == 1:
            return super()._groups()
        mesh, dims = self._processes(), division.data_dims(self._processes())
        rows = mesh[dims]._flatten("rows") if len(dims) > 1 else mesh[dims[0]]
        return rows.get_group(), mesh.get_group("tp")

    @property
    def _exchanges_tokens(self) -> bool:
        """Whether processes with rows of their own have the experts between them."""
        return self.ep_size > 1 and self.tp_size == 1

    def shard(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
        return model if self.sharding is None and model in self._split else super().shard(model, optimizer)

    def _division(self) -> division.Division:
        """With all processes by the experts that they keep, as a device mesh."""
        if self._exchanges_tokens and self._expert_mesh is None:
            self._expert_mesh = sharding.make_expert_mesh(self._processes(), self.ep_size)
        return division.Division(self.sharding, self._processes(), self.ep_size, self._expert_mesh, self.sp_size > 1)

    def _cut(self, model: nn.Module, frozen: bool = False) -> None:
        self._split.add(model)
        super()._cut(model, frozen)

    @contextlib.contextmanager
    def _whole(self, model: nn.Module) -> Iterator[None]:
        with super()._whole(model), expert_parallel.whole(model) if self._exchanges_tokens else NOTHING:
            yield

    def _is_divided(self, model: nn.Module) -> bool:
        return sharding.is_sharded(model) or tensor_parallel.loaded_size(model) > 1

    def _clip(self, parameters: Sequence[torch.Tensor], max_norm: float | None) -> torch.Tensor:
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = tensor_parallel.total_norm(gradients)
        if max_norm:
            tensor_parallel.clip(gradients, norm, max_norm)
        return norm

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> bool:
        if self.scaler is not None:
            return super().optimizer_step(optimizer)
        tensor_parallel.step(optimizer)
        return True
