"""Callbacks that log how large gradients, weights, updates and activations are, by part of the model."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from posttrain.core.callbacks import ClosingCallback, TrainerCallback


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


class ActivationMonitorCallback(ClosingCallback):
    """Logs ``activation_rms/<layer>`` and ``activation_max/<layer>`` of the output of each layer (``model.layers.0``).

    The first is the root of the mean of the squares, the second the mean over forward passes of the largest absolute
    value; padding counts. A maximum that grows from record to record overflows in float16 at 65,504. Nothing waits for
    the device before the record.

    Args:
        every: optimizer steps between two measurements; a record holds their mean.
    """

    def __init__(self, every: int = 10) -> None:
        if every < 1:
            raise ValueError(f"ActivationMonitorCallback: every={every} must be >= 1.")
        self.every, self._measures = every, False
        self._hooks: list[Any] = []
        self._found: list[tuple[str, torch.Tensor]] = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.close()
        layers = [(name, module) for name, module in model.named_modules() if re.fullmatch(r"\D+\.\d+", name)]
        self._hooks = [layer.register_forward_hook(functools.partial(self._measure, name)) for name, layer in layers]

    def _measure(self, name: str, layer: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._measures and layer.training:
            output = (outputs[0] if isinstance(outputs, tuple) else outputs).detach().float()
            self._found.append((f"activation_rms/{name}", output.square().mean().sqrt()))
            self._found.append((f"activation_max/{name}", output.abs().amax()))

    def on_step_begin(self, args, state, control, **kwargs):
        self._measures = state.global_step % self.every == 0

    def on_step_end(self, args, state, control, **kwargs):
        found, self._found, self._measures = self._found, [], False
        for name, value in found:
            self.log_metric(name, value)

    def close(self) -> None:
        """Take the hooks off the model."""
        while self._hooks:
            self._hooks.pop().remove()


def parts(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The trained parameters by part: their names up to the first number, or else up to the module."""
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
