"""Fully sharded data parallel training with torch's FSDP2: sharding and gathering of a model.

Every process holds a shard of each weight, gradient and optimizer state. A layer's weights are gathered when it runs
and freed after it, so a process needs memory for one whole layer and its own shards. The numbers equal those of DDP.

Zhao et al. 2023, PyTorch FSDP, https://arxiv.org/abs/2304.11277.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn

from posttrain.core.distributed import deepspeed
from posttrain.core.distributed.shard_settings import Sharding
from posttrain.core.errors import did_you_mean
from posttrain.core.models.wrapping import base_model, input_embedding, local_part, setting, unwrap

logger = logging.getLogger(__name__)

#: A weight's first dimension is filled up to so many times its length at most, if another divides evenly.
MOST_FILLED = 1.1

# ----------------------------------------------------------------------------------------------------- sharding a model


def is_sharded(model: nn.Module) -> bool:
    """Whether `model` was sharded by `shard`."""
    return any(kind.__name__ == "FSDPModule" for kind in type(unwrap(model)).__mro__)


def is_sharded_by_transformers(model: nn.Module | None) -> bool:
    """Whether ``from_pretrained(distributed_config=...)`` sharded `model`, which no trainer can take over."""
    inner: Any = None if model is None else base_model(model)
    if getattr(inner, "_device_mesh", None) is None:
        return False
    size = getattr(inner, "_fsdp_size", None)  # before transformers 5.23 its config alone said so
    return (size or setting(setting(inner.config, "distributed_config"), "fsdp_size") or 1) > 1


def make_mesh(
    settings: Sharding | None, device_type: str, world_size: int, local_world_size: int, tp: int = 1, cp: int = 1
) -> Any:
    """The processes as torch's `DeviceMesh`, of the dimensions ``replicate``, ``shard`` and ``tp`` that there are.
    Raises a `ValueError` where they do not divide into so many groups.

    Weights are sharded over the `cp` processes that split a row, as over those with other rows. Without `settings`
    weights are not sharded, and rows are dealt along ``shard`` all the same.
    """
    from torch.distributed.device_mesh import init_device_mesh

    settings, groups = settings or Sharding(), world_size // tp
    replicas = settings.replicas or max(world_size // max(local_world_size, tp), 1)
    if not settings.replicas and settings.shards > 1:
        replicas = max(groups // (settings.shards * cp), 1)
    if world_size % tp or groups % replicas or settings.shards * cp not in (0, groups // replicas):
        raise ValueError(
            f"{world_size} processes are not dp_replicate_size={replicas} groups of "
            f"dp_shard_size={settings.shards or 'any'}{f' of tp_size={tp}' if tp > 1 else ''}"
            f"{f' of cp_size={cp}' if cp > 1 else ''}; change these sizes, or "
            "the number of processes."
        )
    sizes = {"replicate": replicas, "shard": groups // replicas, "tp": tp}
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def make_expert_mesh(mesh: Any, experts: int) -> Any:
    """The processes of `mesh` (`make_mesh`) by the experts that they keep: a `DeviceMesh` of the dimensions
    ``replicate`` and ``shard`` of the processes with the same experts, ``expert`` of the `experts` that have them all
    between them, and ``alone`` of each by itself. Raises a `ValueError` where the processes that shard the weights do
    not divide into so many.
    """
    from torch.distributed.device_mesh import init_device_mesh

    sizes = dict(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True))
    if sizes["shard"] % experts:
        raise ValueError(
            f"ep_size={experts} does not divide the {sizes['shard']} processes over which weights are sharded "
            "(dp_shard_size); change one of them."
        )
    sizes |= {"shard": sizes["shard"] // experts, "expert": experts, "alone": 1}
    return init_device_mesh(mesh.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def shard(
    model: nn.Module,
    settings: Sharding,
    mesh: Any,
    device: torch.device,
    precision: str,
    frozen: bool = False,
    experts: Sequence[nn.Module] = (),
    expert_mesh: Any = None,
) -> nn.Module:
    """Shard `model` in place, layer by layer, so that no device ever holds more than one whole layer. Returns it, now
    also an `FSDPModule`, with new parameters. Of a `frozen` one nothing stays gathered for a backward.

    All processes start from the weights of the first, as under DDP; those of the others may even be on the meta device.
    Each process keeps a part of the modules in `experts`. They are sharded over `expert_mesh`, the processes with the
    same part, and have seen the tokens of all processes that keep other parts.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    param, reduce = settings.param_dtype or low, settings.reduce_dtype or (torch.float32 if low else None)
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if settings.cpu_offload else OffloadPolicy()
    types = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    common: dict[str, Any] = {"mp_policy": types, "offload_policy": offload}

    def cut(part: nn.Module, over: Any, reshards: bool | None) -> Any:
        place = _placement(over)
        return fully_shard(part, mesh=over, reshard_after_forward=reshards, shard_placement_fn=place, **common)

    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for part in experts:
        unit: Any = cut(part, expert_mesh, settings.reshard_after_forward)
        # Its gradient is a sum over the rows of all processes, of which the mean is wanted.
        unit.set_gradient_divide_factor(float(mesh.size()))
        # gloo has no scaled sum, and a group of one divides without any.
        unit.set_force_sum_reduction_for_comms(expert_mesh.size(expert_mesh.ndim - 1) > 1)
    for unit in [unit for unit in units(model, settings) if unit not in experts]:
        load_from_main(unit, device, moved)
        if any(map(is_piece, unit.parameters(recurse=False))):
            unit.register_forward_hook(_own_output)
        cut(unit, mesh, settings.reshard_after_forward)
    load_from_main(model, device, moved)
    # The rest, such as a tied embedding, is needed from the first layer to the last: gathered once for both passes.
    rest = frozen or (None if settings.reshard_after_forward else False)
    # Each unit looks up at its first forward whether it is the root; generation does not start at the root.
    cut(model, mesh, rest)._get_fsdp_state()._lazy_init()
    return model


def _placement(mesh: Any) -> Callable[[nn.Parameter], Any]:
    """Along which dimension FSDP cuts a weight over the ``shard`` processes of `mesh`; None: the first, which it fills
    up to a multiple of them. Of two experts, or of the 16 rows of an adapter, over 1,024 processes it would gather
    mostly filling: another one is cut then, which must divide evenly.
    """
    from torch.distributed.tensor import Shard

    size = mesh["shard"].size()

    def place(parameter: nn.Parameter) -> Any:
        rows, *others = local_part(parameter).shape
        if -(-rows // size) * size <= MOST_FILLED * rows:
            return None
        return next((Shard(dim) for dim, length in enumerate(others, start=1) if length % size == 0), None)

    return place


def _own_output(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """FSDP hooks `output`, and an operation in place on a view, as of a split embedding, would lose the hook."""
    return output.clone() if output._is_view() else output


def units(model: nn.Module, settings: Sharding) -> list[nn.Module]:
    """The modules that are gathered one at a time, inner ones first, without `model` itself, which holds the rest."""
    base = base_model(model)
    if settings.wrap == "none":
        return []
    if settings.wrap == "size":
        return _units_by_size(model, settings.min_num_params)
    names = set(settings.layer_classes) or set(getattr(base, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if module is not model and type(module).__name__ in names]
    if settings.layer_classes and (absent := names - {type(module).__name__ for module in found}):
        kinds = sorted({type(module).__name__ for module in model.modules()})
        near = did_you_mean(sorted(absent)[0], kinds, ".")
        raise ValueError(
            f"transformer_layer_cls_to_wrap names {', '.join(sorted(absent))}, and {type(base).__name__} has no such "
            f"module{near} It has {', '.join(kinds)}."
        )
    if not found:
        logger.warning(
            "%s does not say which modules are its layers, so FSDP gathers it whole. Name them in fsdp_config, for "
            "instance {'transformer_layer_cls_to_wrap': ['Block']}.",
            type(base).__name__,
        )
    return [*(end for end in _ends(model) if end not in found), *found[::-1]]


def _ends(model: nn.Module) -> list[nn.Module]:
    """The input embedding and the output head of `model`, but not where they are tied: FSDP would gather such a weight
    for the first and keep it until the other has run, as it does with the rest of `model`.
    """
    found = input_embedding(model), getattr(base_model(model), "get_output_embeddings", lambda: None)()
    holders = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    return [end for end in found if end is not None and all(holders[id(p)] == 1 for p in end.parameters())]


def _units_by_size(model: nn.Module, at_least: int) -> list[nn.Module]:
    """Modules whose own parameters, without those of units inside them, number `at_least`."""
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        count = sum(p.numel() for p in module.parameters(recurse=False)) + sum(map(visit, module.children()))
        if module is not model and count >= at_least and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            found.append(module)
            return 0
        return count

    visit(model)
    return found


def load_from_main(unit: nn.Module, device: torch.device, moved: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Move the tensors that only `unit` holds to `device`, with the values of the main process. Tied weights stay tied,
    by what was `moved`: ``{id(tensor): (tensor, its replacement)}``.
    """
    for module in unit.modules():
        for table in (vars(module)["_parameters"], vars(module)["_buffers"]):
            for name, tensor in table.items():
                if tensor is None or is_piece(tensor):
                    continue
                if id(tensor) not in moved:
                    data = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
                    data = data.contiguous()
                    torch.distributed.broadcast(data, src=0)
                    if not tensor.is_meta:
                        tensor.data, data = data, tensor
                    elif isinstance(tensor, nn.Parameter):
                        data = nn.Parameter(data, requires_grad=tensor.requires_grad)
                    moved[id(tensor)] = (tensor, data)
                table[name] = moved[id(tensor)][1]


def units_of(model: nn.Module) -> list[Any]:
    """The modules of `model` that `shard` made units, itself first; none where it is whole."""
    return [module for module in model.modules() if hasattr(module, "unshard") and hasattr(module, "reshard")]


def gather(model: nn.Module) -> None:
    """Gather all weights and keep them gathered."""
    for unit in units_of(model):
        unit.unshard()
        unit.set_reshard_after_forward(False, recurse=False)


def scatter(model: nn.Module, settings: Sharding) -> None:
    """Free all weights but the process's own shards, and each layer's weights after it has run."""
    for unit in units_of(model):
        unit.reshard()
        unit.set_reshard_after_forward(settings.reshard_after_forward and unit is not model, recurse=False)


def follow(optimizer: Any, before: dict[int, str], model: nn.Module) -> None:
    """Replace the parameters in `optimizer`, made before `model` was sharded, by the sharded ones; `before` is
    ``{id(parameter): name}`` from then. Raises a `ValueError` where the optimizer already has state for whole
    weights.
    """
    if optimizer is None:
        return
    if optimizer.state:
        raise ValueError(
            "The optimizer took steps before FSDP sharded the weights, so its state does not fit them. Pass "
            "optimizer_cls_and_kwargs instead of an optimizer."
        )
    now = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [now[before[id(p)]] if id(p) in before else p for p in group["params"]]


# --------------------------------------------------------------------------------------------- shards and whole tensors


def extent(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offset, shape) of this process's shard of a `DTensor`."""
    offset, shape = [0] * tensor.ndim, list(tensor.shape)
    # FSDP cuts what tensor parallelism has cut before, though its dimension comes first in the mesh.
    for dim, placement in sorted(enumerate(tensor.placements), key=lambda item: _is_strided(item[1])):
        if _cuts(placement):
            axis, size, place = placement.dim, tensor.device_mesh.size(dim), tensor.device_mesh.get_local_rank(dim)
            chunk = -(-shape[axis] // size)  # as torch.chunk cuts: the last may be short or empty
            start = min(chunk * place, shape[axis])
            offset[axis], shape[axis] = offset[axis] + start, min(chunk, shape[axis] - start)
    return tuple(offset), tuple(shape)


def _is_strided(placement: Any) -> bool:
    return hasattr(placement, "split_factor")


def _cuts(placement: Any) -> bool:
    return placement.is_shard() or _is_strided(placement)


def is_piece(value: Any) -> TypeGuard[Any]:
    """Whether `value` is a `DTensor`."""
    return isinstance(value, torch.Tensor) and hasattr(value, "placements")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` whole: gathered if it is sharded, in which case every process must call this."""
    if is_piece(tensor):
        return tensor.full_tensor()
    return deepspeed.whole(tensor) if deepspeed.is_piece(tensor) else tensor


class SumGradient(torch.autograd.Function):
    """The identity, whose gradient is summed over a group of processes."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


def is_in_pieces(*tensors: torch.Tensor) -> bool:
    """Whether one of `tensors` is sharded, by FSDP or DeepSpeed's ZeRO-3."""
    return any(is_piece(tensor) or deepspeed.is_piece(tensor) for tensor in tensors)


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of the whole `tensor`."""
    sharded: Any = tensor
    return tuple(sharded.ds_shape if deepspeed.is_piece(tensor) else tensor.shape)


def count(parameters: Iterable[torch.Tensor]) -> int:
    """How many numbers all `parameters` hold whole."""
    return sum(math.prod(whole_shape(parameter)) for parameter in parameters)


def is_first_copy(tensor: Any) -> bool:
    """Whether this process is the first of those that hold the same shard."""
    return all(_cuts(p) or tensor.device_mesh.get_local_rank(dim) == 0 for dim, p in enumerate(tensor.placements))


def part_of(full: torch.Tensor, like: Any) -> torch.Tensor:
    """What this process holds of `full` if it is sharded as the `DTensor` `like`."""
    return full[index(*extent(like))]


def piece_like(own: torch.Tensor, like: Any) -> Any:
    """A `DTensor` laid out as `like` with a copy of `own` as this process' shard; without communication."""
    from torch.distributed.tensor import DTensor

    values, layout = own.to(like.to_local().device, copy=True), {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(values, like.device_mesh, like.placements, run_check=False, **layout)


def fill(tensor: torch.Tensor, full: torch.Tensor) -> None:
    """Write `full` into `tensor`, which may be sharded."""
    local_part(tensor).copy_(part_of(full, tensor) if is_piece(tensor) else full)


def index(offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The slice of a shard in the whole tensor."""
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def whole_state_dict(
    model: nn.Module, keep: Callable[[str], bool], only: Callable[[str], bool] = lambda name: True
) -> dict[str, Any]:
    """The state dict of a sharded `model`, gathered tensor by tensor into host memory: of the names in `only`, the same
    on all processes, this one gets those to `keep`. Every process must call it.
    """
    kept: dict[str, torch.Tensor] = {}
    seen: dict[int, torch.Tensor] = {}  # tied weights stay tied
    for name, tensor in model.state_dict().items():
        if not only(name):
            continue
        full = whole(tensor)
        if keep(name):
            place = local_part(tensor).data_ptr()
            if place not in seen or not place:
                seen[place] = full.detach().to("cpu", copy=not is_piece(tensor))
            kept[name] = seen[place]
        del full  # before the next one is gathered
    return kept
