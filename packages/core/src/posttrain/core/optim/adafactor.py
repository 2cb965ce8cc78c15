"""Adafactor, Shazeer & Stern 2018, https://arxiv.org/abs/1804.04235, at a learning rate that a schedule sets.

torch's own Adafactor always follows the paper's relative step size; this one takes the rate as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Adafactor(torch.optim.Optimizer):
    r"""Adam without momentum, whose second moment of an (m, n) matrix is kept as m row means and n column means.

    For a gradient G at update t (Algorithm 4 of the paper):

    .. math::
        \beta_t &= 1 - t^{c}, \quad R \leftarrow \beta_t R + (1 - \beta_t)\,\mathrm{mean}_n(G^2 + \epsilon_1), \quad
        C \leftarrow \ldots \mathrm{mean}_m \\
        U &= G / \sqrt{R\,C^\top / \mathrm{mean}(R)}, \quad
        W \leftarrow W - \alpha\, U / \max(1, \mathrm{RMS}(U) / d)

    Args:
        lr: alpha.
        eps: epsilon_1, added to squared gradients, and epsilon_2, the least scale of a parameter.
        clip_threshold: d, the largest root mean square of an update, before the learning rate.
        decay_rate: c; nearer 0 forgets old gradients sooner.
        beta1: decay of a momentum of the updates; None keeps none, which saves its memory.
        weight_decay: decoupled.
        scale_parameter: multiply alpha by max(epsilon_2, RMS(W)), as in the paper.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = False,
    ) -> None:
        defaults = {"lr": lr, "eps": eps, "clip_threshold": clip_threshold, "decay_rate": decay_rate, "beta1": beta1}
        super().__init__(params, defaults | {"weight_decay": weight_decay, "scale_parameter": scale_parameter})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        grad, state = parameter.grad.float(), self.state[parameter]
        if not state:
            state["step"] = 0
            if grad.dim() >= 2:
                state["rows"], state["columns"] = torch.zeros_like(grad[..., 0]), torch.zeros_like(grad[..., 0, :])
            else:
                state["squares"] = torch.zeros_like(grad)
            if group["beta1"] is not None:
                state["momentum"] = torch.zeros_like(grad)
        state["step"] += 1
        weight = 1 - (1 - state["step"] ** group["decay_rate"])  # of this gradient among all so far
        squares = grad.square() + group["eps"][0]
        if grad.dim() >= 2:
            rows = state["rows"].lerp_(squares.mean(dim=-1), weight)
            columns = state["columns"].lerp_(squares.mean(dim=-2), weight)
            row_factor = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_()
            update = grad * row_factor.unsqueeze(-1) * columns.rsqrt().unsqueeze(-2)
        else:
            update = grad * state["squares"].lerp_(squares, weight).rsqrt()
        update.div_((_rms(update) / group["clip_threshold"]).clamp_(min=1.0))

        # Sums are made in float32, whatever the weights are kept in.
        weights = parameter.float()
        rate = group["lr"]
        if group["scale_parameter"]:
            rate = rate * _rms(weights).clamp(min=group["eps"][1])
        update.mul_(rate)
        if group["beta1"] is not None:
            update = state["momentum"].lerp_(update, 1 - group["beta1"])
        parameter.copy_(weights * (1 - rate * group["weight_decay"]) - update)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # torch casts state to the dtype of its parameter, but the moments of bfloat16 weights are float32.
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, saved in state_dict["state"].items():
            for name, value in saved.items():
                if isinstance(value, torch.Tensor):
                    self.state[parameters[index]][name] = value.to(parameters[index].device)


def _rms(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(tensor) / tensor.numel() ** 0.5
