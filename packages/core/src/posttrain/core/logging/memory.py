"""Detects out-of-memory errors, halves batches and measures memory."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from posttrain.core.data import accelerator
from posttrain.core.data.pipeline import like
from posttrain.core.models.wrapping import local_part

#: Largest tensors that a report names.
MOST_NAMED = 6
# Messages of out-of-memory errors without their own class.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is an out-of-memory error of the host or a device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def free_memory() -> int:
    """Bytes of host memory available without swapping and within the container's limit."""
    import psutil

    free: int = psutil.virtual_memory().available
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # another version of cgroups, or no limit
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
    return free


@runtime_checkable
class CutsItself(Protocol):
    """A batch whose rows do not lie one below the other."""

    def halves(self) -> tuple[Any, Any]: ...


def halves(batch: Any) -> tuple[Any, Any]:
    """The first and second half of the rows of `batch`, with the same types; of one packed row, of its documents.
    `batch` is a tensor, or a mapping, list or tuple of tensors (numbers, strings and None are in both halves), or a
    batch that cuts itself. Raises a `ValueError` where it has one row that is not packed or has one document, or its
    values have different numbers of rows.
    """
    if isinstance(batch, CutsItself):
        return batch.halves()
    if any(isinstance(value, CutsItself) for value in (batch.values() if isinstance(batch, Mapping) else ())):
        raise ValueError("the batch holds images of prompts for several completions, and cannot be cut by rows")
    sizes = {name: len(value) for name, value in _columns(batch) if _has_rows(value)}
    if len(set(sizes.values())) != 1:
        found = ", ".join(f"{name} of {size} rows" for name, size in sizes.items()) or "no tensor"
        raise ValueError(f"the batch holds {found}, and cannot be cut by rows")
    [rows] = set(sizes.values())
    if rows < 2:
        return _between_documents(batch)
    middle = (rows + 1) // 2
    return _cut(batch, slice(0, middle)), _cut(batch, slice(middle, rows))


def _between_documents(batch: Any) -> tuple[Any, Any]:
    """The halves of a batch of one row, (1, N), which holds documents of ``seq_lengths`` tokens, (1, K)."""
    lengths = batch["seq_lengths"][0].tolist() if isinstance(batch, Mapping) and "seq_lengths" in batch else []
    lengths = lengths[: len(lengths) - next((i for i, length in enumerate(reversed(lengths)) if length), 0)]
    if len(lengths) < 2:
        raise ValueError("the batch has one row, and cannot be cut any more")
    ends = [sum(lengths[: k + 1]) for k in range(len(lengths))]
    count = min(range(1, len(lengths)), key=lambda k: abs(2 * ends[k - 1] - ends[-1]))  # documents of the first half
    width = batch["input_ids"].shape[1]
    sizes = [tuple(v.shape) if isinstance(v, torch.Tensor) else () for n, v in batch.items() if n != "seq_lengths"]
    if set(sizes) != {(1, width)}:
        raise ValueError(
            "the batch has one packed row, and more than tokens in it, and cannot be cut between documents"
        )

    def part(tokens: slice, documents: slice) -> Any:
        found = {n: v[:, documents if n == "seq_lengths" else tokens] for n, v in batch.items()}
        return found if type(batch) is dict else type(batch)(found)

    end = ends[count - 1]
    return part(slice(0, end), slice(0, count)), part(slice(end, ends[-1]), slice(count, len(lengths)))


def _columns(batch: Any, name: str = "") -> list[tuple[str, Any]]:
    if isinstance(batch, Mapping):
        return [pair for key, value in batch.items() for pair in _columns(value, f"{name}.{key}" if name else str(key))]
    if isinstance(batch, tuple) or (isinstance(batch, list) and any(isinstance(v, torch.Tensor) for v in batch)):
        return [pair for i, value in enumerate(batch) for pair in _columns(value, f"{name}[{i}]")]
    return [(name, batch)]


def _has_rows(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, torch.Tensor) and value.ndim > 0)


def _cut(batch: Any, rows: slice) -> Any:
    kind: Any = type(batch)
    if isinstance(batch, Mapping):
        cut = {name: _cut(value, rows) for name, value in batch.items()}
        return cut if kind is dict else kind(cut)
    if isinstance(batch, tuple) or (isinstance(batch, list) and any(isinstance(v, torch.Tensor) for v in batch)):
        return like(batch, [_cut(value, rows) for value in batch])
    return batch[rows] if _has_rows(batch) else batch


def advice(rows: int, accumulation: int) -> str:
    """What to set when a step of `accumulation` micro-batches of `rows` rows did not fit."""
    smaller = (
        f"per_device_train_batch_size={rows // 2} with gradient_accumulation_steps={accumulation * 2} (the same "
        "optimizer step), "
        if rows > 1
        else ""
    )
    found = "auto_find_batch_size=True to have that found, " if rows > 1 else ""
    return f"To fit into memory, set {smaller}{found}gradient_checkpointing=True, or shorter rows."


def live(model: Any, optimizer: Any, device: torch.device | str) -> dict[str, Any]:
    """What holds memory now: ``{"owners": {owner: bytes}, "largest": [{"owner", "name", "shape", "dtype", "bytes"}]}``.

    Owners are weights, gradients, optimizer state, other tensors that Python can reach, and the rest: what autograd
    keeps for the backward pass, caches and workspaces; without a CUDA device also Python and its libraries. Memory
    that several tensors share counts once, for the first owner.
    """
    parameters = list(model.named_parameters()) if model is not None else []
    state = optimizer.state if optimizer is not None else {}
    names = {id(parameter): name for name, parameter in parameters}
    found: dict[str, list[tuple[str, torch.Tensor]]] = {
        "weights": [*parameters, *(model.named_buffers() if model is not None else ())],
        "gradients": [(name, p.grad) for name, p in parameters if p.grad is not None],
        "optimizer state": [
            (f"{key} of {names.get(id(p), 'a parameter')}", value)
            for p, values in list(state.items())
            if isinstance(values, Mapping)
            for key, value in values.items()
            if isinstance(value, torch.Tensor)
        ],
        "other tensors": [("", value) for value in gc.get_objects() if issubclass(type(value), torch.Tensor)],
    }
    device, seen, largest = torch.device(device), set(), []
    owners = dict.fromkeys((*found, "the rest"), 0)
    for owner, tensors in found.items():
        for name, tensor in tensors:
            tensor = local_part(tensor)
            if tensor.device.type != device.type or tensor.layout != torch.strided:
                continue
            try:
                storage = tensor.untyped_storage()
                key = storage.data_ptr()
            except RuntimeError:  # of a tensor without memory, such as those that a compiler or vmap traces with
                continue
            if key in seen or not key:
                continue
            seen.add(key)
            owners[owner] += storage.nbytes()
            facts = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
            largest.append({"owner": owner, "name": name, **facts, "bytes": storage.nbytes()})
    total = torch.accelerator.memory_allocated(device) if accelerator.has_memory(device) else host_bytes()
    owners["the rest"] = max(total - sum(owners.values()), 0)
    return {"owners": owners, "largest": sorted(largest, key=lambda one: -one["bytes"])[:MOST_NAMED]}


def live_in_words(found: Mapping[str, Any]) -> str:
    """`live` as sentences."""
    owners = ", ".join(f"{owner} {_size(size)}" for owner, size in found["owners"].items() if size)
    named = [(f"{one['owner']} {one['name']}".strip(), one) for one in found["largest"]]
    largest = "; ".join(f"{n} {tuple(x['shape'])} in {x['dtype']}, {_size(x['bytes'])}" for n, x in named)
    return f"What held memory: {owners}. The largest tensors: {largest}."


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def host_bytes() -> int:
    """Current memory of this process in bytes."""
    import psutil

    return int(psutil.Process().memory_info().rss)


class MemoryTracker:
    """Measures the memory of a run's stages, with the names of transformers' Trainer.

    A stage within a stage counts as part of the outer one. The peak of the host is sampled a hundred times a second.

    Args:
        device: measured in addition to the host.
        on: whether to track at all.
    """

    def __init__(self, device: torch.device, on: bool) -> None:
        self.device, self.on, self._under_way = device, on, False
        self._of_init: dict[str, int] = {}
        self._stages, self._measured = contextlib.ExitStack(), dict[str, int]()

    def start(self) -> None:
        """Begin to measure, in an `evaluate`, `predict` or `train` that a script has rewritten."""
        caller = sys._getframe(1).f_code.co_name
        self._stages = contextlib.ExitStack()
        self._measured = self._stages.enter_context(
            self.stage({"evaluate": "eval", "predict": "test"}.get(caller, caller))
        )

    def stop_and_update_metrics(self, metrics: dict[str, Any] | None = None) -> None:
        """End what `start` began, and add what was measured to `metrics`."""
        self._stages.close()
        if metrics is not None:
            metrics.update(self._measured)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[dict[str, int]]:
        """A dict that holds, after the block, ``<name>_mem_cpu_alloc_delta`` and ``<name>_mem_cpu_peaked_delta`` in
        bytes, and ``_mem_gpu_`` likewise with a device. Empty for a nested stage.

        The first stage after ``init`` also reports the numbers of ``init``.
        """
        metrics: dict[str, int] = {}
        if not self.on or self._under_way:
            yield metrics
            return
        self._under_way, host, device = True, host_bytes(), self._allocated()
        if device is not None:
            torch.accelerator.reset_peak_memory_stats(self.device)
        sampler = _Peak()
        try:
            yield metrics
        finally:
            self._under_way, peak, now = False, sampler.stop(), host_bytes()
        found = {f"{name}_mem_cpu_alloc_delta": now - host, f"{name}_mem_cpu_peaked_delta": max(0, peak - now)}
        if device is not None and (after := self._allocated()) is not None:
            found[f"{name}_mem_gpu_alloc_delta"] = after - device
            peak = torch.accelerator.max_memory_allocated(self.device)
            found[f"{name}_mem_gpu_peaked_delta"] = max(0, peak - after)
        if name == "init":
            before = {"before_init_mem_cpu": host} | ({} if device is None else {"before_init_mem_gpu": device})
            self._of_init = before | found
        else:
            metrics |= self._of_init | found
            self._of_init = {}

    def _allocated(self) -> int | None:
        return torch.accelerator.memory_allocated(self.device) if accelerator.has_memory(self.device) else None


class _Peak:
    """The largest memory use of this process while it runs."""

    def __init__(self) -> None:
        self.peak, self._done = host_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._done.wait(0.01):
            self.peak = max(self.peak, host_bytes())

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return max(self.peak, host_bytes())
