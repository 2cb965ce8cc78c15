"""What split matrices are given and give: all tokens of a row, or each process some (sequence parallelism).

Matrices that read one tensor sum its gradient over the processes once. With sequence parallelism each process has some
of the tokens between matrices, so that what norms and residuals keep is divided too; where the others sum, they gather
tokens, and sum those of each process, which sends the same bytes: Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198, Sec. 4.2.2. Without gradients every process has all tokens.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from posttrain.core.models.wrapping import base_model, is_peft_model

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Rows:
    """The hidden states of one model whose matrices are split over `mesh`.

    Attributes:
        shape: (B, T, H) of those that the processes have between them in the layer that runs; None: each has all.
        sharing: modules of matrices that read one tensor.
    """

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self.shape: torch.Size | None = None
        self.sharing: list[nn.Module] = []

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
                self.sharing.append(module)

    def divide(self, base: Any, plan: dict[str, str]) -> dict[str, str]:
        """Let the processes have the tokens between matrices. Returns what changes in `plan`."""
        body, style = base.get_decoder(), f"rowwise_to_rows_{id(self)}"
        own: Any = importlib.import_module("transformers.distributed.tensor_parallel")  # since transformers 5.23
        body.layers[0].register_forward_pre_hook(self._cut, with_kwargs=True)
        body.norm.register_forward_pre_hook(self._join, with_kwargs=True)
        own.ALL_PARALLEL_STYLES.register(style, _to_rows(own.RowwiseParallel, self))
        return {name: style for name, old in plan.items() if old == "rowwise" and ".layers." in f".{name}"}

    def _cut(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
        self.shape = None
        return _with_first(args, kwargs, self._some) if torch.is_grad_enabled() else None

    def _some(self, whole: torch.Tensor) -> torch.Tensor:
        if whole.shape[1] < 2:
            raise ValueError("sp_size: a row of one token cannot be divided. Leave such rows out.")
        return self._whole(whole).redistribute(placements=[Shard(1)]).to_local()

    def _share(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
        if (angles := kwargs.get("position_embeddings")) is not None:  # attention, with which a layer begins
            # By itself, for a layer may be recomputed after a forward of other rows, or of whole ones.
            rows, tokens, width = (args[0] if args else kwargs["hidden_states"]).shape
            whole = angles[0].shape[1]
            self.shape = None if tokens == whole else torch.Size((rows, whole, width))
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


def _to_rows(plain: Any, rows: Rows) -> Any:
    """The style of a matrix split by rows, of which each process then has the sums of its tokens. `plain`: that of
    transformers, which gives all of them to all.
    """

    class ToRows(plain):  # type: ignore[misc]
        def transform_output_post_forward(self, module: Any, output: Any, mesh: Any) -> Any:
            self.output_layouts = Replicate() if rows.shape is None else Shard(1)
            return super().transform_output_post_forward(module, output, mesh)

    return ToRows()


def norms_of(base: Any) -> Iterator[nn.Module]:
    """The modules of the layers of a decoder that compute each token by itself, beside its matrices."""
    for layer in base.get_decoder().layers:
        for child in layer.children():
            if not any(isinstance(part, nn.Linear) for part in child.modules()):
                yield child


def problem_of(model: nn.Module, size: int, plan: dict[str, str], rows: Rows) -> str | None:
    """Why the processes that split the matrices of `model` cannot have the tokens of a row between them, as a sentence;
    None if they can. `rows`: after `Rows.share_inputs`.
    """
    base: Any = base_model(model)
    layers = getattr(base.get_decoder() if hasattr(base, "get_decoder") else None, "layers", ())
    styles = {style for name, style in plan.items() if ".layers." in f".{name}"}
    turned = [one for one in rows.sharing if "position_embeddings" in inspect.signature(one.forward).parameters]
    if is_peft_model(model):
        why = "has an adapter, which reads all tokens"
    elif others := sorted(styles - {"colwise", "rowwise", "replicated_with_grad_allreduce"}):
        why = f"has layers that are split otherwise ({', '.join(others)})"
    elif not hasattr(base.get_decoder(), "norm") or not len(turned) == len(layers) == len(rows.sharing) / 2:
        why = "has other layers than attention with rotary positions and a gated MLP"
    else:
        return None
    return f"sp_size={size}: {type(base).__name__} {why}. Leave sp_size out."


def _with_first(args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Any], torch.Tensor]) -> Inputs:
    """The inputs of a module with its hidden states changed."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}
