"""transformers' Adafactor (Shazeer & Stern 2018, https://arxiv.org/abs/1804.04235), made to resume exactly.

torch's own always follows the paper's relative step size; this one takes the rate that a schedule sets.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def adafactor_class() -> type[torch.optim.Optimizer]:
    """Adafactor at a given learning rate, multiplied by max(eps[1], RMS(W)) of each weight W with `scale_parameter`.

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
