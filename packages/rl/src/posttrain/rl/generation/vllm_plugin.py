"""What a vLLM server loads from this package: a way to receive weights that needs no GPU.

vLLM finds `register` by the entry point ``vllm.general_plugins`` wherever posttrain-rl is installed beside it. Then
``--weight-transfer-config '{"backend": "gloo"}'`` starts a server whose workers receive weights over gloo, from
`posttrain.rl.generation.transfer.Gloo`. `GlooGroup` is what both use, and needs no vLLM.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

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


class GlooGroup:
    """Processes of several programs that receive what rank 0 sends, without `torch.distributed`'s own group.

    Args:
        address: of rank 0's machine. port: a free one there. name: of this group, where several share the port.
        rank: of this process. size: processes in all.
        timeout: seconds to wait for the others.
        store: rank 0's, made by `serve`; None: connect to it.
    """

    def __init__(
        self,
        address: str,
        port: int,
        name: str,
        rank: int,
        size: int,
        timeout: float,
        store: dist.TCPStore | None = None,
    ) -> None:
        limit = timedelta(seconds=timeout)
        if store is None:
            store = dist.TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)
        gloo: Any = dist.ProcessGroupGloo  # torch describes it to type checkers in part
        options = gloo._Options()
        options._timeout, options._threads = limit, 2
        options._devices = [gloo.create_device(hostname=own_address(address, port))]
        self._group = gloo(dist.PrefixStore(name, store), rank, size, options)
        self._store = store  # rank 0's serves the others as long as it lives

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Fill `tensor`, contiguous and on the CPU, with rank 0's."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        flat = tensor.view(-1).view(torch.uint8)  # gloo knows fewer types than torch
        self._group.broadcast([flat], options).wait()


def serve(port: int, timeout: float) -> dist.TCPStore:
    """The store at which the processes of groups meet, on this machine. Port 0: any that is free."""
    return dist.TCPStore("0.0.0.0", port, is_master=True, timeout=timedelta(seconds=timeout), wait_for_workers=False)


def own_address(host: str, port: int) -> str:
    """This machine's address as `host` sees it. Sends nothing."""
    kind, _, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as way:
        way.connect(there)
        return way.getsockname()[0]
