"""torchao's AdamW with quantized state, made to fit a checkpoint of plain tensors."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from posttrain.core.errors import require


@cache
def torchao_adamw(bits: int) -> type[torch.optim.Optimizer]:
    """torchao's AdamW with state of 8 or 4 bits. It runs compiled, on the CPU too, where compiling takes a minute."""
    name, package = f"AdamW{bits}bit", "torchao>=0.11"
    base: Any = getattr(require("torchao.optim", package, why=f"optim='adamw_torch_{bits}bit'"), name)
    quantized = getattr(require(f"torchao.optim.subclass_{bits}bit", package), f"OptimState{bits}bit")

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
