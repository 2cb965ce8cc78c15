"""Offloads activations to host memory until the backward pass."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from posttrain.core.models.wrapping import base_model

logger = logging.getLogger(__name__)

#: Tensors of fewer bytes stay where they are: the call would cost more than they take.
MIN_BYTES = 4096
#: Concurrent copies to the host. More overlap more with the computation and need more memory.
IN_FLIGHT = 4


def offloading_problem(device: torch.device) -> str | None:
    """Why activations of `device` cannot be moved away, as a sentence; None if they can."""
    if device.type == "cpu":
        return "Activations are in host memory already, since the model is on the CPU."
    return "The device shares its memory with the host." if device.type == "mps" else None


def offloading(model: nn.Module, device: torch.device) -> OffloadActivations | None:
    """The offloader of `model`'s activations, except those of the output head; None with a log line if impossible."""
    if problem := offloading_problem(device):
        logger.info("activation_offloading=True has no effect: %s", problem)
        return None
    head = base_model(model).get_output_embeddings()
    return OffloadActivations(model, device, stays=[] if head is None else [head])


@contextlib.contextmanager
def with_offloading(context: contextlib.AbstractContextManager, offload: OffloadActivations) -> Iterator[None]:
    """Within `context`, and within `offload`."""
    with context, offload:
        yield


class OffloadActivations:
    """A context that keeps tensors saved for the backward pass on the host until needed; gradients stay identical.

    The object can be reused for the next micro-batch::

        offload = OffloadActivations(model, device)
        with offload:
            loss = model(**inputs).loss
        loss.backward()

    Parameters, small or overlapping tensors and those saved in `stays` are not moved. A tensor that is saved several
    times is moved once. On a GPU the copies use pinned memory and a separate stream, after the computation in the
    forward pass and one tensor ahead in the backward pass.

    Args:
        model: whose parameters stay.
        device: tensors of its type are moved.
        stays: modules whose activations stay, such as the output head, which the backward pass needs first.
        min_bytes: tensors of fewer bytes stay.
    """

    #: Types of the tensors that are moved.
    kinds: tuple[type, ...] = (torch.Tensor,)

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        stays: Iterable[nn.Module] = (),
        min_bytes: int = MIN_BYTES,
    ) -> None:
        self.model, self.device, self.stays, self.min_bytes = model, device, tuple(stays), min_bytes
        #: Bytes that were moved to the host since this object was made.
        self.moved = 0
        self._beside = torch.Stream(device) if device.type != "cpu" else None
        self._numbers = itertools.count()
        self._parameters: set[int] = set()
        self._under_way: deque[tuple[torch.Tensor, torch.Event]] = deque()
        self._kept: WeakValueDictionary[int, _Kept] = WeakValueDictionary()
        self._seen: dict[tuple[Any, ...], tuple[StorageWeakRef, ref[_Kept]]] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> OffloadActivations:
        kinds = (nn.Parameter, *self.kinds)
        self._parameters = {p.untyped_storage()._cdata for p in self.model.parameters() if type(p) in kinds}
        self._seen.clear()
        self._open.enter_context(saved_tensors_hooks(self._pack, self._unpack))
        for module in self.stays:
            self._open.enter_context(_left_alone(module))
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()
        self._settle(0)
        self._seen.clear()

    # ---- forward: to the host ----

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Kept:
        if not self._moves(tensor):
            return tensor
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version
        _, known = self._seen.get(key, (None, None))
        kept = None if known is None else known()
        if kept is None:
            kept = _Kept(next(self._numbers), tensor.stride(), self.to_host(tensor.detach()))
            self._kept[kept.number] = kept
            # The weak reference keeps the address from being given to another storage, so that equal keys are the same
            # one.
            self._seen[key] = StorageWeakRef(storage), ref(kept)
        return kept

    def _moves(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type != self.device.type or tensor.nbytes < self.min_bytes:
            return False
        if type(tensor) not in self.kinds or isinstance(tensor._base, nn.Parameter) or tensor.layout != torch.strided:
            return False  # a parameter, a view of one, or a kind of tensor that is not its storage alone
        laid_over = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
        return not laid_over and tensor.untyped_storage()._cdata not in self._parameters

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` in host memory."""
        self.moved += tensor.nbytes
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._beside is not None)
        if self._beside is None:
            return host.copy_(tensor)
        self._beside.wait_stream(torch.accelerator.current_stream(tensor.device))
        with self._beside:
            host.copy_(tensor, non_blocking=True)
        self._under_way.append((tensor, self._beside.record_event()))
        self._settle(IN_FLIGHT)
        return host

    def _settle(self, left: int) -> None:
        """Free copied tensors in the order of the computation, which can then reuse the memory."""
        while len(self._under_way) > left:
            tensor, copied = self._under_way.popleft()
            torch.accelerator.current_stream(tensor.device).wait_event(copied)

    # ---- backward: to the device ----

    def _unpack(self, kept: torch.Tensor | _Kept) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        if self._beside is None:
            tensor = self.to_device(kept.host)
        else:
            tensor, fetched = self._fetch(kept, self._beside)
            if (before := self._kept.get(kept.number - 1)) is not None:
                self._fetch(before, self._beside)
            torch.accelerator.current_stream(self.device).wait_event(fetched)
        if tensor.stride() != kept.stride:
            tensor = tensor.new_empty_strided(tensor.shape, kept.stride).copy_(tensor)
        return tensor

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """What `to_host` gave, where the device is the host."""
        return host

    def _fetch(self, kept: _Kept, beside: torch.Stream) -> tuple[torch.Tensor, torch.Event]:
        if kept.fetched is None:
            tensor = torch.empty_like(kept.host, device=self.device)
            beside.wait_stream(torch.accelerator.current_stream(self.device))  # which may still read that memory
            with beside:
                tensor.copy_(kept.host, non_blocking=True)
            tensor.record_stream(beside)  # it may be dropped unread
            kept.fetched = tensor, beside.record_event()
        return kept.fetched


class _Kept:
    """One tensor in host memory; while the backward pass needs it also on the device, with the end of that copy."""

    __slots__ = ("__weakref__", "fetched", "host", "number", "stride")

    def __init__(self, number: int, stride: tuple[int, ...], host: torch.Tensor) -> None:
        self.number, self.stride, self.host = number, stride, host
        self.fetched: tuple[torch.Tensor, torch.Event] | None = None


@contextlib.contextmanager
def _left_alone(module: nn.Module) -> Iterator[None]:
    """What `module` saves stays where it is."""
    entered: list[saved_tensors_hooks] = []

    def enter(*_: Any) -> None:
        entered.append(saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
        entered[-1].__enter__()

    def leave(*_: Any) -> None:
        entered.pop().__exit__()

    with module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True):
        yield
