"""Whether a step may be applied: a loss or a gradient that is NaN or infinite never reaches the weights."""

from __future__ import annotations

import math

import torch

from posttrain.core.errors import NonFiniteError


class FiniteGuard:
    """Keeps updates that are not finite from the weights, without waiting for the device where that can be.

    On the CPU, and for optimizers that cannot skip a step by themselves, the numbers are looked at before each step. A fused
    optimizer on another device is handed a flag instead, which its kernel reads: it leaves weights and moments as they are,
    and what was skipped is found out at the next `check`.
    """

    def __init__(self) -> None:
        self._skipped: torch.Tensor | None = None

    def before_step(
        self,
        optimizer: torch.optim.Optimizer,
        loss: torch.Tensor,
        grad_norm: torch.Tensor,
        step: int,
        num_items: torch.Tensor | None = None,
    ) -> None:
        """Look at update ``step + 1`` before `optimizer` makes it.

        Args:
            loss, grad_norm: shape (); of the window that the update is made of.
            num_items: items in that window, shape (), where they were counted.

        Raises:
            NonFiniteError: one of them is NaN or infinite, where that can be known now.
        """
        if grad_norm.device.type == "cpu" or not getattr(optimizer, "_step_supports_amp_scaling", False):
            return check_finite(loss, grad_norm, step, num_items)
        self.flag(optimizer, loss, grad_norm)

    def flag(self, optimizer: torch.optim.Optimizer, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Let a fused `optimizer` skip its next step if `loss` or `grad_norm` is not finite; nothing is waited for."""
        bad = (~(torch.isfinite(loss) & torch.isfinite(grad_norm))).float()
        optimizer.found_inf, optimizer.grad_scale = bad, None
        self._skipped = bad if self._skipped is None else self._skipped + bad

    def check(self, step: int) -> None:
        """Raise if an update was skipped since the last check, which ended before update `step` + 1.

        Raises:
            NonFiniteError: one was.
        """
        skipped, self._skipped = self._skipped, None
        if skipped is not None and (count := int(skipped.item())):
            raise NonFiniteError(
                f"{count} of the updates up to {step}, since the last log record, had a loss or a gradient that is NaN or "
                "infinite. They were not applied: the weights are those that the other updates made. Lower the learning "
                "rate, or look at the rows of these batches; with logging_steps=1 the message names the update."
            )


def check_finite(loss: torch.Tensor, grad_norm: torch.Tensor, step: int, num_items: torch.Tensor | None = None) -> None:
    """Refuse an update whose loss or gradient is NaN or infinite; the arguments are those of `FiniteGuard.before_step`.

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
