"""What a vLLM server loads from this package: a way to receive weights that needs no GPU.

vLLM finds `register` by the entry point ``vllm.general_plugins`` wherever posttrain-rl is installed beside it. Then
``--weight-transfer-config '{"backend": "gloo"}'`` starts a server whose workers receive weights over gloo, from
`posttrain.rl.generation.transfer.Gloo`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.rl.generation.gloo import GlooGroup

BACKEND = "gloo"


def register() -> None:
    """Make `BACKEND` known to vLLM, which calls this in each of its processes, in some of them twice."""
    from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory

    engine = type("GlooWeightTransferEngine", (GlooReceiver, WeightTransferEngine), {})
    with contextlib.suppress(ValueError):  # it is known already
        WeightTransferEngineFactory.register_engine(BACKEND, engine)


def refresh_tied_head(model: Any) -> None:
    """Let the output head of vLLM's `model` use its present weights, after weights were loaded into it again.

    On the CPU vLLM 0.32 multiplies by a packed copy, which it makes anew for layers that weights were loaded into. A
    head that is tied to the embedding is not among those, and would go on with the weights of the start.
    """
    for layer in model.modules():
        if type(layer).__name__ == "ParallelLMHead" and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)


@dataclass
class InitInfo:
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
class UpdateInfo:
    """The weights that are sent next, in their order: names, types and shapes."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooReceiver:
    """What vLLM's ``WeightTransferEngine`` leaves to its subclasses: one weight after another, one at a time.

    Attributes:
        parallel_config, model_config, model, device: of vLLM's worker, set by vLLM.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    parallel_config: Any
    model_config: Any
    model: Any
    device: torch.device
    _group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the trainer's group, after the workers of lower rank."""
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        where = init_info.address, init_info.port, init_info.group
        self._group = GlooGroup(*where, rank, init_info.size, init_info.timeout)

    def start_weight_update(self) -> None:
        """Prepare the layers to take weights as a checkpoint names them."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Lay the weights out as the kernels want them."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        refresh_tied_head(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As vLLM's, which waits for an accelerator that may not be there."""
        self.receive_weights(UpdateInfo(**update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive the weights and load each into the model."""
        if self._group is None:
            raise RuntimeError("The trainer has not connected yet: call init_weight_transfer_engine first.")
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            self._group.broadcast(weight)
            self.model.load_weights([(name, weight.to(self.device))])

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None
