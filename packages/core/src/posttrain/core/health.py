"""Whether a step may be applied."""

from __future__ import annotations

import math

import torch

from posttrain.core.errors import NonFiniteError


def check_finite(loss: torch.Tensor, grad_norm: torch.Tensor, step: int, num_items: torch.Tensor | None = None) -> None:
    """Refuse an update whose loss or gradient is NaN or infinite, before it reaches the weights.

    Args:
        loss, grad_norm: shape (); of the window that update ``step + 1`` is made of.
        num_items: items in that window, shape (), where they were counted.

    Raises:
        NonFiniteError: it is.
    """
    if math.isfinite(loss.item()) and math.isfinite(grad_norm.item()):
        return
    if num_items is not None and not num_items:
        raise NonFiniteError(
            f"Update {step + 1}: not one label of its rows is to be learned (all are -100), so there is no loss. The update was "
            "not applied. Leave such rows out of the dataset, or look at what masks their labels."
        )
    raise NonFiniteError(
        f"Update {step + 1}: the loss is {float(loss):.4g} and the gradient norm {float(grad_norm):.4g}. The update was not "
        f"applied: the weights are those of update {step}. Lower the learning rate, look at the rows of this batch, or use "
        "bf16 where fp16 overflows."
    )
