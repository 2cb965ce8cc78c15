"""Sends weights to vLLM servers: over NCCL, over gloo, or as files in a folder that trainer and servers share.

The order is that of vLLM's interface for reinforcement learning, in 0.32 and 0.33: init once, then start, update and
finish for each sync (https://docs.vllm.ai/en/latest/training/weight_transfer/). One weight after another is gathered
and sent. Only the first process sends; where weights are sharded, the others iterate over them meanwhile.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import shutil
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from posttrain.core.checkpoint.weights import ADAPTER, write_file
from posttrain.core.data import accelerator
from posttrain.core.errors import require
from posttrain.rl.generation.server import Refused, Server
from posttrain.rl.generation.vllm_plugin import GlooGroup, own_address, serve
from posttrain.rl.generation.weights import AdapterWeights, Weights

SHARD_BYTES = 2**29
"""Weights in a file of `Folder` at most, unless one alone is larger: so much is held at a time."""
UNFINISHED = "unfinished"  # what a server has of a sender that ended before it had sent all
NAME = "posttrain-policy"
"""The name under which the servers know the adapter."""


class Transport(Protocol):
    """A way to send weights."""

    def send(self, weights: Any, servers: Sequence[Server], version: str) -> None:
        """Replace the weights of `servers`, which report them as `version` from then on."""
        ...


class Nccl:
    """Over NCCL, with vLLM's own sender: from GPU to GPU, several weights in a buffer.

    Args:
        port: for weights. All servers' workers and this process are one group.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self._engine: Any = None

    def send(self, weights: Weights, servers: Sequence[Server], version: str) -> None:
        """See `Transport.send`."""
        if self._engine is None:
            self._engine, self._client, self._source = self._connect(servers, weights)
        self._source.weights, self._client.version = weights, version
        if weights.device.type != "cpu":  # it reads them in streams of its own, which wait for no optimizer step
            with accelerator.waiting():
                torch.accelerator.current_stream(weights.device).synchronize()
        try:
            self._engine.send_weights()
        except Exception:
            self._engine = None  # its group can no longer be used
            raise

    def _connect(self, servers: Sequence[Server], weights: Weights) -> tuple[Any, Any, Any]:
        require("vllm", "vllm", "sending weights over NCCL")
        try:
            from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
            from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        except ImportError as error:
            raise ImportError(
                "The vllm installed here cannot send weights by vLLM's interface for trainers, which this version of "
                "posttrain uses. Install vllm 0.32 or newer, or set vllm_weight_folder."
            ) from error

        class Source(WeightSource):
            def __init__(self, weights: Weights) -> None:
                self.weights = weights

            def facts(self) -> list[Any]:
                return [ParamMeta(*fact) for fact in self.weights.facts]

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                return iter(self.weights)

            iter_full = __iter__
            # vLLM 0.33 reads what 0.32 calls.
            metadata = functools.cached_property(facts) if hasattr(WeightSource, "iter_full") else facts

        client, source = Client(servers), Source(weights)
        address = address_towards(servers[0].url)
        info = NCCLTrainerInitInfo(address, self.port, 1 + sum(client.sizes), rank=0)
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source), client, source


class Client:
    """What vLLM's sender calls: the same on each of `servers`, whose workers are one group."""

    version = ""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers, self.sizes = servers, [world_size(server) for server in servers]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Each server's workers come after those of the server before it."""
        offsets = [init_info["rank_offset"] + sum(self.sizes[:place]) for place in range(len(self.sizes))]
        bodies = [{"init_info": init_info | {"rank_offset": offset}} for offset in offsets]
        everywhere(self.servers, "/init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        begin_update(self.servers)

    def update_weights(self, update_info: Any) -> None:
        everywhere(self.servers, "/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        everywhere(self.servers, "/finish_weight_update", {"weight_version": weight_version or self.version})


class Gloo:
    """Over gloo, to servers where posttrain-rl is installed beside vLLM: for machines without a GPU.

    Args:
        port: at which servers find this process. timeout: seconds to wait for them.
    """

    def __init__(self, port: int, timeout: float) -> None:
        self.port, self.timeout = port, timeout
        self._store: Any = None
        self._groups: dict[str, GlooGroup] = {}
        self._versions: dict[str, str] = {}

    def send(self, weights: Weights, servers: Sequence[Server], version: str) -> None:
        """See `Transport.send`. A server that was started anew is connected anew."""
        for server in servers:
            if server.url not in self._groups or version_of(server) != self._versions.get(server.url):
                self._connect(server)
        groups = [self._groups.pop(server.url) for server in servers]  # a failure leaves none to be used again
        begin_update(servers)
        facts = {  # as vLLM's interface takes them
            "names": [name for name, _, _ in weights.facts],
            "dtype_names": [str(dtype).removeprefix("torch.") for _, dtype, _ in weights.facts],
            "shapes": [list(shape) for *_, shape in weights.facts],
        }
        with meanwhile(servers, "/update_weights", [{"update_info": facts}] * len(servers)) as check:
            for _, weight in weights:
                check()
                flat = weight.to("cpu").contiguous()
                for group in groups:
                    group.broadcast(flat)
        everywhere(servers, "/finish_weight_update", {"weight_version": version})
        for server, group in zip(servers, groups, strict=True):
            self._groups[server.url], self._versions[server.url] = group, version

    def _connect(self, server: Server) -> None:
        if self._store is None:
            self._store = serve(self.port, self.timeout)
        address, size, name = address_towards(server.url), 1 + world_size(server), uuid.uuid4().hex
        where = {"address": address, "port": self._store.port, "group": name, "size": size, "timeout": self.timeout}
        with meanwhile([server], "/init_weight_transfer_engine", [{"init_info": where}]):
            self._groups[server.url] = GlooGroup(address, self._store.port, name, 0, size, self.timeout, self._store)


class Folder:
    """As files in the format of a checkpoint, which servers read: the plainest way, for any server.

    Args:
        path: the folder, by the same name for trainer and servers. What is in ``weights`` there is replaced.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute() / "weights"

    def send(self, weights: Weights, servers: Sequence[Server], version: str) -> None:
        """See `Transport.send`."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        write_shards(weights, self.path)
        where = {"method": "reload_weights", "kwargs": {"weights_path": str(self.path)}}
        everywhere(servers, "/collective_rpc", where)
        everywhere(servers, "/update_weight_version", {"new_version": version})


class AdapterFolder:
    """A LoRA adapter as such, for servers on the model below it that read it from a folder.

    They are started with ``--enable-lora --max-lora-rank R`` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.

    Args:
        path: the folder, by the same name for trainer and servers. What is in ``adapter`` there is replaced.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute() / "adapter"

    def send(self, weights: AdapterWeights, servers: Sequence[Server], version: str) -> None:
        """Write the adapter, and have the servers load it in the place of the one before. Raise ValueError if a server
        has had the weights below the adapter replaced.
        """
        for server in servers:
            if (found := version_of(server)).startswith("posttrain-weights"):
                raise ValueError(
                    f"The vLLM server at {server.url} has whole weights of another run ({found}), not the model below "
                    "the adapter. Start it anew."
                )
        self.path.mkdir(parents=True, exist_ok=True)
        write_file({name: weight.to("cpu") for name, weight in weights}, self.path / ADAPTER)
        config = copy.copy(weights.config)
        config.inference_mode = True
        config.save_pretrained(str(self.path))
        where = {"lora_name": NAME, "lora_path": str(self.path), "load_inplace": True}
        everywhere(servers, "/v1/load_lora_adapter", where)
        everywhere(servers, "/update_weight_version", {"new_version": version})


def write_shards(weights: Weights, folder: Path) -> None:
    """Write `weights` to safetensors files of `SHARD_BYTES`, holding those of one file at a time."""
    shard: dict[str, torch.Tensor] = {}
    size = number = 0
    for name, weight in weights:
        if shard and size + weight.nbytes > SHARD_BYTES:
            write_file(shard, folder / f"model-{number:05d}.safetensors")
            shard, size, number = {}, 0, number + 1
        shard[name] = weight.to("cpu")
        size += weight.nbytes
    write_file(shard, folder / f"model-{number:05d}.safetensors")


def begin_update(servers: Sequence[Server]) -> None:
    """Let all `servers` wait for weights. One whose last sender ended in between, as a killed trainer does, takes no
    others before that is finished: whatever it has then, all weights follow.
    """
    with ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(_begin_update, servers))


def _begin_update(server: Server) -> None:
    try:
        server.call("/start_weight_update", {}, True)
    except Refused as error:
        if "already active" not in str(error):
            raise
        server.call("/finish_weight_update", {"weight_version": UNFINISHED}, True)
        server.call("/start_weight_update", {}, True)


def everywhere(servers: Sequence[Server], path: str, body: dict[str, Any] | list[dict[str, Any]]) -> None:
    """POST `body`, or each its own, to all `servers` at once."""
    bodies = body if isinstance(body, list) else [body] * len(servers)
    with meanwhile(servers, path, bodies):
        pass


@contextlib.contextmanager
def meanwhile(servers: Sequence[Server], path: str, bodies: list[dict[str, Any]]) -> Iterator[Callable[[], None]]:
    """POST each of `bodies`; the servers answer when what is done in the context is done.

    Yields a function that raises the error of a request that has already failed.
    """
    pool = ThreadPoolExecutor(len(servers))
    answers = [pool.submit(server.call, path, body, True) for server, body in zip(servers, bodies, strict=True)]

    def check() -> None:
        for answer in answers:
            if answer.done():
                answer.result()

    try:
        yield check
        for answer in answers:
            answer.result()
    finally:
        check()  # why a server gave up, rather than that it no longer listens
        pool.shutdown(wait=False)


def world_size(server: Server) -> int:
    """The workers of `server`: over tensor, pipeline and data parallelism."""
    return int(server.call("/get_world_size")["world_size"])


def version_of(server: Server) -> str:
    """Which weights `server` has: what the last sender called them, or ``default`` since it was started."""
    return str(server.call("/weight_info")["weight_version"])


def address_towards(url: str) -> str:
    """This machine's address as the server at `url` sees it: VLLM_HOST_IP, or that of the way there."""
    parts = urllib.parse.urlparse(url)
    return os.environ.get("VLLM_HOST_IP") or own_address(parts.hostname or "", parts.port or 80)
