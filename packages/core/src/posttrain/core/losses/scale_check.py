"""Measures whether a loss is divided by the count of items, by computing it with two counts.

The count of a micro-batch with items is doubled. A loss that halves is a sum divided by the count; one that stays is a
mean; any other, such as a divided sum plus a penalty that is not divided, is given the items of its own micro-batch, as
in evaluation, and is then a mean. A penalty may be 0 at first, as the distance to where the weights began: so weights
are moved for the measurement, and it is repeated at later steps. It has no side effects.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.core.data import rng
from posttrain.core.losses.normalization import split_terms
from posttrain.core.models.compiling import uncompiled
from posttrain.core.models.wrapping import unwrap

SMALL = 512  # containers of more entries are data
DEPTH = 3
DATA = ("train_dataset", "eval_dataset")
#: Packages whose objects are no meters.
OTHERS = ("builtins", "posttrain", "torch", "transformers", "accelerate", "tokenizers", "datasets")
PLAIN = (torch.Tensor, nn.Parameter)  # what has memory of its own
#: What a meter holds.
HELD = (
    *(int, float, complex, str, np.generic, np.ndarray, torch.Tensor, torch.device, torch.dtype),
    *(list, tuple, dict, set, deque),
)
MOVED = 2**20  # parameters of more elements stay where they are: what is moved is copied
# Of a loss in 32 bits and in 16, how far its ratio may be from 1/2 or from 1.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-5}
COARSE = 2e-2


def loss_ratio(
    compute_loss: Callable[..., Any],
    model: nn.Module,
    inputs: Any,
    num_items: torch.Tensor,
    owner: Any,
    moves: bool = True,
    otherwise: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
) -> tuple[float, float] | None:
    """(the loss with twice the count as a share of the loss, its tolerance); None if the loss is 0 or NaN.

    Without gradients, uncompiled and with the same random numbers both times. Afterwards
    these, all tensors of `model` and of `owner`, and the attributes of both are restored.

    Args:
        owner: the object with `compute_loss`; its changes during the measurement are undone.
        moves: measure at slightly other weights, for terms that may be 0 at these.
        otherwise: a context for the second loss, which then has the same count.
    """
    found = []
    random = rng.rng_state()
    with uncompiled(), torch.no_grad():
        for is_second in (False, True):
            count = num_items * 2 if is_second and otherwise is None else num_items
            context = otherwise() if is_second and otherwise is not None else contextlib.nullcontext()
            with restored(model, owner), context:
                if moves:
                    _move(model)
                try:
                    # It may take the labels out of its inputs, of a dict or of what tokenizers give.
                    loss, _ = split_terms(compute_loss(model, copy.copy(inputs), num_items_in_batch=count))
                except RuntimeError as error:
                    if "grad" in str(error):  # it computes a gradient itself
                        error.add_note(
                            "compute_loss is called twice without gradients here, to see whether it divides by "
                            "num_items_in_batch. Set loss_is_scaled_for_ga on the trainer (True: it divides by it; "
                            "False: it returns a mean) to leave that out."
                        )
                    raise
                found.append(loss)
            rng.set_rng_state(random)
    exact = TOLERANCES.get(found[0].dtype, COARSE)
    once, twice = (float(loss) for loss in found)
    return (twice / once, exact) if once and math.isfinite(once) and math.isfinite(twice) else None


def kind_of(ratios: list[tuple[float, float] | None], moves_alone: bool) -> str | None:
    """``"sum"``, ``"mean"`` or ``"mixed"``, of a loss with this `loss_ratio` on each process; None if all are None.
    `moves_alone`: any change with the count means a sum, because the other terms are known to be small.
    """
    shown = [ratio for ratio in ratios if ratio is not None]
    if not shown:
        return None
    for kind, share in (("mean", 1), ("sum", 0.5)):
        if all(abs(ratio - share) <= exact for ratio, exact in shown):
            return kind
    return "sum" if moves_alone else "mixed"


def _move(model: nn.Module) -> None:
    """Change small trained parameters, norms and adapters; none that FSDP shards, which may stay gathered."""
    if any(kind.__name__ == "FSDPModule" for module in model.modules() for kind in type(module).__mro__):
        return
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.numel() <= MOVED and parameter.element_size() > 1:
            parameter.mul_(1.1).add_(0.01)
    torch.clear_autocast_cache()


@contextlib.contextmanager
def restored(model: nn.Module, owner: Any) -> Iterator[None]:
    """Put back at the end whatever is changed meanwhile in `model`, in `owner`, its state, its control and the modules,
    meters and containers that it has: their attributes, and the elements of their tensors and arrays. ``owner.log``
    does nothing meanwhile.
    """
    own = [value for name, value in vars(owner).items() if name not in DATA]
    # A wrapper for several processes keeps its own counts.
    inner = [part for value in own for part in _parts(value, DEPTH) if isinstance(part, nn.Module)]
    modules = {id(part): part for root in (model, *inner) for part in unwrap(root).modules()}
    kept = [vars(owner)[name] for name in ("state", "control") if name in vars(owner)]
    attributes = [(thing, dict(vars(thing))) for thing in (owner, *kept, *modules.values())]
    values = [value for _, names in attributes for name, value in names.items() if name not in (*DATA, "_parameters")]
    values = [part for value in values for part in _parts(value, DEPTH)]
    attributes += [(value, dict(vars(value))) for value in values if _is_meter(value)]
    contents = [(v, dict(v) if isinstance(v, dict) else list(v)) for v in values if _is_container(v)]
    small = [v for v in values if isinstance(v, np.ndarray) and v.flags.writeable and v.size <= MOVED]
    arrays = [(array, array.copy()) for array in small]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    parameters = [parameter for module in modules.values() for parameter in module._parameters.values()]
    tensors += [parameter for parameter in parameters if parameter is not None]
    if hasattr(owner, "log"):
        owner.log = lambda *args, **kwargs: None
    if hasattr(owner, "metrics"):
        owner.metrics = owner.metrics.copy()
    writes = _Writes(tensors)
    for module in modules.values():  # an operator that updates running statistics does not say so
        writes.keep(module._buffers.values())
    try:
        with writes:
            yield
    finally:
        for thing, names in attributes:
            vars(thing).clear()
            vars(thing).update(names)
        for container, content in contents:
            if _has_changed(container, content):
                container.clear()
                (container.extend if hasattr(container, "extend") else container.update)(content)
        for array, before in arrays:
            array[...] = before
        writes.undo()
        torch.clear_autocast_cache()


class _Writes(TorchDispatchMode):
    """Copies each of `tensors` before it is first written to. Copies of all would take the memory of the model."""

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[torch.Tensor | None]) -> None:
        super().__init__()
        self.known: dict[int, list[torch.Tensor]] = {}
        self.places: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tensor in tensors:
            tensor = _local(tensor)
            if type(tensor) in PLAIN and tensor.layout == torch.strided:
                self.known.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
                self.places.append((tensor, tensor.data))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for number, argument in enumerate(getattr(getattr(func, "_schema", None), "arguments", ())):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[number] if number < len(args) else kwargs.get(argument.name)
                self.keep(written if isinstance(written, (list, tuple)) else [written])
        return func(*args, **kwargs)

    def keep(self, written: Iterable[Any]) -> None:
        """Copy those of the known tensors whose memory one of `written` has."""
        for tensor in written:
            tensor = _local(tensor)
            if type(tensor) in PLAIN and tensor.layout == torch.strided:
                same = self.known.pop(tensor.untyped_storage().data_ptr(), [])
                self.copies += [(one, one.detach().clone()) for one in same]

    def undo(self) -> None:
        """Put back the elements that were written to, and the memory of tensors that were given another."""
        with torch.no_grad():
            for tensor, before in self.places:
                if tensor.data_ptr() != before.data_ptr():
                    tensor.data = before
            for tensor, copied in self.copies:
                tensor.copy_(copied)


def _local(tensor: Any) -> Any:
    """Of a sharded tensor the part that is here."""
    return getattr(tensor, "_local_tensor", tensor)


def _parts(value: Any, depth: int) -> Iterator[Any]:
    """`value`, and what it holds if it is a container or a meter."""
    yield value
    if depth and (_is_container(value) or _is_meter(value)):
        held = value if _is_container(value) else vars(value)
        for inner in list(held.values() if isinstance(held, dict) else held):
            yield from _parts(inner, depth - 1)


def _is_container(value: Any) -> bool:
    return isinstance(value, (list, dict, set, deque)) and len(value) <= SMALL


def _is_meter(value: Any) -> bool:
    """Whether `value` is an object of a script that holds numbers and containers alone, as what averages a metric."""
    if isinstance(value, (*HELD, nn.Module)) or callable(value) or type(value).__module__.partition(".")[0] in OTHERS:
        return False
    try:
        return all(held is None or isinstance(held, HELD) for held in vars(value).values())
    except TypeError:  # it has no attributes that can be set
        return False


def _has_changed(container: Any, content: Any) -> bool:
    if len(container) != len(content):
        return True
    if isinstance(content, dict):
        return any(container.get(name, content) is not value for name, value in content.items())
    return any(now is not before for now, before in zip(container, content, strict=True))
