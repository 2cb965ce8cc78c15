"""A schedule that follows the metric of evaluations, downwards and upwards."""

from __future__ import annotations

import logging
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

logger = logging.getLogger(__name__)


class GreedyLR(ReduceLROnPlateau):
    """Lower the learning rate while a metric does not improve, and raise it while it does.

    GreedyLR, 2025, https://arxiv.org/abs/2512.14527. Stepped with a metric after each evaluation.

    Args:
        mode: ``"min"`` where a smaller metric is better, else ``"max"``.
        factor: the rate is multiplied by it to go down and divided by it to go up; below 1.
        patience: evaluations in a row without (or with) improvement before a change.
        threshold, threshold_mode: by how much a metric must beat the best, ``"abs"`` or ``"rel"`` to it.
        cooldown, warmup: evaluations that are not counted after the rate was lowered or raised.
        min_lr, max_lr: bounds of the rate, or a list with one for each parameter group.
        eps: smaller changes are not applied.
        verbose: log each change.
        smooth, window_size: use the mean of the last `window_size` metrics.
        reset_start: reset everything after this many attempts to lower the rate at its lower bound.
    """

    warmup_counter: int

    def __init__(
        self,
        optimizer: Optimizer,
        mode: Literal["min", "max"] = "min",
        factor: float = 0.95,
        patience: int = 10,
        threshold: float = 1e-6,
        threshold_mode: Literal["rel", "abs"] = "abs",
        cooldown: int = 0,
        warmup: int = 0,
        min_lr: float | list[float] = 1e-3,
        max_lr: float | list[float] = 1.0,
        eps: float = 1e-8,
        verbose: bool = False,
        smooth: bool = False,
        window_size: int = 50,
        reset_start: int = 500,
    ) -> None:
        self.warmup, self.verbose = warmup, verbose
        self.smooth, self.window_size = smooth, window_size
        self.window: list[float] = []
        self.reset_start = self.resets_in = reset_start
        self.initial_lrs = [group["lr"] for group in optimizer.param_groups]
        super().__init__(optimizer, mode, factor, patience, threshold, threshold_mode, cooldown, min_lr, eps)
        self.max_lrs = list(max_lr) if isinstance(max_lr, (list, tuple)) else [max_lr] * len(self.min_lrs)
        if len(self.max_lrs) != len(self.min_lrs):
            raise ValueError(f"max_lr holds {len(self.max_lrs)} rates for {len(self.min_lrs)} parameter groups")

    def step(self, metrics: Any, epoch: int | None = None) -> None:  # type: ignore[override]  # as in torch's own
        current = float(metrics)
        if self.smooth:
            self.window = [*self.window, current][-self.window_size :]
            current = sum(self.window) / len(self.window)
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        if self.cooldown_counter or self.warmup_counter:
            if self.cooldown_counter:
                self.cooldown_counter -= 1
            else:
                self.warmup_counter -= 1
            self.num_bad_epochs = self.num_good_epochs = 0
        elif self._is_better(current, self.best):
            self.best = current
            self.num_good_epochs, self.num_bad_epochs = self.num_good_epochs + 1, 0
            if self.num_good_epochs > self.patience:
                self._raise()
                self.warmup_counter, self.num_good_epochs = self.warmup, 0
        else:
            self.num_good_epochs, self.num_bad_epochs = 0, self.num_bad_epochs + 1
            if self.num_bad_epochs > self.patience:
                self._lower()
                self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _raise(self) -> None:
        for group, highest in zip(self.optimizer.param_groups, self.max_lrs, strict=True):
            self._change(group, min(group["lr"] / self.factor, highest), direction=1)
        self.resets_in = self.reset_start

    def _lower(self) -> None:
        groups = self.optimizer.param_groups
        for group, lowest in zip(groups, self.min_lrs, strict=True):
            self._change(group, max(group["lr"] * self.factor, lowest), direction=-1)
        if all(group["lr"] <= lowest for group, lowest in zip(groups, self.min_lrs, strict=True)):
            self.resets_in -= 1
            if self.resets_in <= 0:
                self._start_afresh()

    def _change(self, group: dict[str, Any], rate: float, direction: int) -> None:
        if direction * (rate - group["lr"]) > self.eps:
            if self.verbose:
                logger.info("GreedyLR: evaluation %d, learning rate %.4g -> %.4g", self.last_epoch, group["lr"], rate)
            group["lr"] = rate

    def _start_afresh(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.initial_lrs, strict=True):
            group["lr"] = rate
        self._reset()

    def _reset(self) -> None:
        super()._reset()
        self.num_good_epochs = self.warmup_counter = 0
        self.resets_in, self.window = self.reset_start, []
