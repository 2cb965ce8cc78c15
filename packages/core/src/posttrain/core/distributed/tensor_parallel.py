"""Tensor parallelism: the matrices of each layer are split over processes that read the same rows.

    Y = X [A1 A2] [B1; B2] = X A1 B1 + X A2 B2

The first matrix of a pair is split by columns, the second by rows, so that a pair needs one sum over the processes in
the forward pass and one in the backward pass: Shoeybi et al. 2019, Megatron-LM, https://arxiv.org/abs/1909.08053, Sec.
3. Which matrix is split how, and the sums, are those of transformers (the ``tp_plan`` of each architecture).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from posttrain.core.distributed import expert_parallel
from posttrain.core.distributed.sharding import SumGradient, is_piece
from posttrain.core.models.trainable import is_quantized
from posttrain.core.models.wrapping import base_model, config_of, is_peft_model, local_part, setting

#: The half of an adapter that is split, and how, by how the matrix beside it is split.
ADAPTERS = {"colwise": ("lora_B", "colwise"), "rowwise": ("lora_A", "rowwise")}


def loaded_size(model: nn.Module | None) -> int:
    """Over how many processes ``from_pretrained(distributed_config=...)`` split `model`; 1: it is whole."""
    return 1 if model is None else int(getattr(base_model(model), "_tp_size", None) or 1)


def split(model: nn.Module, mesh: Any, device: torch.device, with_experts: bool = False, by_rows: bool = False) -> None:
    """Split the matrices of `model` in place over the processes of `mesh`, a `DeviceMesh` of one dimension, by the plan
    of its architecture, and move it to `device`. Raises a `ValueError` where there is no plan, or heads or experts do
    not divide by the number of processes.

    Every process has it whole, or as ``from_pretrained(distributed_config=...)`` split it; the values of what is whole
    are those of the main process. `with_experts`: give each process some experts of a mixture whole, in place of a part
    of each. `by_rows`: divide the tokens of a row between matrices (`sequence_parallel`).
    """
    from posttrain.core.distributed import sequence_parallel  # loads torch's DTensor, and with it much else

    base, size = base_model(model), mesh.size()
    is_loaded = loaded_size(base) == size
    if not is_loaded and (problem := problem_of(base, size)):
        raise ValueError(problem)
    if not is_loaded and with_experts:
        expert_parallel.divide(model, mesh, mesh, device)
    _take_from_main(model, device)
    if is_loaded and by_rows:
        raise ValueError(f"sp_size={size}: load the model without distributed_config, which has split it otherwise.")
    if is_loaded:
        vars(base.config).pop("distributed_config", None)  # with it transformers saves from all processes together
        plan = _plan(base, size)
        _sum_partial_gradients(_partial(base, plan), mesh)
        sequence_parallel.Rows(mesh).share_inputs(base, plan)
        return
    apply = importlib.import_module("transformers.distributed.tensor_parallel").apply_tensor_parallelism
    modules, parameters = dict(base.named_modules()), dict(base.named_parameters())
    with expert_parallel.without_adapters(base):  # whose names no plan knows
        plan = _plan(base, size, with_experts)
    if is_peft_model(model):
        plan = dict(_with_adapters(plan, modules))
    first_name = {id(parameter): name for name, parameter in parameters.items()}
    twins = [(name, first_name[id(p)]) for name, p in base.named_parameters(remove_duplicate=False)]
    hidden, partial = sequence_parallel.Rows(mesh), _partial(base, plan)
    hidden.share_inputs(base, plan)
    if by_rows:
        if problem := sequence_parallel.problem_of(model, size, plan, hidden):
            raise ValueError(problem)
        plan |= hidden.divide(base, plan)
        partial += sequence_parallel.norms_of(base)
    apply(base, mesh, {name: style for name, style in plan.items() if name in modules or name in parameters})
    _sum_partial_gradients(partial, mesh)
    now = dict(base.named_parameters())
    for name, first in twins:
        if name != first:  # a tied weight stays one
            module, _, own = name.rpartition(".")
            modules[module].register_parameter(own, now[first])
    base._tp_size = size
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if any(place.type != device.type or device.index not in (None, place.index) for place in devices):
        model.to(device)


def _take_from_main(model: nn.Module, device: torch.device) -> None:
    """Give whole tensors the values that they have on the main process, one at a time."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not is_piece(tensor):
            data = tensor.detach().to(device).contiguous()
            torch.distributed.broadcast(data, src=0)
            tensor.detach().copy_(data)


def _partial(base: nn.Module, plan: dict[str, str]) -> list[nn.Module]:
    """Those whose weights every process holds whole, and applies to its own heads."""
    return [module for name, module in base.named_modules() if plan.get(name) == "replicated_with_grad_allreduce"]


def _sum_partial_gradients(partial: list[nn.Module], mesh: Any) -> None:
    """Sum the gradients of the weights of these modules over the processes: of one backward pass, where transformers
    sums ``weight.grad``, and with it what earlier micro-batches of the window left there.
    """
    group = mesh.get_group()
    for module in partial:
        module.forward = functools.partial(_with_summed_gradients, module, group)


def _with_summed_gradients(module: nn.Module, group: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of `module` with parameters whose gradients are summed over `group`."""
    own, table = dict(module.named_parameters(recurse=False)), vars(module)
    for name, parameter in own.items():
        del module._parameters[name]
        table[name] = SumGradient.apply(parameter, group)
    try:
        return type(module).forward(module, *args, **kwargs)
    finally:
        for name, parameter in own.items():
            del table[name]
            module._parameters[name] = parameter


def problem_of(base: nn.Module, size: int) -> str | None:
    """Why the matrices of `base` cannot be split over `size` processes, as a sentence; None if they can."""
    name, config = type(base).__name__, config_of(base)
    if is_quantized(base):
        return f"tp_size={size}: {name} is quantized, and its matrices cannot be split here. Load it in bfloat16."
    if config is None or not getattr(base, "tp_plan", None):
        return f"tp_size={size}: {name} has no plan for splitting its matrices. Set tp_size=1, and shard it by fsdp."
    return config_problem(config, size)


def config_problem(config: Any, size: int) -> str | None:
    """`problem_of` as far as the `config` of a model shows it, before any weight is read."""
    text = config.get_text_config()
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = setting(text, field)
        if isinstance(heads, int) and heads % size:
            return (
                f"tp_size={size} does not divide the {heads} {field} of {type(config).__name__}. Set a size that does."
            )
    return None


def _plan(base: Any, size: int, with_experts: bool = False) -> dict[str, str]:
    """``{module or parameter: style}`` of `base`; of its experts too, but where each process keeps some whole."""
    distributed = importlib.import_module("transformers.distributed")
    config = distributed.DistributedConfig(tp_size=size, ep_size=size if with_experts else None)
    return base._resolve_parallel_plans(config)[0]


def _with_adapters(plan: dict[str, str], modules: dict[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """`plan` for a model with LoRA: of each pair the half beside the split side of the matrix is split with it. Raises
    a `ValueError` where an adapter looks at whole matrices, or is of another kind.
    """
    for name, style in plan.items():
        module: Any = modules.get(name)
        if hasattr(module, "modules_to_save"):  # peft's trained copy next to the original
            for copy in ("original_module", *(f"modules_to_save.{adapter}" for adapter in module.modules_to_save)):
                yield from _with_parameters(f"{name}.{copy}", style)
        elif hasattr(module, "base_layer"):
            if style not in ADAPTERS or not hasattr(module, "lora_A") or any(module.use_dora.values()):
                raise ValueError(
                    f"tp_size splits {name} ({style}), and its adapter ({type(module).__name__}) looks at the whole "
                    "matrix. Use LoRA of linear layers, without DoRA, or shard the model by fsdp."
                )
            half, how = ADAPTERS[style]
            yield from _with_parameters(f"{name}.base_layer", style)
            for adapter in getattr(module, half):
                yield from _with_parameters(f"{name}.{half}.{adapter}", how)
        elif not _is_adapted(modules.get(name.rpartition(".")[0])):
            yield name, style


def _is_adapted(module: nn.Module | None) -> bool:
    return hasattr(module, "modules_to_save") or hasattr(module, "base_layer")


def _with_parameters(name: str, style: str) -> Iterator[tuple[str, str]]:
    """The entries of a linear layer."""
    yield from ((f"{name}.weight", style), (f"{name}.bias", style), (name, style))


# ------------------------------------------------------------------------------------------------ gradients and updates


def total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The norm of all `gradients`, whole and in pieces of several meshes, shape (). Every process must call it."""
    norms = []
    for group in by_mesh(gradients).values():
        norm = nn.utils.get_total_norm(group)
        norms.append(norm.full_tensor() if is_piece(norm) else norm)
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def clip(gradients: list[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale `gradients` in place so that their `norm` is at most `max_norm`."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch.nn.utils.clip_grad_norm_
    torch._foreach_mul_([*map(local_part, gradients)], factor)


def by_mesh(tensors: list[torch.Tensor]) -> dict[Any, list[torch.Tensor]]:
    """`tensors` in groups that one kernel takes, by the mesh over which they are in pieces; None: whole ones."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if is_piece(tensor) else None, []).append(tensor)
    return groups


def step(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.step()``, with each kernel given tensors of one mesh. The groups stay as they are."""
    groups = optimizer.param_groups
    split = [
        (group, {**group, "params": some, "mesh": mesh})
        for group in groups
        for mesh, some in by_mesh(group["params"]).items()
    ]
    optimizer.param_groups = [part for _, part in split]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups
        for group, part in split:  # counts that some optimizers keep in their groups
            group.update({name: value for name, value in part.items() if name not in ("params", "mesh")})
