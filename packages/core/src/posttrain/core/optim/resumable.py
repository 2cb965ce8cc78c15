"""Optimizers of transformers and torchao, made to resume exactly."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from posttrain.core.errors import require


@cache
def adafactor_class() -> type[torch.optim.Optimizer]:
    """Adafactor (Shazeer & Stern 2018, https://arxiv.org/abs/1804.04235) at the rate that a schedule sets, with
    `scale_parameter` times max(eps[1], RMS(W)) of each weight W. torch's own always follows the paper's relative step.

    With both `scale_parameter` and weight decay, each parameter's step waits for the device.
    """
    from transformers import optimization

    class Adafactor(optimization.Adafactor):
        def __init__(self, params: Any, lr: float, scale_parameter: bool = False, **options: Any) -> None:
            super().__init__(params, lr=lr, scale_parameter=scale_parameter, relative_step=False, **options)

        @staticmethod
        def _get_lr(param_group: dict[str, Any], param_state: dict[str, Any]) -> Any:
            if not param_group["scale_parameter"]:
                return param_group["lr"]
            # The base compares RMS with a number, which waits for the device.
            return param_group["lr"] * param_state["RMS"].clamp(min=param_group["eps"][1])

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            # torch casts state to the dtype of its parameter, but the moments of bfloat16 weights are float32.
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            for index, saved in state_dict["state"].items():
                for name, value in saved.items():
                    if isinstance(value, torch.Tensor):
                        self.state[parameters[index]][name] = value.to(parameters[index].device)

    Adafactor.__qualname__ = "Adafactor"
    return Adafactor


@cache
def torchao_adamw(bits: int) -> type[torch.optim.Optimizer]:
    """torchao's AdamW with state of 8 or 4 bits, saved as plain tensors. It is compiled: on the CPU a minute."""
    name, package = f"AdamW{bits}bit", "torchao>=0.11"
    base: Any = vars(require("torchao.optim", package, why=f"optim='adamw_torch_{bits}bit'"))[name]
    quantized = vars(require(f"torchao.optim.subclass_{bits}bit", package))[f"OptimState{bits}bit"]

    class Savable(base):
        def state_dict(self) -> dict[str, Any]:
            saved = super().state_dict()
            saved["state"] = {index: _each(state, _take_apart) for index, state in saved["state"].items()}
            return saved

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            def put_together(value: Any) -> Any:
                if not isinstance(value, dict):
                    return value
                return quantized.__tensor_unflatten__(value["tensors"], value["rest"])

            state = {index: _each(state, put_together) for index, state in state_dict["state"].items()}
            super().load_state_dict({**state_dict, "state": state})

    def _take_apart(value: Any) -> Any:
        if not isinstance(value, quantized):
            return value
        names, rest = value.__tensor_flatten__()
        rest = [tuple(item) if isinstance(item, torch.Size) else item for item in rest]
        return {"tensors": {name: getattr(value, name) for name in names}, "rest": rest}

    Savable.__name__ = Savable.__qualname__ = name
    return Savable


def _each(state: dict[str, Any], change: Any) -> dict[str, Any]:
    return {name: change(value) for name, value in state.items()}
