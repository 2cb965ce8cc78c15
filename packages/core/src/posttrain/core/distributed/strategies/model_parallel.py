"""Model parallel training: processes split the matrices of a model (`tensor_parallel`), or have all experts of a
mixture between them (`expert_parallel`). Groups of such processes shard the weights as under FSDP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from posttrain.core.distributed import division, expert_parallel, sharding, tensor_parallel
from posttrain.core.distributed.strategies.fsdp import FSDP
from posttrain.core.distributed.world import NOTHING


class ModelParallel(FSDP):
    """Divides some weights over other processes than others, which no kernel takes together."""

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
        is_split = self.sharding is None and model in self._split
        return model if is_split else super().shard(model, optimizer)

    def _division(self) -> division.Division:
        """With all processes by the experts that they keep, as a device mesh."""
        if self._exchanges_tokens and self._expert_mesh is None:
            self._expert_mesh = sharding.make_expert_mesh(self._processes(), self.ep_size)
        return division.Division(self.sharding, self._processes(), self.ep_size, self._expert_mesh)

    def _cut(self, model: nn.Module, frozen: bool = False) -> None:
        self._split.add(model)
        super()._cut(model, frozen)

    @contextlib.contextmanager
    def _whole(self, model: nn.Module) -> Iterator[None]:
        with super()._whole(model), expert_parallel.whole(model) if self._exchanges_tokens else NOTHING:
            yield

    def _is_divided(self, model: nn.Module) -> bool:
        return sharding.is_sharded(model) or tensor_parallel.is_split(model)

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
