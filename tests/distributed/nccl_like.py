"""Collectives with the manners of NCCL, computed by gloo.

    python tests/distributed/nccl_like.py SCRIPT ARGUMENTS    runs SCRIPT with them in place of gloo's

A collective returns at once. What comes after it and needs its result is queued behind it, as on a stream, and the
host goes on to where it next reads a number. There it waits without hearing signals, as within CUDA. A process that is
gone is not noticed: a collective that has not ended within the group's timeout ends this process by SIGABRT, with no
exception that Python could catch, as NCCL's watchdog does.

Tensors are those of the CPU, so that a run can be compared with that of gloo bit for bit. What nothing in the queue
touches is computed at once, and nothing else is reordered.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import runpy
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from posttrain.core.data import accelerator

aten = torch.ops.aten
NAME = "nccllike"
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
_INDEXES = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
#: Methods by which the host reads a tensor's memory without an operation.
_READERS = {
    getattr(torch.Tensor, name) for name in ("numpy", "tolist", "data_ptr", "__array__", "__reduce_ex__", "__dlpack__")
}


def _key(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():  # it is not the host that asks
        return tensor.untyped_storage()._cdata


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor)]


class Stream:
    """What is done one after the other in a thread, behind the host.

    Attributes:
        waits: how often the host waited for each kind of read.
        unknown: operations that the host had to wait for because their result's shape is not known before.
        behind: operations that were queued.
        reads_in_c: what is called now reads the results of collectives by no operation.
    """

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self.behind = 0
        self.reads_in_c = False
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._last_write: dict[int, int] = {}  # by storage: the number of what writes it
        self._last_use: dict[int, int] = {}
        self._begun = self._ended = 0
        self._error: BaseException | None = None
        self.collectives: dict[int, tuple[str, float, float]] = {}  # not ended: its name, since when, its timeout
        threading.Thread(target=self._work, name="stream", daemon=True).start()
        threading.Thread(target=self._watch, name="nccl watchdog", daemon=True).start()

    def add(
        self, work: Callable[[], Any], reads: list[torch.Tensor], writes: list[torch.Tensor], name: str = "",
        timeout: float = 0.0,
    ) -> None:  # fmt: skip
        """Queue `work`; a collective has a name and a timeout."""
        if self._ended == self._begun:
            self._last_write.clear(), self._last_use.clear()
        self._begun += 1
        if name:
            self.collectives[self._begun] = (name, time.monotonic(), timeout)
        self._last_use.update({_key(tensor): self._begun for tensor in (*reads, *writes)})
        self._last_write.update({_key(tensor): self._begun for tensor in writes})
        self._queue.put((self._begun, work, (reads, writes)))  # the tensors live until it is done

    def needs(self, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> bool:
        """Whether work on these tensors must come after something in the queue."""
        if self._ended == self._begun:
            return False
        is_later = any(self._last_write.get(_key(tensor), 0) > self._ended for tensor in reads)
        return is_later or any(self._last_use.get(_key(tensor), 0) > self._ended for tensor in writes)

    def wait(self, kind: str) -> None:
        """The host waits, in C++, for all that is queued."""
        self.waits[kind] += 1
        done: torch.futures.Future[None] = torch.futures.Future()
        self._queue.put((0, lambda: done.set_result(None), None))
        done.wait()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        versions = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView))
        with torch._C._AutoDispatchBelowAutograd(), versions:
            while True:
                number, work, kept = self._queue.get()
                try:
                    work()
                except BaseException as error:
                    self._error = self._error or error
                del work, kept
                if number:
                    self.collectives.pop(number, None)
                    self._ended = number

    def _watch(self) -> None:
        while True:
            time.sleep(0.1)
            for number, (name, since, timeout) in list(self.collectives.items()):
                if time.monotonic() - since > timeout:
                    words = f"Watchdog caught collective operation timeout: {name} number {number}, {timeout:g} s\n"
                    os.write(2, words.encode())
                    faulthandler.dump_traceback(all_threads=True)
                    os.abort()


class Behind(TorchDispatchMode):
    """Lets operations that need what is queued be queued as well."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if FakeTensor in types:
            return func(*args, **kwargs)
        if any(issubclass(kind, torch.Tensor) and kind is not torch.Tensor for kind in types):
            if not all(issubclass(kind, torch.nn.Parameter) for kind in types if kind is not torch.Tensor):
                return NotImplemented  # such as DTensor, whose parts come here again
        namespace = func._schema.name.partition("::")[0]
        if namespace in ("_c10d_functional", "fsdp", "c10d"):  # made of others
            with self:
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
        if func.is_view:
            return func(*args, **kwargs)
        written = [
            tensor
            for argument, value in self._arguments(func, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value)
        ]
        given = _tensors((args, kwargs))
        if not self.stream.needs(given, written):
            return func(*args, **kwargs)
        name = func._schema.name
        if self._must_be_read(func, args, kwargs):
            self.stream.wait(name)
            return func(*args, **kwargs)
        try:
            made = func(*tree_map(_without_values, args), **tree_map(_without_values, kwargs))
        except (NotImplementedError, RuntimeError):
            self.stream.unknown[name] += 1
            self.stream.wait(name)
            return func(*args, **kwargs)
        self.stream.behind += 1
        if func._schema.returns and all(
            r.alias_info is not None and r.alias_info.is_write for r in func._schema.returns
        ):
            self.stream.add(lambda: func(*args, **kwargs), given, written)
            return written[0] if len(func._schema.returns) == 1 else tuple(written)
        out = tree_map(_with_memory, made)
        results = _tensors(out)

        def compute() -> None:
            for result, found in zip(results, _tensors(func(*args, **kwargs)), strict=True):
                result.copy_(found)

        self.stream.add(compute, given, [*written, *results])
        return out

    def _must_be_read(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the result's shape or value is the host's to know, or its random numbers have their turn."""
        tags = set(func.tags) & _READS
        if func in _INDEXES:
            return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(args[1]))
        given = {argument.name: value for argument, value in self._arguments(func, args, kwargs)}
        if "dropout_p" in {argument.name for argument in func._schema.arguments} and not given.get("dropout_p"):
            tags.discard(torch.Tag.nondeterministic_seeded)
        return bool(tags)

    @staticmethod
    def _arguments(func: Any, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
        arguments = func._schema.arguments
        named = [(argument, kwargs[argument.name]) for argument in arguments if argument.name in kwargs]
        return [*zip(arguments, args, strict=False), *named]


def _without_values(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return torch.device("meta") if isinstance(value, torch.device) else value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _with_memory(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


class HostReads(TorchFunctionMode):
    """Lets the host wait where it reads memory without an operation."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _READERS and type(args[0]) in (torch.Tensor, torch.nn.Parameter):
            with torch._C.DisableTorchFunction():
                if self.stream.needs(list(args[:1]), list(args[:1])):
                    self.stream.wait(func.__name__)
        return func(*args, **(kwargs or {}))


def _ended_work(result: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


class NcclLike(dist.ProcessGroup):
    """Queues the collectives of a group of gloo."""

    def __init__(self, stream: Stream, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._stream, self._rank, self._size, self._seconds = stream, rank, size, timeout.total_seconds()
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(days=7))

    def _begin(self, name: str, reads: Any, writes: Any, begin: Callable[[], Any]) -> Any:
        def work() -> None:
            try:
                begin().wait()
            except RuntimeError:  # a process is gone: NCCL, inside a machine, waits for ever
                threading.Event().wait()

        self._stream.add(work, _tensors(reads), _tensors(writes), name, self._seconds)
        if self._stream.reads_in_c:
            self._stream.wait(name)
        return _ended_work(writes)

    def allreduce(self, tensors, opts):
        return self._begin("ALLREDUCE", tensors, tensors, lambda: self._gloo.allreduce(tensors, opts))

    def allreduce_coalesced(self, tensors, opts):
        return self._begin("ALLREDUCE", tensors, tensors, lambda: self._gloo.allreduce_coalesced(tensors, opts))

    def broadcast(self, tensors, opts):
        return self._begin("BROADCAST", tensors, tensors, lambda: self._gloo.broadcast(tensors, opts))

    def reduce(self, tensors, opts):
        return self._begin("REDUCE", tensors, tensors, lambda: self._gloo.reduce(tensors, opts))

    def allgather(self, outputs, inputs, opts):
        return self._begin("ALLGATHER", inputs, outputs, lambda: self._gloo.allgather(outputs, inputs, opts))

    def all_gather_single(self, output, source, opts):
        begin = lambda: self._gloo._allgather_base(output, source, opts)  # noqa: E731
        return self._begin("ALLGATHER", source, output, begin)

    def reduce_scatter_single(self, output, source, opts):
        begin = lambda: self._gloo._reduce_scatter_base(output, source, opts)  # noqa: E731
        return self._begin("REDUCE_SCATTER", source, output, begin)

    def all_gather_single_coalesced(self, outputs, sources, opts):
        works = [self.all_gather_single(*pair, opts) for pair in zip(outputs, sources, strict=True)]
        return works[-1]

    def reduce_scatter_single_coalesced(self, outputs, sources, opts):
        works = [self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, sources, strict=True)]
        return works[-1]

    def gather(self, outputs, inputs, opts):
        return self._begin("GATHER", inputs, outputs, lambda: self._gloo.gather(outputs, inputs, opts))

    def scatter(self, outputs, inputs, opts):
        return self._begin("SCATTER", inputs, outputs, lambda: self._gloo.scatter(outputs, inputs, opts))

    def all_to_all_single(self, output, source, output_sizes, sizes, opts):
        begin = lambda: self._gloo.alltoall_base(output, source, output_sizes, sizes, opts)  # noqa: E731
        return self._begin("ALLTOALL", source, output, begin)

    def alltoall(self, outputs, inputs, opts):
        return self._begin("ALLTOALL", inputs, outputs, lambda: self._gloo.alltoall(outputs, inputs, opts))

    def barrier(self, opts):
        work = self._begin("BARRIER", [], [], lambda: self._gloo.barrier(opts))
        self._stream.wait("barrier")
        return work

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def size(self):
        return self._size

    def rank(self):
        return self._rank

    def getBackendName(self):
        return NAME

    @property
    def group_name(self):
        return dist.distributed_c10d._world.pg_names[self]


def install() -> Stream:
    """From now on, this process has such collectives in place of gloo's."""
    stream = Stream()
    dist.Backend.register_backend(NAME, lambda *given: NcclLike(stream, *given), devices=["cpu"])
    init, free = dist.init_process_group, _fsdp_param.free_storage
    dist.init_process_group = lambda backend=None, **named: init(NAME, **named)

    def free_later(tensor: torch.Tensor) -> None:
        """The allocator of a GPU keeps memory until its stream is done with it."""
        if not stream.needs([tensor], [tensor]):
            free(tensor)

    _fsdp_param.free_storage = free_later
    verify = dist._verify_params_across_processes

    def verify_now(*given: Any) -> None:
        stream.reads_in_c = True
        verify(*given)
        stream.reads_in_c = False

    dist._verify_params_across_processes = verify_now

    def synchronize(device: torch.device) -> None:
        with accelerator.waiting():
            stream.wait("synchronize")

    accelerator.synchronize = synchronize
    Behind(stream).__enter__()
    HostReads(stream).__enter__()
    return stream


if __name__ == "__main__":
    install()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
