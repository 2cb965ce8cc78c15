"""Fully sharded data parallel training: each process holds its shard of the weights alone (`sharding`)."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from posttrain.core.data import accelerator
from posttrain.core.distributed import division, sharding
from posttrain.core.distributed.strategies.base import LOW, Distributed, Names, round_weights
from posttrain.core.distributed.world import NOTHING


class FSDP(Distributed):
    """Shards weights, gradients and the optimizer's state by torch's `fully_shard`."""

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
