"""A group of processes of several programs, over gloo and without `torch.distributed`'s own group.

The trainer's first process is rank 0 and holds the store at which the others find it. It needs no GPU and no vLLM: the
trainer (`transfer`) and the worker of a vLLM server (`vllm_plugin`) both use it.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class GlooGroup:
    """Processes that receive what rank 0 sends.

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
