"""Fully sharded data parallel training with torch's FSDP2: settings, sharding and gathering of a model.

Every process holds a shard of each weight, gradient and optimizer state. A layer's weights are gathered when it runs
and freed after it, so a process needs memory for one whole layer and its own shards. The numbers equal those of DDP.

Zhao et al. 2023, PyTorch FSDP, https://arxiv.org/abs/2304.11277.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn

from posttrain.core.distributed import deepspeed
from posttrain.core.distributed.environment import is_true
from posttrain.core.errors import did_you_mean
from posttrain.core.models.wrapping import base_model, unwrap

logger = logging.getLogger(__name__)

# ------------------------------------------------------------------------------------------------------------- settings


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded.

    Attributes:
        reshard_after_forward: free a layer's weights after its forward; False is faster and needs more memory.
        cpu_offload: keep the shards, their gradients and the optimizer state in host memory.
        wrap: units are layers ("transformer"), modules of `min_num_params` ("size") or the model ("none").
        layer_classes: names of the classes that are layers; empty: those the model names itself.
        state_dict_type: the main process writes "full" checkpoints, all processes write "sharded" ones.
        replicas: groups of processes that each hold the whole model; 0: one for each machine.
        shards: processes of such a group; 0: all.
        param_dtype, reduce_dtype: types in which weights are gathered and gradients reduced; None: by bf16 and fp16.
    """

    reshard_after_forward: bool = True
    cpu_offload: bool = False
    activation_checkpointing: bool = False
    wrap: str = "transformer"
    layer_classes: tuple[str, ...] = ()
    min_num_params: int = 0
    state_dict_type: str = "full"
    replicas: int = 1
    shards: int = 0
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)


STRATEGIES: dict[str, dict[str, Any]] = {
    "full_shard": {},
    "shard_grad_op": {"reshard_after_forward": False},
    "hybrid_shard": {"replicas": 0},
    "hybrid_shard_zero2": {"replicas": 0, "reshard_after_forward": False},
}
_NUMBERED = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard", "5": "hybrid_shard_zero2"}
POLICIES = {"transformer_based_wrap": "transformer", "size_based_wrap": "size", "no_wrap": "none"}
STATE_DICTS = {"full_state_dict": "full", "sharded_state_dict": "sharded"}
# Options of FSDP 1 that FSDP2 does not need.
WITHOUT_EFFECT = (
    "backward_prefetch", "forward_prefetch", "limit_all_gathers", "sync_module_states", "use_orig_params",
    "ignored_modules", "activation_checkpointing_offload", "xla_fsdp_settings", "xla_fsdp_v2", "xla_fsdp_grad_ckpt",
)  # fmt: skip
NAMES = (
    "version", "reshard_after_forward", "sharding_strategy", "cpu_offload", "offload_params",
    "activation_checkpointing", "cpu_ram_efficient_loading", "state_dict_type", "auto_wrap_policy",
    "transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap", "transformer_cls_to_wrap", "min_num_params",
    "mixed_precision_policy", "xla",
)  # fmt: skip


def read(
    fsdp: str | list[str] | None, fsdp_config: dict[str, Any] | str | None, parallelism: Any = None
) -> tuple[Sharding | None, list[str]]:
    """(settings of these arguments, or None without sharding; their problems)."""
    problems: list[str] = []
    options = [word for part in _listed(fsdp) for word in part.replace(",", " ").split()]
    sizes = parallel_sizes(parallelism, problems)
    on = bool(options) or sizes.get("dp_shard_size", 1) > 1
    config = _config(fsdp_config, problems)
    if not on:
        return None, problems
    settings = Sharding(replicas=sizes.get("dp_replicate_size", 1), shards=sizes.get("dp_shard_size", 0))
    for option in map(str.lower, options):
        if option in STRATEGIES:
            settings = replace(settings, **STRATEGIES[option])
        elif option == "offload":
            settings = replace(settings, cpu_offload=True)
        elif option == "no_shard":
            problems.append("fsdp='no_shard' shards nothing; leave fsdp out to use DDP")
        elif option not in ("auto_wrap", "true"):
            hint = did_you_mean(option, [*STRATEGIES, "offload", "auto_wrap"])
            problems.append(
                f"fsdp holds {option!r}, which is none of {', '.join(STRATEGIES)}, offload, auto_wrap{hint}"
            )
    for name, value in config.items():
        try:
            settings = _with(settings, name, value)
        except (ValueError, TypeError) as error:
            problems.append(f"fsdp_config[{name!r}]={value!r}: {error}")
    if settings.wrap == "size" and not settings.min_num_params:
        problems.append("fsdp_config['auto_wrap_policy']='SIZE_BASED_WRAP' needs min_num_params, the size of a unit")
    return settings, problems


def sizes_from_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """The sizes of groups of processes that ``accelerate launch`` left in the environment (PARALLELISM_CONFIG_...)."""
    if not is_true(environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false")):
        return None
    before = "PARALLELISM_CONFIG_"
    return {name.removeprefix(before).lower(): environ[name] for name in environ if name.startswith(before)}


def sizes_of(parallelism: Any) -> dict[str, int]:
    """The sizes of groups of processes by ``args.parallelism_config``, or by the launcher where that is None."""
    return parallel_sizes(sizes_from_environment() if parallelism is None else parallelism, [])


def from_environment(environ: Mapping[str, str] = os.environ) -> tuple[Sharding | None, list[str]]:
    """The settings that ``accelerate launch`` left in the environment (FSDP_..., PARALLELISM_CONFIG_...), as `read`."""
    sizes = sizes_from_environment(environ)
    if not is_true(environ.get("ACCELERATE_USE_FSDP", "false")):
        return read(None, None, sizes)
    found = {name[5:].lower(): value for name, value in environ.items() if name.startswith("FSDP_")}
    found = {name: value for name, value in found.items() if value.lower() not in ("", "none")}
    # FSDP 1 has strategies, FSDP2 a switch; accelerate writes both.
    found.pop("sharding_strategy" if found.get("version") == "2" else "reshard_after_forward", None)
    options = {name: value for name, value in found.items() if name in (*NAMES, *WITHOUT_EFFECT)}
    return read("full_shard", {"state_dict_type": "FULL_STATE_DICT"} | options, sizes)


def _listed(value: Any) -> list[str]:
    return [] if not value else [str(part) for part in value] if isinstance(value, (list, tuple)) else [str(value)]


def _config(config: dict[str, Any] | str | None, problems: list[str]) -> dict[str, Any]:
    """The options by their plain names."""
    if isinstance(config, str):
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            problems.append(f"fsdp_config={config!r} is not a JSON file that can be read ({error})")
            return {}
    if not isinstance(config, dict):
        return {}
    plain = {name.removeprefix("fsdp_"): value for name, value in config.items() if value is not None}
    for name in [name for name in plain if name not in (*NAMES, *WITHOUT_EFFECT)]:
        del plain[name]
        problems.append(f"fsdp_config holds {name!r}, which is no option of FSDP{did_you_mean(name, NAMES)}")
    return plain


def parallel_sizes(parallelism: Any, problems: list[str]) -> dict[str, int]:
    """``{"dp_replicate_size", "dp_shard_size", "tp_size"}`` of accelerate's ParallelismConfig, or a dict like it."""
    if parallelism is None:
        return {}
    known = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
    if isinstance(parallelism, dict):
        plain = {name.removeprefix("parallelism_config_"): value for name, value in parallelism.items()}
        for name in [name for name in plain if name not in known and not name.startswith(("cp_", "sp_", "tp_"))]:
            problems.append(f"parallelism_config holds {name!r}, which is none of {', '.join(known)}")
    else:
        plain = {name: getattr(parallelism, name, None) for name in known}
    sizes = {name: int(plain[name]) for name in known if plain.get(name) is not None}
    kinds = {"cp_size": "context", "sp_size": "sequence"}
    for name, kind in kinds.items():
        if sizes.get(name, 1) > 1:
            problems.append(
                f"parallelism_config: {name}={sizes[name]} is {kind} parallelism, which this version does not "
                "support; set it to 1 and shard the model over the data parallel processes with dp_shard_size"
            )
    return sizes


def _with(settings: Sharding, name: str, value: Any) -> Sharding:
    """`settings` with one option of ``fsdp_config``."""
    if name in WITHOUT_EFFECT:
        return replace(settings, notes=(*settings.notes, f"{name} has no effect: FSDP2 needs no such option."))
    if name == "version":
        if int(value) not in (1, 2):
            raise ValueError("there are versions 1 and 2")
        note = "FSDP 2 is used in place of version 1: the same numbers and checkpoints, without its flat parameters."
        return settings if int(value) == 2 else replace(settings, notes=(*settings.notes, note))
    if name in ("reshard_after_forward", "sharding_strategy"):
        strategy = _NUMBERED.get(str(value), str(value).lower())
        if strategy in STRATEGIES:
            return replace(settings, **STRATEGIES[strategy])
        if name == "sharding_strategy":
            raise ValueError(f"it is none of {', '.join(STRATEGIES)}")
        return replace(settings, reshard_after_forward=is_true(value))
    if name in ("cpu_offload", "offload_params"):
        return replace(settings, cpu_offload=is_true(value))
    if name == "activation_checkpointing":
        return replace(settings, activation_checkpointing=is_true(value))
    if name == "cpu_ram_efficient_loading":
        # from_pretrained reads the launcher's variable before a trainer exists, so this has no effect here.
        is_true(value)
        return settings
    if name == "state_dict_type":
        return replace(settings, state_dict_type=_chosen(value, STATE_DICTS))
    if name == "auto_wrap_policy":
        return replace(settings, wrap=_chosen(value, POLICIES))
    if name.startswith("transformer_"):
        words = tuple(word.strip() for part in _listed(value) for word in part.split(","))
        return replace(settings, layer_classes=words)
    if name == "min_num_params":
        return replace(settings, min_num_params=int(value))
    if name == "mixed_precision_policy":
        return _with_types(settings, value)
    if is_true(value):  # xla
        raise ValueError("TPUs are not supported")
    return settings


def _chosen(value: Any, choices: dict[str, str]) -> str:
    text = str(value).rpartition(".")[2].lower()
    if text not in choices:
        raise ValueError(f"it is none of {', '.join(choices).upper()}{did_you_mean(text, choices)}")
    return choices[text]


def _with_types(settings: Sharding, policy: Any) -> Sharding:
    names = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    if isinstance(policy, str):
        policy = {"param_dtype": policy, "reduce_dtype": policy}
    types: dict[str, Any] = {}
    for name, dtype in dict(policy).items():
        if name not in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype", "cast_forward_inputs"):
            raise ValueError(f"{name!r} is neither param_dtype nor reduce_dtype")
        if name in ("param_dtype", "reduce_dtype"):
            text = str(dtype).removeprefix("torch.")
            types[name] = getattr(torch, names.get(text, text), None)
            if not isinstance(types[name], torch.dtype):
                raise ValueError(f"{dtype!r} is no type of torch")
    return replace(settings, **types)


def optimizer_problems(name: Any, setting: str = "fsdp") -> Iterator[str]:
    """Why the optimizer `name` cannot train weights of which each process has a part, by `setting`."""
    name = str(getattr(name, "value", name))
    if name.endswith("_layerwise") or name in ("lomo", "adalomo"):
        return  # rejected for several processes anyway
    whole = name.startswith(("galore_", "apollo_")) or name in ("muon", "adafactor")
    if whole or "8bit" in name or "4bit" in name or "fp8" in name:
        why = "uses whole matrices" if whole else "has custom kernels"
        yield (
            f"optim={name!r} {why}, and with {setting} each process has a part of them; set optim=adamw_torch_fused, "
            f"or leave {setting.partition('=')[0]} out"
        )


# ----------------------------------------------------------------------------------------------------- sharding a model


def is_sharded(model: nn.Module) -> bool:
    """Whether `model` was sharded by `shard`."""
    return any(kind.__name__ == "FSDPModule" for kind in type(unwrap(model)).__mro__)


def plain_class(model: nn.Module) -> type[nn.Module]:
    """The class of `model` before `shard` changed it."""
    return next(kind for kind in type(model).__mro__ if not kind.__name__.startswith("FSDP"))


def make_mesh(settings: Sharding | None, device_type: str, world_size: int, local_world_size: int, tp: int = 1) -> Any:
    """The processes as torch's `DeviceMesh`, of the dimensions ``replicate``, ``shard`` and ``tp`` that there are.

    Args:
        settings: None: weights are not sharded, and rows are dealt along ``shard`` all the same.

    Raises:
        ValueError: the processes do not divide into so many groups.
    """
    from torch.distributed.device_mesh import init_device_mesh

    settings, groups = settings or Sharding(), world_size // tp
    replicas = settings.replicas or max(world_size // max(local_world_size, tp), 1)
    if world_size % tp or groups % replicas or settings.shards not in (0, groups // replicas):
        raise ValueError(
            f"{world_size} processes are not dp_replicate_size={replicas} groups of "
            f"dp_shard_size={settings.shards or 'any'}{f' of tp_size={tp}' if tp > 1 else ''}; change these sizes, or "
            "the number of processes."
        )
    sizes = {"replicate": replicas, "shard": groups // replicas, "tp": tp}
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def shard(
    model: nn.Module, settings: Sharding, mesh: Any, device: torch.device, precision: str, frozen: bool = False
) -> nn.Module:
    """Shard `model` in place, layer by layer, so that no device ever holds more than one whole layer.

    All processes start from the weights of the first, as under DDP; those of the others may even be on the meta device.

    Args:
        frozen: the model is never trained, so nothing stays gathered for a backward.

    Returns:
        `model`, now also an `FSDPModule`, with new parameters.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    param, reduce = settings.param_dtype or low, settings.reduce_dtype or (torch.float32 if low else None)
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if settings.cpu_offload else OffloadPolicy()
    types = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    options = {"mesh": mesh, "mp_policy": types, "offload_policy": offload}
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for unit in units(model, settings):
        _load_from_main(unit, device, moved)
        fully_shard(unit, reshard_after_forward=settings.reshard_after_forward, **options)
    _load_from_main(model, device, moved)
    # The rest is mostly the embedding and the head, so it is gathered once for forward and backward.
    rest = frozen or (None if settings.reshard_after_forward else False)
    root = fully_shard(model, reshard_after_forward=rest, **options)
    # Each unit looks up at its first forward whether it is the root; generation does not start at the root.
    root._get_fsdp_state()._lazy_init()
    return model


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
        near = did_you_mean(sorted(absent)[0], kinds)
        raise ValueError(
            f"transformer_layer_cls_to_wrap names {', '.join(sorted(absent))}, and {type(base).__name__} has no such "
            f"module{near}. It has {', '.join(kinds)}."
        )
    if not found:
        logger.warning(
            "%s does not say which modules are its layers, so FSDP gathers it whole. Name them in fsdp_config, for "
            "instance {'transformer_layer_cls_to_wrap': ['Block']}.", type(base).__name__,
        )  # fmt: skip
    return found[::-1]


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


def _load_from_main(unit: nn.Module, device: torch.device, moved: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Move the tensors that only `unit` holds to `device`, with the values of the main process.

    Args:
        moved: ``{id(tensor): (tensor, its replacement)}``; tied weights stay tied.
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
    """Replace the parameters in `optimizer`, made before `model` was sharded, by the sharded ones.

    Args:
        before: ``{id(parameter): name}`` before `shard`.

    Raises:
        ValueError: the optimizer already has state for whole weights.
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
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor") and hasattr(value, "placements")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` whole: gathered if it is sharded, in which case every process must call this."""
    if is_piece(tensor):
        return tensor.full_tensor()
    return deepspeed.whole(tensor) if deepspeed.is_piece(tensor) else tensor


def is_in_pieces(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is sharded, by FSDP or DeepSpeed's ZeRO-3."""
    return is_piece(tensor) or deepspeed.is_piece(tensor)


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of the whole `tensor`."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape) if deepspeed.is_piece(tensor) else tensor.shape)


def is_first_copy(tensor: Any) -> bool:
    """Whether this process is the first of those that hold the same shard."""
    mesh = tensor.device_mesh
    return all(_cuts(p) or mesh.get_local_rank(dim) == 0 for dim, p in enumerate(tensor.placements))


def piece_like(cut: Callable[[tuple[int, ...], tuple[int, ...]], torch.Tensor], like: Any) -> Any:
    """A `DTensor` laid out as `like` with the local shard ``cut(offset, shape)``; without communication."""
    from torch.distributed.tensor import DTensor

    local = like.to_local()
    values = cut(*extent(like)).to(device=local.device, copy=True)
    return DTensor.from_local(
        values, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def fill(tensor: torch.Tensor, full: torch.Tensor) -> None:
    """Write `full` into `tensor`, which may be sharded."""
    if is_piece(tensor):
        tensor.to_local().copy_(full[index(*extent(tensor))])
    else:
        tensor.copy_(full)


def index(offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The slice of a shard in the whole tensor."""
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def whole_state_dict(model: nn.Module, keep: bool, only: Callable[[str], bool] = lambda name: True) -> dict[str, Any]:
    """The whole state dict of a sharded `model`, gathered tensor by tensor into host memory.

    Every process must call it; where not `keep`, nothing is kept and an empty dict is returned.
    """
    kept: dict[str, torch.Tensor] = {}
    seen: dict[int, torch.Tensor] = {}  # tied weights stay tied
    for name, tensor in model.state_dict().items():
        if not only(name):
            continue
        full = whole(tensor)
        if keep:
            place = (tensor.to_local() if is_piece(tensor) else tensor).data_ptr()
            if place not in seen or not place:
                seen[place] = full.detach().to("cpu", copy=not is_piece(tensor))
            kept[name] = seen[place]
    return kept
