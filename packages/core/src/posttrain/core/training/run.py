"""What one run of `Trainer.train` knows, beside the `TrainerState` that callbacks see."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from posttrain.core.data import rng
from posttrain.core.distributed.stragglers import Pace
from posttrain.core.training.ema import EMA
from posttrain.core.training.nonfinite import FiniteGuard
from posttrain.core.training.oom import BatchSplitter
from posttrain.core.training.plan import Plan, Progress
from posttrain.core.training.preemption import Watch


@dataclass
class RunState:
    """Made at the start of a run; that of the last run stays until the next.

    Attributes:
        plan: its length.
        loader: of the training micro-batches.
        progress: where it stands in its data and its log; saved in checkpoints.
        parameters: those of the wrapped model.
        guard: keeps steps that are not finite from the weights.
        splitter: splits micro-batches that do not fit into memory.
        watch: notices signals and the time limit.
        pace: how long this process takes for its part of a step.
        ema: the averaged weights, where there are any.
        first_step: the optimizer step it started from.
        rows_read: over all processes, since it started.
        rng: random numbers of the checkpoint, until the first row is read.
        epoch_stopped: a callback had ended the epoch when the checkpoint was saved.
        is_stepping: the optimizer is changing the weights: no checkpoint can be saved now.
        records_before_evaluation: length of the log history while an evaluation may be interrupted.
        memory: metrics of the memory that training took, once it is done.
        callbacks_may_differ: callbacks may ask for something on one process alone.
        num_items: items of the accumulation window, over all processes, while one of its micro-batches is trained.
        group_rates: the learning rates of the last step by parameter group, where they differ.
    """

    plan: Plan = field(default_factory=lambda: Plan(1, None, 0, 0))
    loader: Any = None
    progress: Progress = field(default_factory=Progress)
    parameters: list[nn.Parameter] = field(default_factory=list)
    guard: FiniteGuard = field(default_factory=FiniteGuard)
    splitter: BatchSplitter = field(default_factory=BatchSplitter)
    watch: Watch = field(default_factory=lambda: Watch(on_signals=False))
    pace: Pace = field(default_factory=Pace)
    ema: EMA | None = None
    first_step: int = 0
    rows_read: int = 0
    rng: dict[str, Any] | None = None
    epoch_stopped: bool = False
    is_stepping: bool = False
    records_before_evaluation: int | None = None
    memory: dict[str, int] = field(default_factory=dict)
    callbacks_may_differ: bool = False
    num_items: Any = None
    group_rates: dict[str, float] = field(default_factory=dict)

    @property
    def is_inside_epoch(self) -> bool:
        """Whether micro-batches of the epoch are left; so it is assumed of data without a known length."""
        length = self.plan.batches_per_epoch
        return length is None or self.progress.batches < length

    def advance(self, num_batches: int, rows: float, as_read: bool) -> None:
        """Count the `num_batches` micro-batches of an optimizer step.

        Args:
            rows: rows of a micro-batch, over all processes; on average where it holds as many as fit.
            as_read: micro-batches are trained as the loader gives them: the last one of an epoch may be short.
        """
        first, last = self.progress.batches, self.progress.batches + num_batches
        total = self.loader.total_rows if as_read and self.loader.rows_per_batch == rows else None
        self.progress.batches = last
        read = num_batches * rows if total is None else min(last * rows, total) - min(first * rows, total)
        self.rows_read += round(read)

    def seek(self, position: dict[str, Any], skip_data: bool = True) -> None:
        """Let the data continue from `position`, or from the beginning of the epoch."""
        if skip_data:
            self.loader.load_state_dict(position)
        elif not self.progress.epoch_ended:
            self.progress.batches = 0
            self.loader.set_epoch(self.progress.epoch)
        if self.progress.epoch_ended:
            self.progress.epoch += 1
            self.loader.set_epoch(self.progress.epoch)

    def restore_rng(self) -> None:
        """Set the random numbers of the checkpoint, once: the first row that is read must find them."""
        if self.rng is not None:
            rng.set_rng_state(self.rng)
            self.rng = None
