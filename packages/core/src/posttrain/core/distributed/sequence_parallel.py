"""What split matrices are given and give: all tokens of a row, or each process some (sequence parallelism).

Matrices that read one tensor sum its gradient over the processes once. With sequence parallelism each process has some
of the tokens between matrices, so that what norms and residuals keep is divided too; where the others sum, they gather
tokens, and sum those of each process, which sends the same bytes: Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198, Sec. 4.2.2. Without gradients every process has all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, RowwiseParallel

from posttrain.core.models.wrapping import base_model, is_peft_model

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Rows:
    """The hidden states of one model whose matrices are split over `mesh`.

    Attributes:
        shape: (B, T, H) of those that the processes have between them now; None: each has all.
    """

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self.shape: torch.Size | None = None

    def share_inputs(self, base: nn.Module, plan: dict[str, str]) -> None:
        """Give matrices that read one tensor a tensor whose gradient is summed once: in a layer of three projections
        and a gated MLP, two sums in the backward pass take the place of five.
        """
        for name, module in base.named_modules():
            children = dict(module.named_children())
            styles = [plan.get(f"{name}.{own}") for own, child in children.items() if isinstance(child, nn.Linear)]
            has_others = any(hasattr(child, "base_layer") for child in children.values())  # adapters read plain tensors
            if styles.count("colwise") > 1 and {*styles} <= {"colwise", "rowwise"} and not has_others:
                module.register_forward_pre_hook(self._share, with_kwargs=True)

    def divide(self, base: Any, plan: dict[str, str]) -> dict[str, str]:
        """Let the processes have the tokens between matrices. Returns what changes in `plan`."""
        body, style, styles = base.get_decoder(), f"rowwise_to_rows_{id(self)}", cast("Any", ALL_PARALLEL_STYLES)
        body.layers[0].register_forward_pre_hook(self._cut, with_kwargs=True)
        body.norm.register_forward_pre_hook(self._join, with_kwargs=True)
        styles.register(style, ToRows(self))
        return {name: style for name, old in plan.items() if old == "rowwise" and ".layers." in f".{name}"}

    def _cut(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
        self.shape = None
        if not torch.is_grad_enabled():
            return None
        whole = args[0] if args else kwargs["hidden_states"]
        some = self._whole(whole).redistribute(placements=[Shard(1)]).to_local()
        self.shape = whole.shape
        return _with_first(args, kwargs, lambda _: some)

    def _share(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
        needed = torch.is_grad_enabled() or self.shape is not None
        return _with_first(args, kwargs, self._whole) if needed else None

    def _join(self, norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
        return None if self.shape is None else _with_first(args, kwargs, lambda some: self._whole(some).to_local())

    def _whole(self, hidden: torch.Tensor) -> DTensor:
        if self.shape is None:
            return DTensor.from_local(hidden, self.mesh, [Replicate()], run_check=False)
        whole: dict[str, Any] = {"shape": self.shape, "stride": torch.empty(self.shape, device="meta").stride()}
        some = DTensor.from_local(hidden, self.mesh, [Shard(1)], run_check=False, **whole)
        return some.redistribute(placements=[Replicate()])


class ToRows(RowwiseParallel):
    """Of a matrix split by rows: sums, of which each process has those of its tokens."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self._rows = rows

    def transform_output_post_forward(self, module: Any, output: Any, mesh: Any) -> Any:
        self.output_layouts = Replicate() if self._rows.shape is None else Shard(1)
        return super().transform_output_post_forward(module, output, mesh)


def norms_of(base: Any) -> Iterator[nn.Module]:
    """The modules of the layers of a decoder that compute each token by itself, beside its matrices."""
    for layer in base.get_decoder().layers:
        for child in layer.children():
            if not any(isinstance(part, nn.Linear) for part in child.modules()):
                yield child


def problem_of(model: nn.Module, size: int, plan: dict[str, str]) -> str | None:
    """Why the processes that split the matrices of `model` cannot have the tokens of a row between them, as a sentence;
    None if they can.
    """
    base: Any = base_model(model)
    name, matrices = type(base).__name__, {"colwise", "rowwise", "replicated_with_grad_allreduce"}
    body = base.get_decoder() if hasattr(base, "get_decoder") else None
    why = None
    if is_peft_model(model):
        why = "has an adapter, which reads all tokens"
    elif not isinstance(getattr(body, "layers", None), nn.ModuleList) or not hasattr(body, "norm"):
        why = "has no decoder of layers and a norm"
    elif others := sorted({style for name, style in plan.items() if ".layers." in f".{name}"} - matrices):
        why = f"has layers that are split otherwise ({', '.join(others)})"
    return None if why is None else f"sp_size={size}: {name} {why}. Leave sp_size out."


def _with_first(args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Any], torch.Tensor]) -> Inputs:
    """The inputs of a module with its hidden states changed."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}
