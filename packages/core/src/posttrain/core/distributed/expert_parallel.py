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
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from posttrain.core.distributed.shard_settings import piece_problems
from posttrain.core.distributed.sharding import is_piece, load_from_main
from posttrain.core.models.trainable import is_quantized
from posttrain.core.models.wrapping import base_model, config_of

#: The styles of transformers' plans: of a module of experts, and of a parameter of which each process keeps some.
DISPATCHES, KEPT_BY_EXPERT = "ep_dispatch_experts", "grouped_gemm"
#: Under which names configs of transformers count the experts of a layer.
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")

_DIVIDED: WeakSet[nn.Module] = WeakSet()  # modules of experts of which this process keeps some


def loaded_size(model: nn.Module | None) -> int:
    """Over how many processes ``from_pretrained(distributed_config=...)`` divided the experts; 1: it has them all."""
    config = None if model is None else config_of(model)
    return int(getattr(getattr(config, "distributed_config", None), "ep_size", None) or 1)


def divide(model: nn.Module, mesh: Any, sharers: Any, device: torch.device) -> list[nn.Module]:
    """Keep of the experts of `model` those of this process, in place, and move them to `device`.

    Every process has the model whole; the values are those of the main process.

    Args:
        mesh: the processes that keep the experts between them, a `DeviceMesh` of one dimension.
        sharers: those of them that read the same rows: a mesh of one dimension, often of this process alone.

    Returns:
        The modules of experts, one for each mixture layer.

    Raises:
        ValueError: for a problem from `problem_of`.
    """
    base, size = base_model(model), mesh.size()
    if problem := problem_of(base, size):
        raise ValueError(problem)
    plan, modules = plan_of(base), dict(base.named_modules())
    experts = [modules[name] for name, style in plan.items() if style == DISPATCHES and name in modules]
    for module in experts:
        load_from_main(module, device, {})
    apply = importlib.import_module("transformers.distributed.expert_parallel").apply_expert_parallelism
    apply(base, mesh, sharers, plan, "auto")
    _DIVIDED.update(experts)
    return experts


@contextlib.contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Within this context this process has all experts of `model` and keeps in step with no other. Every process must
    enter it."""
    kept = [(module, dict(module._parameters), dict(vars(module))) for module in model.modules() if module in _DIVIDED]
    try:
        for module, pieces, own in kept:
            for name, piece in pieces.items():
                if is_piece(piece):
                    module._parameters[name] = nn.Parameter(piece.full_tensor(), piece.requires_grad)
            table = vars(module)
            table.update(num_experts=own["num_experts"] * _size(pieces), _is_expert_parallel=False)
            del table["forward"]  # which exchanges tokens
        yield
    finally:
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
    modules, parameters = dict(base.named_modules()), dict(base.named_parameters())
    for path, style in plan_of(base).items():
        if style == DISPATCHES and hasattr(modules.get(path), "base_layer"):
            return (
                f"ep_size={size}: the experts of {path} have an adapter (target_parameters), which looks at all of "
                "them. Give adapters to the attention alone, or set ep_size=1 and shard the model by fsdp."
            )
        if style == KEPT_BY_EXPERT and path in parameters and parameters[path].shape[0] % size:
            return _does_not_divide(size, parameters[path].shape[0], name)
    return None


def config_problem(config: Any, size: int) -> str | None:
    """`problem_of` as far as the `config` of a model shows it, before any weight is read."""
    text, name = config.get_text_config(), type(config).__name__
    for field in COUNTS:
        if isinstance(count := getattr(text, field, None), int):
            return _does_not_divide(size, count, name) if count % size else None
    if getattr(text, "base_model_ep_plan", None):
        return None
    return f"ep_size={size}: a model of {name} has no experts. Set ep_size=1."


def _does_not_divide(size: int, count: int, name: str) -> str:
    return f"ep_size={size} does not divide the {count} experts of {name}. Set a size that does."


def problems(size: int, sizes: dict[str, int], args: Any) -> Iterator[str]:
    """Why `args` cannot train with experts divided over `size` processes.

    Args:
        sizes: of the other groups of processes, by name.
    """
    if (tp := sizes.get("tp_size", 1)) not in (1, size):
        yield (
            f"ep_size={size} and tp_size={tp} do not work together: experts are divided over the processes that split "
            f"a matrix, or over processes with rows of their own. Set ep_size={tp}, or tp_size=1"
        )
    if (cp := sizes.get("cp_size", 1)) > 1:
        yield f"ep_size={size} and cp_size={cp} do not work together; set one of them to 1"
    yield from piece_problems("ep_size", size, "divide", "divided experts", args)
