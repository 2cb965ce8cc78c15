"""The worker's side of weights over gloo; see `vllm_plugin`. Imported by vLLM's workers alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from posttrain.rl.generation.gloo import GlooGroup


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Where the trainer is found.

    Attributes:
        address: of the trainer's machine. port: of the store there. group: its name. timeout: seconds to wait.
        size: this server's workers, and the trainer.
    """

    address: str
    port: int
    group: str
    size: int
    timeout: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """The weights that are sent next, in their order: names, types and shapes."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives one weight after another in the format of a checkpoint, and holds one at a time."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    _group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the trainer's group, after the workers of lower rank."""
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        where = init_info.address, init_info.port, init_info.group
        self._group = GlooGroup(*where, rank, init_info.size, init_info.timeout)

    def start_weight_update(self) -> None:
        """Prepare the layers to take weights of a checkpoint."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Lay the weights out as the kernels want them."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As vLLM's, on any device."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive the weights and load each into the model."""
        if self._group is None:
            raise RuntimeError("The trainer has not connected yet: call init_weight_transfer_engine first.")
        facts = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        for name, dtype, shape in facts:
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            self._group.broadcast(weight)
            self.model.load_weights([(name, weight.to(self.device))])

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None
