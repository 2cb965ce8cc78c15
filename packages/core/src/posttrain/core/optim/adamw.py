"""AdamW that steps parameter groups with equal options together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class OneKernelAdamW(torch.optim.AdamW):
    """Fused AdamW whose groups share one kernel as long as their options are equal.

    Parameters are grouped by whether they decay. Without weight decay, the default, the groups differ in nothing, and a
    kernel for each would be a twentieth of a small model's step. State and groups are those of `torch.optim.AdamW`.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        # torch wraps the step of each class in hooks and a profiler's range when it first makes an instance. This step
        # is wrapped already; AdamW's own, where a plain AdamW was made too, would wrap it a second time.
        step: Any = torch.optim.AdamW.step
        step = step.__wrapped__ if getattr(step, "hooked", False) else step
        groups = self.param_groups
        first = groups[0]
        if len(groups) == 1 or not _alike(groups):
            return step(self, closure)
        self.param_groups = [{**first, "params": [p for group in groups for p in group["params"]]}]
        try:
            return step(self, closure)
        finally:
            self.param_groups = groups


def _alike(groups: list[dict[str, Any]]) -> bool:
    first, others = groups[0], groups[1:]
    for name, value in first.items():
        if name == "params":
            continue
        for group in others:
            other = group.get(name)
            # A learning rate in a tensor is compared by identity: its value would have to come from the device.
            if value is not other and (isinstance(value, torch.Tensor) or value != other):
                return False
    return True
