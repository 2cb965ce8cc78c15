"""Finds optimizer steps whose loss is far above those before it, and names their rows."""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.core.config import opt
from posttrain.core.errors import LossSpikeError
from posttrain.core.training.nonfinite import LAG, OnItsWay, Update

logger = logging.getLogger(__name__)

#: Losses that a loss is compared with, at most and at least.
REMEMBERED, NEEDED = 100, 20


@dataclass
class SpikeArguments:
    """What happens when the loss of an optimizer step is far above those before it."""

    on_loss_spike: str = opt(
        "ignore",
        "If a loss is far above the last 100: do nothing, warn and name its rows, skip that optimizer step, or stop. "
        "skip reads the loss before each step, which a GPU must then finish.",
        choices=("ignore", "warn", "skip", "stop"),
    )
    loss_spike_threshold: float = opt(
        8.0, "Standard deviations above the mean of the last 100 losses from which a loss is a spike.", above=0
    )


class SpikeWatch:
    """Compares the loss of each optimizer step with the mean and the standard deviation of those before it: from so
    many deviations above it on (`threshold`) it is a spike, and `policy` (``on_loss_spike``) what follows.

    The loss of a device is read some steps later, unless the step is to be skipped. A loss that was a spike is not
    compared with, unless as many in a row are: then it is the new level. NaN and infinity are for `FiniteGuard`. The
    `mean` is that of a tensor over all processes, None where there is one; ``name(update)`` says which rows it
    holds.
    """

    def __init__(
        self,
        policy: str,
        threshold: float,
        mean: Callable[[torch.Tensor], torch.Tensor] | None = None,
        name: Callable[[Update], str] = lambda update: "its rows are not known",
    ) -> None:
        self.policy, self.threshold, self._mean, self._name = policy, threshold, mean, name
        self.losses: deque[float] = deque(maxlen=REMEMBERED)
        self.in_a_row = self.since_log = 0
        self._pending: deque[tuple[OnItsWay, Update]] = deque()

    def may_step(self, optimizer: Any, update: Update, loss_scale: Any = None) -> bool:
        """Whether `optimizer` may apply `update`. Raises a `LossSpikeError` where a loss is a spike, and the run is to
        stop.
        """
        loss = update.loss.detach() if self._mean is None else self._mean(update.loss.detach())
        self._pending.append((OnItsWay.of(loss), update))
        return self.settle(0 if loss.is_cpu or self.policy == "skip" else LAG)

    def settle(self, waits: int = 0) -> bool:
        """Look at all losses but the last `waits`; whether the last one looked at is no spike that is skipped."""
        may = True
        while len(self._pending) > waits:
            number, update = self._pending.popleft()
            may = self._judge(number.read(), update)
        return may

    def _judge(self, loss: float, update: Update) -> bool:
        if not math.isfinite(loss):
            return True
        height = self._height(loss)
        if height is None or height <= self.threshold or self.in_a_row >= NEEDED:
            self.losses.append(loss)
            self.in_a_row = 0 if height is None or height <= self.threshold else self.in_a_row
            return True
        self.in_a_row, self.since_log = self.in_a_row + 1, self.since_log + 1
        text = (
            f"Step {update.step + 1}: the loss {loss:.4g} is a spike, {height:.1f} standard deviations above "
            f"{statistics.fmean(self.losses):.4g}, the mean of {len(self.losses)} steps before. It is "
            f"{self._name(update)}."
        )
        if self.policy == "stop":
            raise LossSpikeError(
                f"{text} The run stops, as on_loss_spike='stop' sets. Look at these rows, or lower the learning rate."
            )
        logger.warning("%s%s", text, " The step was left out." if self.policy == "skip" else "")
        return self.policy != "skip"

    def logged(self) -> dict[str, int]:
        """``{"loss_spikes": how many}`` since the last call, where there were any."""
        count, self.since_log = self.since_log, 0
        return {"loss_spikes": count} if count else {}

    def _height(self, loss: float) -> float | None:
        """How many standard deviations `loss` is above the mean; None while too few losses are known."""
        if len(self.losses) < NEEDED:
            return None
        mean, deviation = statistics.fmean(self.losses), statistics.pstdev(self.losses)
        return (loss - mean) / max(deviation, 1e-6 * abs(mean), 1e-12)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "in_a_row": self.in_a_row, "since_log": self.since_log}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = deque(state["losses"], maxlen=REMEMBERED)
        self.in_a_row, self.since_log = state["in_a_row"], state["since_log"]
