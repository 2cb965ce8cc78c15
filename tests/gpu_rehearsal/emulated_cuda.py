"""A CUDA device that is emulated in host memory: real values, the placement rules and the waits of a GPU.

    with EmulatedCuda() as gpu:
        x = torch.ones(3).to("cuda")
        x.sum().item()
    gpu.waits                       # [Wait(kind="read a scalar", place="tests/x.py:3", ...)]

Tensors on it are `CudaTensor`: they say ``device="cuda:0"`` and keep their values in a CPU tensor. So a whole run,
with what it does by values, can be compared with that of the CPU. An operation over tensors of both devices raises
`PlacementError` where CUDA would raise. So does one in a thread that has not set its device: it begins on the first of
the machine, which may be another process's. Each wait of the host for the device is recorded with its place, by the
rules of ``torch.cuda.set_sync_debug_mode``. Work that no stream, event or wait orders raises `order.OrderError`.
Kernels are those of the CPU: nothing here shows speed or rounding.

`torch._subclasses.FakeTensorMode` is no substitute: it has no values, and its backward pass needs a build with CUDA.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from posttrain.core.checkpoint import codec
from posttrain.core.models import rms_norm
from posttrain.lm.attention import activation_offloading, varlen_attention
from tests.gpu_rehearsal.order import Order, OrderError

aten = torch.ops.aten
DEVICES, CPU = {kind: torch.device(kind, 0) for kind in ("cuda", "xpu")}, torch.device("cpu")
REPOSITORY = Path(__file__).parents[2]


class PlacementError(RuntimeError):
    """An operation met tensors of the host and of the device."""


@dataclass(frozen=True)
class Wait:
    """One wait of the host for the device.

    Attributes:
        kind: what was done. place: the innermost line of code outside torch. phase: what `EmulatedCuda.phase` was.
        stack: the lines of code outside torch that led there, innermost first.
    """

    kind: str
    place: str
    phase: str
    stack: tuple[str, ...]


class CudaTensor(torch.Tensor):
    """A tensor on the emulated device. `host` holds its values."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> CudaTensor:
        # The device in C++ stays the CPU, because autograd knows no CUDA device in a build without CUDA.
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype, device=CPU,
            layout=host.layout,
        )  # fmt: skip
        tensor.host = host
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: DEVICES[_active.kind] if _active else DEVICES["cuda"])
    is_cuda = property(lambda self: self.device.type == "cuda")
    is_xpu = property(lambda self: self.device.type == "xpu")
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return 0

    def record_stream(self, stream: Any) -> None:
        _active.order.keep(_key(self), stream)

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)
        if isinstance(value, CudaTensor):
            self.host = value.host

    def __repr__(self, **kwargs: Any) -> str:
        return f"CudaTensor({self.host!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> CudaTensor:
        if id(self) not in memo:
            copy = self.detach().clone()
            copy.__dict__.update({name: value for name, value in self.__dict__.items() if name != "host"})
            memo[id(self)] = copy.requires_grad_(self.requires_grad)
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if _active is None:
            raise RuntimeError("An emulated CUDA tensor was used outside EmulatedCuda.")
        return _active.run(func, args, kwargs or {})


_active: EmulatedCuda | None = None

#: Operations whose result's size depends on values, or that hand values to the host.
_WAITS = {
    "aten::_local_scalar_dense": "read a scalar",
    "aten::is_nonzero": "read a scalar",
    "aten::equal": "compare whole tensors",
    "aten::nonzero": "count what is not zero",
    "aten::masked_select": "count what is not zero",
    "aten::_unique": "count distinct values",
    "aten::_unique2": "count distinct values",
    "aten::unique_dim": "count distinct values",
    "aten::unique_consecutive": "count distinct values",
    "aten::unique_dim_consecutive": "count distinct values",
    "aten::bincount": "read the largest value",
    "aten::histc": "read the largest value",
}
#: Operations that take an index or a value from the host beside tensors of the device.
_TAKE_HOST = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
_VIEWS = {"aten::detach", "aten::alias", "aten::lift_fresh"}
#: Those that look at the shape of what they are given alone.
_LIKE = {f"aten::{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn")}
_LIKE |= {f"aten::new_{name}" for name in ("empty", "empty_strided", "zeros", "ones", "full")}
_COPIES = {"aten::_to_copy", "aten::copy_", "aten::copy", "aten::clone"}


def _is_bool_index(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


class EmulatedCuda(TorchDispatchMode):
    """Within it, ``device="cuda"`` is the emulated device, and torch says that one is there.

    Args:
        kind: "xpu": the device has this name, and there is no CUDA.

    Attributes:
        waits: each `Wait` so far.
        phase: what the host does now; anything. Copied into each wait.
        operations: how often each operation ran on the device, views left out.
        flops: floating-point operations of kernels that `ran` was told of.
        live, peak: bytes of the device that are in use, and the most that were.
        largest, largest_on_host: bytes of the largest tensor that was made, there and on the CPU.
    """

    def __init__(self, kind: str = "cuda") -> None:
        super().__init__()
        self.kind = kind
        self.waits: list[Wait] = []
        self.phase = ""
        self.operations: Counter[str] = Counter()
        self.order = Order(self.wait)
        self._pinned: set[int] = set()
        self.dispatched = self.live = self.peak = self.largest = self.largest_on_host = 0
        self.flops = 0
        self._known: set[int] = set()
        self._local = threading.local()  # of each thread, for copies of others run meanwhile
        self.set_device()
        self._around = contextlib.ExitStack()

    def __enter__(self) -> EmulatedCuda:
        global _active
        if _active is not None:
            raise RuntimeError("One emulated device is active already.")
        _active = self
        self._around.enter_context(_a_device_in_torch(self))
        self._around.enter_context(self._callers)
        return super().__enter__()

    @property
    def _callers(self) -> _Callers:
        """Of this thread."""
        if not hasattr(self._local, "callers"):
            self._local.callers = _Callers()
        return self._local.callers

    def set_device(self, device: Any = None) -> None:
        """Of this thread."""
        self._local.has_device = True

    def runs(self, thread: threading.Thread, _original: Any = threading.Thread.run) -> None:
        """A thread, for which torch's modes are those that it enters itself."""
        with self._callers:
            TorchDispatchMode.__enter__(self)
            try:
                _original(thread)
            finally:
                TorchDispatchMode.__exit__(self, None, None, None)

    def __exit__(self, *error: Any) -> None:
        global _active
        super().__exit__(*error)
        self._around.close()
        _active = None
        if self.order.late and error[0] is None:
            raise OrderError("\n".join(self.order.late))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its parts come here
        return self.run(func, args, kwargs or {})

    @contextlib.contextmanager
    def to_host(self) -> Iterator[None]:
        """Within it, a copy to the CPU is meant, and not one that C++ takes for one to where the tensor is."""
        before, self._local.to_host = getattr(self._local, "to_host", False), True
        try:
            yield
        finally:
            self._local.to_host = before

    # ------------------------------------------------------------------------------------------------ waits

    def wait(self, kind: str) -> None:
        """Record one."""
        stack, frame = [], sys._getframe(1)
        while frame is not None:
            path = frame.f_code.co_filename
            if path != __file__ and "/torch/" not in path and not path.startswith("<"):
                stack.append(f"{_short(path)}:{frame.f_lineno} {frame.f_code.co_name}")
            frame = frame.f_back
        self.waits.append(Wait(kind, stack[0] if stack else "?", self.phase, tuple(stack[:12])))

    # ------------------------------------------------------------------------------------------------ operations

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = [tensor for tensor in tensors if isinstance(tensor, CudaTensor)]
        asked = kwargs.get("device")
        pinned, waits = bool(kwargs.get("pin_memory")), len(self.waits)
        if pinned:
            if asked is not None and torch.device(asked).type == self.kind:
                raise PlacementError(f"{name}: only tensors of the host can be pinned")
            kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        if asked is None and not on_device:
            return self._computed_on_host(func, args, kwargs, func(*args, **kwargs), pinned)
        if asked is None or torch.device(asked).type == self.kind:
            to_device = True
        elif torch.device(asked).type != "cpu":
            to_device = False
        elif name == "aten::_to_copy":
            to_device = bool(on_device) and not getattr(self._local, "to_host", False)
        else:  # C++ asks for the device of its arguments, which it takes for the CPU
            to_device = self._callers.on_device
        if name in ("aten::_to_copy", "aten::copy_", "aten::copy"):
            self._copies(name, args, kwargs, to_device)
        elif on_device:
            self._check(func, name, args, tensors)
        if (to_device or on_device) and not func.is_view and name not in _VIEWS | _COPIES:
            if not hasattr(self._local, "has_device"):
                raise PlacementError(f"{name}: thread {threading.current_thread().name} has not set its device")
        if asked is not None and to_device:
            kwargs = kwargs | {"device": CPU}
        if kwargs.get("generator") is not None and to_device and kwargs["generator"] is not self.generator:
            raise PlacementError(f"{name}: expected a '{self.kind}' device type for generator but found 'cpu'")
        if name in _WAITS and on_device:
            self.wait(_WAITS[name])
        inner_args, inner_kwargs = tree_map(_host, args), tree_map(_host, kwargs)
        out = func(*inner_args, **inner_kwargs)
        self._ordered(func, args, kwargs, tensors, out, to_device)
        if len(self.waits) > waits:
            self.order.host_waits()
        self.dispatched += bool(to_device or on_device)
        if name == "aten::copy_" and not isinstance(args[0], CudaTensor):
            return args[0]
        if not to_device or name == "aten::_local_scalar_dense":
            return self._computed_on_host(func, (), {}, out, pinned)
        if not func.is_view and name not in _VIEWS:
            self.operations[name] += 1
        wrapped = {id(_host(tensor)): tensor for tensor in on_device}
        return tree_map(lambda leaf: self._wrap(leaf, wrapped), out)

    def ran(self, name: str, flops: float) -> None:
        """A kernel that is no operation of torch's was run."""
        self.operations[name] += 1
        self.dispatched += 1
        self.flops += int(flops)

    def _wrap(self, value: Any, known: dict[int, CudaTensor]) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in known:  # an operation in place returns what it was given
            return known[id(value)]
        storage = value.untyped_storage()
        if storage._cdata not in self._known:
            size = storage.nbytes()
            self._known.add(storage._cdata)
            self.live += size
            self.peak, self.largest = max(self.peak, self.live), max(self.largest, size)
            weakref.finalize(storage, self._free, storage._cdata, size)
        return CudaTensor(value)

    def _computed_on_host(self, func: Any, args: Any, kwargs: Any, out: Any, pinned: bool) -> Any:
        read = (leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor))
        if not func.is_view and func._schema.name not in _VIEWS | _LIKE:
            self.order.on_host(func._schema.name, map(_key, read), map(_key, _written(func, args, kwargs)))
        if isinstance(out, torch.Tensor):
            self.largest_on_host = max(self.largest_on_host, out.untyped_storage().nbytes())
            if pinned:
                self.pin(out)
        return out

    def pin(self, tensor: torch.Tensor) -> None:
        """Let the memory of a tensor of the host be pinned."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._pinned:
            self._pinned.add(storage._cdata)
            weakref.finalize(storage, self._pinned.discard, storage._cdata)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return _key(tensor) in self._pinned

    def _ordered(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], out: Any, there: bool) -> None:
        """Tell `order` what an operation of the device reads and writes."""
        name = func._schema.name
        if func.is_view or name in _VIEWS:
            return
        changed = {id(tensor) for tensor in _written(func, args, kwargs)}
        tensors = [] if name in _LIKE else tensors
        ours = [tensor for tensor in tensors if isinstance(tensor, CudaTensor)]
        if not there and not ours:  # the host makes a tensor
            return
        hosts = [tensor for tensor in tensors if not isinstance(tensor, CudaTensor)]
        later = kwargs.get("non_blocking", args[2] if name == "aten::copy_" and len(args) > 2 else False)
        made = [tensor for tensor in tree_iter(out) if isinstance(tensor, torch.Tensor)]
        given = {_key(tensor) for tensor in tensors}
        fresh = [_key(tensor) for tensor in made if _key(tensor) not in given]
        copied = [tensor for tensor in hosts if id(tensor) not in changed]
        read_later = {_key(tensor) for tensor in copied if later and _key(tensor) in self._pinned}
        self.order.on_host(name, {_key(tensor) for tensor in copied} - read_later, ())
        landing = [tensor for tensor in hosts if id(tensor) in changed] + ([] if there else made)
        for tensor in (*landing, *copied):
            storage = tensor.untyped_storage()
            weakref.finalize(storage, self.order.freed_on_host, storage._cdata)
        self.order.work(
            name,
            [_key(tensor) for tensor in ours if name != "aten::copy_" or id(tensor) not in changed],
            [*(_key(tensor) for tensor in ours if id(tensor) in changed), *(fresh if there else ())],
            read_later,
            map(_key, landing),
        )

    def _free(self, key: int, size: int) -> None:
        self.order.freed(key)
        self._known.discard(key)
        self.live -= size

    def _copies(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], to_device: bool) -> None:
        if name == "aten::_to_copy":
            source, here, later = args[0], to_device, kwargs.get("non_blocking", False)
            here = isinstance(source, CudaTensor) if kwargs.get("device") is None else here
        else:
            here, source = isinstance(args[0], CudaTensor), args[1]
            later = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            later = later and (here or _key(args[0]) in self._pinned)  # CUDA copies into other memory while it waits
        if here != isinstance(source, CudaTensor) and not later:
            self.wait("copy to the device" if here else "copy to the host")

    def _check(self, func: Any, name: str, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> None:
        hosts = [tensor for tensor in tensors if not isinstance(tensor, CudaTensor)]
        if name in _TAKE_HOST:
            indices, masks = args[1], [index for index in args[1] if _is_bool_index(index)]
            value = args[2] if len(args) > 2 else None
            fills = (
                value is not None
                and value.numel() == 1
                and len(masks) == len([i for i in indices if i is not None]) == 1
            )
            if any(isinstance(mask, CudaTensor) for mask in masks) and not fills:
                self.wait("count what is not zero")
            if not isinstance(args[0], CudaTensor):
                raise PlacementError(f"{name}: indices should be on the CPU, as the indexed tensor is")
            if value is not None and not isinstance(value, CudaTensor) and value.ndim:
                raise PlacementError(f"{name}: the values are on the CPU, and what they go into on the device")
            if any(index is not None and not isinstance(index, CudaTensor) for index in indices):
                self.wait("copy to the device")
            return
        if any(tensor.ndim for tensor in hosts):
            shapes = ", ".join(f"{tuple(t.shape)} on {t.device.type}" for t in tensors)
            raise PlacementError(f"{name}: expected all tensors to be on the same device, but found {shapes}")
        if hosts and torch.Tag.pointwise not in func.tags and not name.startswith("aten::_foreach"):
            if name not in ("aten::fill_", "aten::masked_fill", "aten::masked_fill_", "aten::where"):
                raise PlacementError(f"{name}: a number of the CPU is taken by operations on single elements alone")
        if name == "aten::repeat_interleave" and _output_size(func, args) is None:
            self.wait("sum up sizes")

    @property
    def generator(self) -> torch.Generator:
        return torch.default_generator


def _output_size(func: Any, args: tuple[Any, ...]) -> Any:
    return args[-1] if len(args) > 1 and isinstance(args[-1], int) else None


def _host(value: Any) -> Any:
    return value.host if isinstance(value, CudaTensor) else value


def _key(tensor: torch.Tensor) -> int:
    """Of the memory of a tensor."""
    return _host(tensor).untyped_storage()._cdata


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that an operation changes."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor))


def _short(path: str) -> str:
    for root, put in ((str(REPOSITORY) + "/", ""), (".../site-packages/", "")):
        if path.startswith(root) and "site-packages" not in path:
            return put + path.removeprefix(root)
    return path.split("site-packages/")[-1]


class _Callers(TorchFunctionMode):
    """Notes on which device the arguments of the Python call are that runs now, and answers for C++."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = [False]

    @property
    def on_device(self) -> bool:
        return self.stack[-1]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _ANSWERS:
            with self:
                return _ANSWERS[func](*args, **kwargs)
        asked = kwargs.get("device")
        if asked is not None:
            device = torch.device(asked).type == _active.kind if not isinstance(asked, int) else True
        else:
            device = any(isinstance(leaf, CudaTensor) for leaf in tree_iter((args, kwargs)))
        self.stack.append(device)
        try:
            if func in _BACKWARD:  # in which Python runs: layers recomputed, functions with their own backward
                with self:
                    return _BACKWARD[func](*args, **kwargs)
            return func(*args, **kwargs)
        finally:
            self.stack.pop()


def _hooks(hooks: Any, pack: Any, unpack: Any, _original=torch.autograd.graph.saved_tensors_hooks.__init__) -> None:
    """What a forward pass saves is packed within a call of C++, in which Python runs."""

    def packed(tensor: torch.Tensor) -> Any:
        with _active._callers:
            return pack(tensor)

    _original(hooks, packed, unpack)


def _backward(tensor, gradient=None, retain_graph=None, create_graph=False, inputs=None):
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _backward_of_several(
    tensors, grad_tensors=None, retain_graph=None, create_graph=False, grad_variables=None, inputs=None
):
    tensors = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    gradients = torch.autograd._tensor_or_tensors_to_tuple(grad_tensors, len(tensors))
    gradients = torch.autograd._make_grads(tensors, gradients, is_grads_batched=False)
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs or ())
    keep = create_graph if retain_graph is None else retain_graph
    torch.autograd.graph._engine_run_backward(
        tensors, gradients, keep, create_graph, inputs, allow_unreachable=True, accumulate_grad=True
    )


_BACKWARD = {torch.Tensor.backward: _backward, torch.autograd.backward: _backward_of_several}


def _to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    device, dtype, later, _ = (
        torch._C._nn._parse_to(
            *args, **{name: value for name, value in kwargs.items() if name not in ("copy", "other")}
        )
        if not (args and isinstance(args[0], torch.Tensor))
        else (args[0].device, args[0].dtype, False, None)
    )
    if "other" in kwargs:
        device, dtype = kwargs["other"].device, kwargs["other"].dtype
    device = self.device if device is None else torch.device(device)
    if device.type == _active.kind:
        device = DEVICES[_active.kind]
    dtype = dtype or self.dtype
    if device == self.device and dtype == self.dtype and not kwargs.get("copy"):
        return self
    options = {"memory_format": kwargs["memory_format"]} if kwargs.get("memory_format") is not None else {}
    if device.type == _active.kind or not isinstance(self, CudaTensor):
        return aten._to_copy(self, dtype=dtype, device=device, non_blocking=bool(later), **options)
    with _active.to_host():
        return aten._to_copy(self, dtype=dtype, device=device, non_blocking=bool(later), **options)


def _cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> torch.Tensor:
    return _to(self, DEVICES[_active.kind], non_blocking=non_blocking)


def _cpu(self: torch.Tensor, **_: Any) -> torch.Tensor:
    return _to(self, CPU)


def _numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if isinstance(self, CudaTensor):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
    _active.order.on_host("numpy", [_key(self)], ())
    with torch._C.DisableTorchFunction():
        return torch.Tensor.numpy(self, *args, **kwargs)


def _tolist(self: torch.Tensor) -> Any:
    if isinstance(self, CudaTensor):
        _active.wait("copy to the host")
        _active.order.work("tolist", [_key(self)], ())
        _active.order.host_waits()
        self = self.host
    _active.order.on_host("tolist", [_key(self)], ())
    with torch._C.DisableTorchFunction():
        return torch.Tensor.tolist(self)


def _tensor(data: Any, *, dtype=None, device=None, requires_grad=False, pin_memory=False) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        made = torch.tensor(data, dtype=dtype, pin_memory=pin_memory)
    device = CPU if device is None else torch.device(device) if not isinstance(device, int) else DEVICES[_active.kind]
    return _to(made, device).requires_grad_(requires_grad)


def _as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    if isinstance(data, torch.Tensor):
        return _to(data, device or data.device, dtype or data.dtype)
    return _tensor(data, dtype=dtype, device=device)


def _pinned(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    _active.pin(self)
    return self


def _is_pinned(self: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    return _active.is_pinned(self)


def _parse_to(*args, _original=torch._C._nn._parse_to, **kwargs):
    """Of ``module.to(0)``: a number is that of a GPU."""
    with torch._C.DisableTorchFunction():
        return _original(*(torch.device(_active.kind, one) if type(one) is int else one for one in args), **kwargs)


_ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.to: _to,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.cpu: _cpu,
    torch.Tensor.numpy: _numpy,
    torch.Tensor.tolist: _tolist,
    torch.tensor: _tensor,
    torch.as_tensor: _as_tensor,
    torch.Tensor.pin_memory: _pinned,
    torch.Tensor.is_pinned: _is_pinned,
    torch._C._nn._parse_to: _parse_to,
}


for _function, _answer in _ANSWERS.items():  # threads have no function mode
    if hasattr(torch.Tensor, _function.__name__):
        setattr(CudaTensor, _function.__name__, _answer)


# ------------------------------------------------------------------------------------------------ what torch says of it


def _grouped(lists: list[list[Any]], *args: Any, _original=torch._C._group_tensors_by_device_and_dtype) -> Any:
    """By device and type, where C++ sees one device."""
    kinds = {isinstance(tensor, CudaTensor) for tensor in lists[0]}
    if len(kinds) > 1:
        raise PlacementError("Some tensors of a list are on the device, and some on the CPU")
    found = _original(lists, *args)
    return {(DEVICES[_active.kind], dtype): value for (_, dtype), value in found.items()} if kinds == {True} else found


def _autocast(method: Callable[..., Any]) -> Callable[..., Any]:
    """Of autocast for CUDA: C++ takes the tensors for those of the CPU, so autocast for these goes along."""

    def both(self: torch.autocast, *args: Any) -> Any:
        if self.device == _active.kind and method.__name__ == "__enter__":
            self.beside = torch.autocast("cpu", self.fast_dtype, self._enabled, self._cache_enabled)
            method(self.beside)
        elif self.device == _active.kind:
            method(self.beside, *args)
        return method(self, *args)

    return both


class _OneKernel(torch.autograd.Function):
    """A function of host tensors that the device runs as one operation, in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx, name, function, pairs, *tensors):
        ctx.kept, ctx.name, ctx.pairs = [tensor.host.detach().requires_grad_() for tensor in tensors], name, pairs
        with torch.enable_grad():
            ctx.out = function(*ctx.kept)
        _active.ran(name, 2.0 * pairs)
        _active.order.work(name, map(_key, tensors), [])
        return _active._wrap(ctx.out.detach().contiguous(), {})

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            found = torch.autograd.grad(ctx.out, ctx.kept, gradient.host)
        _active.ran(f"{ctx.name}_backward", 5.0 * ctx.pairs)
        return None, None, None, *(_active._wrap(part.contiguous(), {}) for part in found)


def _flex(query, key, value, block_mask=None, score_mod=None, scale=None, enable_gqa=False, kernel_options=None):
    """What flex attention computes, from the rule alone, for rows that are short."""
    if min(query.shape[3], value.shape[3]) < 16 or (query.shape[2] < 128 and not kernel_options):
        raise NotImplementedError(
            "flex attention has no kernel for heads that small, or chooses none for a row that short"
        )
    places = torch.arange(query.shape[2], device=query.device)
    counted = _active.dispatched
    seen = block_mask.mask_mod(None, None, places[:, None], places[None, :]).host
    _active.dispatched = counted
    pairs = int(seen.sum()) * query.shape[1] * (query.shape[3] + value.shape[3])

    def attend(query, key, value):
        if enable_gqa:
            key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], 1) for t in (key, value))
        scores = torch.matmul(query, key.transpose(2, 3)).float() * scale
        if score_mod is not None:
            rule = score_mod.__code__, score_mod.__globals__, "rule", None
            held = tuple(types.CellType(_host(cell.cell_contents)) for cell in score_mod.__closure__)
            scores = types.FunctionType(*rule, held)(scores, None, None, None, None)
        return torch.matmul(scores.masked_fill(~seen, -torch.inf).softmax(-1).to(value.dtype), value)

    return _OneKernel.apply("attention", attend, pairs, query, key, value)


def _varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """What torch's kernel for documents of different lengths computes; it takes 16 bits alone."""
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"torch's varlen_attn takes no {query.dtype}")
    bounds, (left, right) = cu_seq_q.host.tolist(), window_size
    lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
    if cu_seq_k is not cu_seq_q or right != 0 or not max_q == max_k == max(lengths):
        raise ValueError("not causal attention of documents to themselves")
    pairs = sum(length * (length + 1) // 2 for length in lengths) * query.shape[1] * (query.shape[2] + value.shape[2])

    def attend(query, key, value):
        done = []
        for start, stop in itertools.pairwise(bounds):
            parts = (tensor[start:stop].transpose(0, 1) for tensor in (query, key, value))
            distance = torch.arange(stop - start)
            distance = distance[:, None] - distance
            seen = (distance >= 0) & (distance <= (stop - start if left < 0 else left))
            out = F.scaled_dot_product_attention(*parts, seen, scale=scale, enable_gqa=enable_gqa)
            done.append(out.transpose(0, 1))
        return torch.cat(done)

    return _OneKernel.apply("attention", attend, pairs, query, key, value)


def _rms_norm(x, normalized_shape, weight=None, eps=None, _original=F.rms_norm):
    """What is one kernel on a GPU and several on the CPU."""
    if not isinstance(x, CudaTensor):
        return _original(x, normalized_shape, weight, eps)
    tensors = (x,) if weight is None else (x, weight)
    return _OneKernel.apply("rms_norm", lambda x, weight=None: _original(x, normalized_shape, weight, eps), 0, *tensors)


def _norm_kernel(x, shape, weight, eps, _original=rms_norm.KERNEL):
    return (_rms_norm(x, shape, weight, eps), None) if isinstance(x, CudaTensor) else _original(x, shape, weight, eps)


def _captured(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], Any], torch.Tensor]:
    """A graph that does the work again; tests/rl/generation/test_step_graph.py has the addresses."""
    counts = _active.dispatched, _active.flops
    result = work()
    _active.dispatched, _active.flops = counts  # a capture launches nothing
    return lambda: result.copy_(work()), result


def _encode(encoder: Any, value: Any, where: str, path: tuple[Any, ...], _original=codec._Encoder.encode) -> Any:
    """What a checkpoint does with a tensor, for it takes no subclass."""
    return (
        encoder._tensor(value, where, path) if isinstance(value, CudaTensor) else _original(encoder, value, where, path)
    )


def _set_data(tensor: torch.Tensor, value: torch.Tensor, _data: Any = torch._C.TensorBase.data) -> None:
    """``tensor.data = value``, which may bring a tensor of the host to the device, and back."""
    if isinstance(tensor, CudaTensor) == isinstance(value, CudaTensor):
        return _data.__set__(tensor, value)
    with torch.no_grad():  # which would hold the tensor once more
        moved = value.detach().requires_grad_(tensor.requires_grad)
        moved = torch.nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else moved
    torch.utils.swap_tensors(tensor, moved)


def _forget_device() -> None:
    """accelerate looks for a device once in a process."""
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState, PartialState
        from accelerate.utils import is_xpu_available

        is_xpu_available.cache_clear()
        AcceleratorState._reset_state()
        PartialState._reset_state()


@contextlib.contextmanager
def _a_device_in_torch(gpu: EmulatedCuda) -> Iterator[None]:
    properties = mock.Mock(total_memory=2**36, major=9, minor=0, multi_processor_count=132, uuid="emulated")
    properties.name = "Emulated"
    cuda = {
        "_lazy_init": lambda: None, "is_available": lambda: True, "is_initialized": lambda: True,
        "device_count": lambda: 1, "current_device": lambda: 0, "set_device": gpu.set_device,
        "is_bf16_supported": lambda *a, **k: True,
        "get_device_name": lambda *a: "Emulated", "get_device_capability": lambda *a: (9, 0),
        "get_device_properties": lambda *a: properties, "max_memory_allocated": lambda *a: gpu.peak,
        "memory_allocated": lambda *a: gpu.live, "reset_peak_memory_stats": lambda *a: None,
        "mem_get_info": lambda *a: (2**36, 2**36), "empty_cache": lambda: None, "memory_stats": lambda *a: {},
        "synchronize": lambda *a: gpu.order.synchronize(), "Event": gpu.order.Event, "Stream": gpu.order.Stream,
        "current_stream": lambda *a: gpu.order.current, "default_stream": lambda *a: gpu.order.default,
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "get_rng_state_all": lambda: [torch.get_rng_state()], "set_rng_state": lambda *a: None,
        "get_rng_state": lambda *a: torch.get_rng_state(), "manual_seed_all": lambda seed: None,
        "manual_seed": lambda seed: None, "set_rng_state_all": lambda states: None,
        "device": lambda d: contextlib.nullcontext(), "is_current_stream_capturing": lambda: False,
    }  # fmt: skip
    accelerator = {
        "is_available": lambda: True, "device_count": lambda: 1,
        "current_accelerator": lambda *a, **k: DEVICES[gpu.kind],
        "reset_peak_memory_stats": lambda *a: None, "set_device_index": gpu.set_device,
        "synchronize": lambda *a: gpu.order.synchronize(), "empty_cache": lambda: None,
        "memory_allocated": lambda *a: gpu.live, "max_memory_allocated": lambda *a: gpu.peak,
        "current_stream": lambda *a: gpu.order.current, "current_device_index": lambda: 0,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        module = torch.get_device_module(gpu.kind)
        for name, value in cuda.items():
            stack.enter_context(mock.patch.object(module, name, value, create=gpu.kind != "cuda"))
        for name, value in accelerator.items():
            if hasattr(torch.accelerator, name):
                stack.enter_context(mock.patch.object(torch.accelerator, name, value))
        stack.enter_context(mock.patch.object(threading.Thread, "run", lambda thread: gpu.runs(thread)))
        stack.enter_context(mock.patch.object(torch, "Event", gpu.order.Event))
        stack.enter_context(mock.patch.object(torch, "Stream", gpu.order.Stream))
        stack.enter_context(mock.patch.object(torch._C, "_group_tensors_by_device_and_dtype", _grouped))
        for method in (torch.autocast.__enter__, torch.autocast.__exit__):
            stack.enter_context(mock.patch.object(torch.autocast, method.__name__, _autocast(method)))
        data = property(torch._C.TensorBase.data.__get__, _set_data)
        stack.enter_context(mock.patch.object(torch.Tensor, "data", data))
        stack.enter_context(mock.patch.object(varlen, "varlen_attn", _varlen))
        stack.enter_context(mock.patch.object(F, "rms_norm", _rms_norm))
        stack.enter_context(mock.patch.object(rms_norm, "KERNEL", _norm_kernel))
        stack.enter_context(mock.patch.object(varlen_attention, "_flex_attention", lambda kind: _flex))
        stack.enter_context(mock.patch.object(torch.autograd.graph.saved_tensors_hooks, "__init__", _hooks))
        moved = torch.Tensor, CudaTensor
        stack.enter_context(mock.patch.object(activation_offloading.OffloadActivations, "kinds", moved))
        stack.enter_context(mock.patch.object(codec._Encoder, "encode", _encode))
        stack.enter_context(mock.patch("posttrain.core.data.accelerator.CaptureGraphs", lambda: _captured))
        _forget_device()
        stack.callback(_forget_device)
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        torch.__future__.set_swap_module_params_on_conversion(True)
        yield
