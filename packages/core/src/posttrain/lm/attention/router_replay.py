"""Router replay: the experts that a mixture chose while it sampled are chosen again while it is trained.

    enable(model)
    with Recorder(model) as recorder:
        model(input_ids=row)
        routes = recorder.take()                    # (N, layers, k), of the N tokens of that forward
    logits = model(input_ids=row, routes=routes[None]).logits

A router scores all experts of its layer and chooses k. Rounding differs between sampling and training, so that now and
then they choose others, and the policy that is trained is not the one that sampled. With the choice M of sampling, the
shares of a token are those of training's own scores s, among the experts of M:

    g_e = exp(s_e) / sum over e' in M of exp(s_e')          for e in M

so routers have their gradient. Ma et al. 2025, Rollout Routing Replay (R3), https://arxiv.org/abs/2510.11370.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from posttrain.core.models.wrapping import base_model

OWN = -1
"""In place of an expert: the router chooses itself."""
ROUTES = "routes"
"""The keyword of the forward: (B, T, layers, k) integers, the experts of each token."""
CHOOSES = (torch.topk, torch.Tensor.topk)


def enable(model: nn.Module) -> None:
    """Let the forward of `model` accept `ROUTES`. Without it its results do not change.

    The keyword goes on to the layers, so a layer that is recomputed in the backward pass chooses the same experts.
    Raises a `ValueError` for a problem from `problem_of`.
    """
    if problem := problem_of(model):
        raise ValueError(problem)
    for number, router in enumerate(routers_of(model)):
        replayed = _Replayed(number)
        router.register_forward_pre_hook(replayed.enter)
        router.register_forward_hook(replayed.leave, always_call=True)
        # Not of the layer: what is recomputed is its forward, without its hooks.
        _layer_of(model, router)[1].self_attn.register_forward_pre_hook(replayed.take, with_kwargs=True)


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The routers of a mixture, one for each layer that has experts; none of another model."""
    base = base_model(model)
    kind = getattr((getattr(base, "_can_record_outputs", None) or {}).get("router_logits"), "target_class", None)
    return [] if kind is None else [module for module in base.modules() if isinstance(module, kind)]


def problem_of(model: nn.Module) -> str | None:
    """Why the routes of `model` cannot be replayed, as a sentence; None if they can. Tries each router once."""
    name, routers = type(base_model(model)).__name__, routers_of(model)
    if not routers:
        return f"{name} has no routers that transformers names (router_logits), so there are no routes to replay."
    if not all(hasattr(_layer_of(model, router)[1], "self_attn") for router in routers):
        return f"{name} has layers without a self_attn, which is given the routes."
    width = base_model(model).config.get_text_config().hidden_size
    for router in routers:
        weight = next(router.parameters())
        choice = _Choice(None, len(weight))
        with torch.no_grad(), choice:
            found = router(torch.zeros(2, width, dtype=weight.dtype, device=weight.device))
        experts = found[-1] if isinstance(found, tuple) else None
        are_experts = isinstance(experts, torch.Tensor) and not experts.is_floating_point() and experts.ndim == 2
        if choice.calls != 1 or not are_experts:
            return f"{type(router).__name__} of {name} does not choose its experts once and return them last."
    return None


def layers_of(model: nn.Module) -> list[int]:
    """The numbers of the layers that have a router, for engines that return something of every layer."""
    return [_layer_of(model, router)[0] for router in routers_of(model)]


def _layer_of(model: nn.Module, router: nn.Module) -> tuple[int, Any]:
    """The decoder layer that holds `router`, and its number: the outermost module of a list that does."""
    for module in base_model(model).modules():
        if isinstance(module, nn.ModuleList):
            for number, layer in enumerate(module):
                if any(part is router for part in layer.modules()):
                    return number, layer
    raise ValueError(f"{type(router).__name__} is in no layer of {type(base_model(model)).__name__}.")


class Recorder:
    """Within this context, takes down which experts the routers of `model` choose."""

    def __init__(self, model: nn.Module) -> None:
        self.routers = routers_of(model)
        self._found: list[torch.Tensor] = []

    def __enter__(self) -> Recorder:
        self._hooks = [router.register_forward_hook(self._record) for router in self.routers]
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def _record(self, router: nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> None:
        self._found.append(output[-1].to(torch.int16))

    def take(self) -> torch.Tensor:
        """(N, layers, k) int16, of the N tokens of the last forward; what was before it is forgotten."""
        found, self._found = self._found[-len(self.routers) :], []
        return torch.stack(found, 1)


class _Replayed:
    """The hooks of one router: `take` of the attention before it, `enter` and `leave` of its own."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.routes: torch.Tensor | None = None
        self.choice: _Choice | None = None

    def take(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        routes = kwargs.pop(ROUTES, None)
        self.routes = None if routes is None else routes[..., self.number, :].flatten(0, -2).long()
        return args, kwargs

    def enter(self, router: nn.Module, args: Any) -> None:
        if self.routes is not None:
            self.choice = _Choice(self.routes, len(next(router.parameters())))
            self.choice.__enter__()

    def leave(self, router: nn.Module, args: Any, output: Any) -> None:
        if self.choice is not None:
            self.choice.__exit__(None, None, None)
            self.choice = self.routes = None


class _Choice(TorchFunctionMode):
    """Within this context ``topk`` over all `experts` gives the values at `routes` (N, k), and at its own choice where
    they are `OWN`. That over groups of experts, by which some routers leave most of them out, stays.
    """

    def __init__(self, routes: torch.Tensor | None, experts: int) -> None:
        super().__init__()
        self.routes, self.experts, self.calls = routes, experts, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in CHOOSES or args[0].ndim != 2 or args[0].shape[1] != self.experts:
            return found
        self.calls += 1
        if self.routes is None:
            return found
        chosen = torch.where(self.routes == OWN, found.indices, self.routes)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))
