"""Expert parallelism: each process of a group keeps its part of the experts of a mixture.

    Y = sum over e in top-k(X) of p_e(X) E_e(X)

The processes of a group read rows of their own. In each mixture layer a token is sent to the processes that keep its
experts, and what these make of it comes back: two exchanges of all with all in the forward pass, two in the backward
pass (Lepikhin et al. 2020, GShard, https://arxiv.org/abs/2006.16668, Sec. 3). Where the group also splits the other
matrices (`tensor_parallel`), its processes read the same rows, and each sends its part of their tokens. Which
parameters are experts, and the exchanges, are those of transformers (the ``ep_plan`` of each architecture).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from posttrain.core.distributed.shard_settings import piece_problems
from posttrain.core.distributed.sharding import SumGradient, is_piece, load_from_main
from posttrain.core.models.trainable import is_quantized
from posttrain.core.models.wrapping import base_model, config_of, setting

#: The styles of transformers' plans: of a module of experts, and of a parameter of which each process keeps some.
DISPATCHES, KEPT_BY_EXPERT = "ep_dispatch_experts", "grouped_gemm"

_DIVIDED: WeakSet[nn.Module] = WeakSet()  # modules of experts of which this process keeps some
_ADAPTERS: WeakSet[nn.Module] = WeakSet()  # peft's wrappers around them


def loaded_size(model: nn.Module | None) -> int:
    """Over how many processes ``from_pretrained(distributed_config=...)`` divided the experts; 1: it has them all."""
    config = None if model is None else config_of(model)
    return int(setting(setting(config, "distributed_config"), "ep_size") or 1)


def divide(model: nn.Module, mesh: Any, sharers: Any, device: torch.device) -> list[nn.Module]:
    """Keep of the experts of `model`, which every process has whole, those of this process, in place, and move them to
    `device`; the values are those of the main process. Returns the modules of experts, one for each mixture layer.
    Raises a `ValueError` for a problem from `problem_of`.

    The processes of `mesh` keep the experts between them; those of `sharers`, often this process alone, read the same
    rows. Both are a `DeviceMesh` of one dimension.
    """
    base, size = base_model(model), mesh.size()
    if problem := problem_of(base, size):
        raise ValueError(problem)
    with without_adapters(base) as adapters:
        plan, modules = plan_of(base), dict(base.named_modules())
        experts = [modules[name] for name, style in plan.items() if style == DISPATCHES and name in modules]
        for module in experts:
            load_from_main(module, device, {})
            if wrappers := adapters.get(module):
                module.forward = _adapted(module, wrappers, mesh.get_local_rank(), sharers, module.forward)
                _ADAPTERS.update(wrappers)
                for wrapper in wrappers:
                    wrapper._activate_lora = _nothing
        apply = importlib.import_module("transformers.distributed.expert_parallel").apply_expert_parallelism
        # By "auto", a process whose experts no token chose would not sum the gradients of their adapters.
        apply(base, mesh, sharers, plan, "all_to_all" if adapters and sharers.size() > 1 else "auto")
    _DIVIDED.update(experts)
    return experts


@contextlib.contextmanager
def without_adapters(base: nn.Module) -> Iterator[dict[nn.Module, list[Any]]]:
    """Within this context modules whose parameters have adapters (``target_parameters``) stand in `base` without peft's
    wrappers, one around the other. Yields the wrappers of each.
    """
    places: list[tuple[nn.Module, str, Any]] = [
        (parent, name, child)
        for parent in base.modules()
        for name, child in parent.named_children()
        if _is_wrapper(child) and not _is_wrapper(parent)
    ]
    for parent, name, child in places:
        parent._modules[name] = child.get_base_layer()
    try:
        yield {child.get_base_layer(): [part for part in child.modules() if _is_wrapper(part)] for *_, child in places}
    finally:
        for parent, name, child in places:
            parent._modules[name] = child


def _is_wrapper(module: nn.Module) -> bool:
    return any(kind.__name__ == "ParamWrapper" for kind in type(module).__mro__)


def _adapted(
    module: nn.Module, wrappers: Sequence[Any], place: int, sharers: Any, forward: Callable[..., Any]
) -> Callable[..., Any]:
    """`forward` of the experts that the process at this `place` keeps, with their part of the adapters, which peft
    would add to all experts before they are called. Each process has the adapters whole, as other dense weights, whose
    gradients are summed over the processes that keep the experts between them: each has seen the rows of all of
    them. Over `sharers`, whose rows are the same, they are summed here.
    """

    def with_adapters(*args: Any) -> Any:
        plain = dict(module._parameters)
        for wrapper in wrappers:
            names = [] if wrapper.disable_adapters or wrapper.merged else wrapper.active_adapters
            for name in (name for name in names if name in wrapper.lora_A):
                weight: Any = module._parameters[wrapper.parameter_name]
                left, right, scale = wrapper.get_delta_factors(name)
                if sharers.size() > 1:
                    left, right = (SumGradient.apply(each, sharers.get_group()) for each in (left, right))
                own = slice(place * len(weight), (place + 1) * len(weight))
                with torch.autocast(weight.device.type, enabled=False):
                    weight = torch.baddbmm(weight, left[own], right[own], alpha=scale)
                module._parameters[wrapper.parameter_name] = weight
        try:
            return forward(*args)
        finally:
            module._parameters.update(plain)

    return with_adapters


def _nothing(names: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@contextlib.contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Within this context this process has all experts of `model` and keeps in step with no other. Every process must
    enter it.
    """
    kept = [(module, dict(module._parameters), dict(vars(module))) for module in model.modules() if module in _DIVIDED]
    wrappers: list[Any] = [module for module in model.modules() if module in _ADAPTERS]
    try:
        for module, pieces, own in kept:
            for name, piece in pieces.items():
                if is_piece(piece):
                    module._parameters[name] = nn.Parameter(piece.full_tensor(), piece.requires_grad)
            table = vars(module)
            table.update(num_experts=own["num_experts"] * _size(pieces), _is_expert_parallel=False)
            del table["forward"]  # which exchanges tokens
        for wrapper in wrappers:
            del vars(wrapper)["_activate_lora"]
        yield
    finally:
        for wrapper in wrappers:
            wrapper._activate_lora = _nothing
        for module, pieces, own in kept:
            module._parameters.update(pieces)
            vars(module).update({name: own[name] for name in ("num_experts", "_is_expert_parallel", "forward")})


def _size(pieces: dict[str, Any]) -> int:
    """The processes over which the first dimension of these parameters is divided, outside of FSDP's gathering."""
    return next(piece.device_mesh.size() for piece in pieces.values() if is_piece(piece))


def plan_of(base: Any) -> dict[str, str]:
    """``{module or parameter: style}`` of the experts of `base`."""
    return base._expand_parallel_plan(base.ep_plan)


def problem_of(base: nn.Module, size: int) -> str | None:
    """Why the experts of `base` cannot be divided over `size` processes, as a sentence; None if they can."""
    name = type(base).__name__
    if is_quantized(base):
        return f"ep_size={size}: {name} is quantized, and its experts cannot be divided here. Load it in bfloat16."
    if not getattr(base, "ep_plan", None):
        return (
            f"ep_size={size}: {name} has no experts, or transformers no plan for dividing them. Set ep_size=1, and "
            "shard it by fsdp."
        )
    with without_adapters(base):
        parameters, plan = dict(base.named_parameters()), plan_of(base)
    for path, style in plan.items():
        if style == KEPT_BY_EXPERT and path in parameters and parameters[path].shape[0] % size:
            return _does_not_divide(size, parameters[path].shape[0], name)
    return None


def config_problem(config: Any, size: int) -> str | None:
    """`problem_of` as far as the `config` of a model shows it, before any weight is read."""
    text, name = config.get_text_config(), type(config).__name__
    for field in ("num_experts", "num_local_experts", "n_routed_experts"):
        if isinstance(count := setting(text, field), int):
            return _does_not_divide(size, count, name) if count % size else None
    if setting(text, "base_model_ep_plan"):
        return None
    return f"ep_size={size}: a model of {name} has no experts. Set ep_size=1."


def _does_not_divide(size: int, count: int, name: str) -> str:
    return f"ep_size={size} does not divide the {count} experts of {name}. Set a size that does."


def problems(size: int, sizes: dict[str, int], args: Any) -> Iterator[str]:
    """Why `args` cannot train with experts divided over `size` processes, with other groups of processes of these
    `sizes`.
    """
    if (tp := sizes.get("tp_size", 1)) not in (1, size):
        yield (
            f"ep_size={size} and tp_size={tp} do not work together: experts are divided over the processes that split "
            f"a matrix, or over processes with rows of their own. Set ep_size={tp}, or tp_size=1"
        )
    if (cp := sizes.get("cp_size", 1)) > 1:
        yield f"ep_size={size} and cp_size={cp} do not work together; set one of them to 1"
    yield from piece_problems("ep_size", size, "divide", "divided experts", args)
