"""A callback that logs how large gradients, weights and updates are, by part of the model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from posttrain.core.callbacks import TrainerCallback


class ParameterMonitorCallback(TrainerCallback):
    """Logs ``grad_norm/<part>``, ``weight_norm/<part>`` and ``update_ratio/<part>`` of trained parameters.

    A part is a layer (``model.layers.0``), or a module outside the layers (``lm_head``). Norms are Euclidean;
    gradients are measured after clipping, and ``update_ratio`` is the norm of what a step has changed over that of the
    weights before it: about 1e-3 is usual for a matrix under Adam, and 0 is a part that does not learn. Sharded weights
    are measured whole. Nothing waits for the device before the record.

    Args:
        every: optimizer steps between two measurements; a record holds their mean.
        updates: also measure updates, which needs a copy of the trained weights in measured steps.
    """

    def __init__(self, every: int = 10, updates: bool = True) -> None:
        if every < 1:
            raise ValueError(f"ParameterMonitorCallback: every={every} must be >= 1.")
        self.every, self.updates = every, updates
        self._before: dict[str, list[torch.Tensor]] = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self._before = {}
        if state.global_step % self.every:
            return
        for part, parameters in parts(model).items():
            gradients = [p.grad for p in parameters if p.grad is not None]
            if gradients:
                self.log_metric(f"grad_norm/{part}", norm(gradients))
            self.log_metric(f"weight_norm/{part}", norm(parameters))
            if self.updates:
                self._before[part] = [p.detach().clone() for p in parameters]

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        before, self._before = self._before, {}
        for part, parameters in parts(model).items() if before else ():
            changes = [p.detach() - old for p, old in zip(parameters, before[part], strict=True)]
            self.log_metric(f"update_ratio/{part}", norm(changes) / norm(before[part]).clamp(min=1e-30))


def parts(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The trained parameters by part: what stands before and with the first number in their names, or the module."""
    found: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layer = re.match(r"(.*?\.\d+)\.", name)
            part = layer.group(1) if layer else name.rpartition(".")[0] or name
            found.setdefault(part, []).append(parameter)
    return found


def norm(tensors: Iterable[Any]) -> torch.Tensor:
    """The Euclidean norm of all `tensors` together, shape (), in float32; of sharded ones over all processes."""
    squares = [tensor.detach().float().square().sum() for tensor in tensors]
    whole = [square.full_tensor() if hasattr(square, "full_tensor") else square for square in squares]
    return torch.stack(whole).sum().sqrt()
