"""How long a run is, and where in its data a step lies. Pure arithmetic."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Plan:
    """The length of a run, in optimizer updates.

    Attributes:
        accumulation: micro-batches of one update; an epoch's last window may hold fewer.
        batches_per_epoch: micro-batches each process draws in an epoch; None where the data has no known length.
        max_steps: updates after which the run ends.
        num_epochs: passes over the data that are begun at most.
    """

    accumulation: int
    batches_per_epoch: int | None
    max_steps: int
    num_epochs: int

    @property
    def steps_per_epoch(self) -> int | None:
        """Updates in one pass: a last window short of micro-batches counts."""
        if self.batches_per_epoch is None:
            return None
        return max(math.ceil(self.batches_per_epoch / self.accumulation), 1)

    def position(self, step: int) -> tuple[int, int]:
        """(epoch, micro-batches of it already drawn) after `step` updates; needs a known length."""
        if self.steps_per_epoch is None:
            raise ValueError("The data has no known length, so a step has no place in an epoch that can be computed.")
        epoch, steps = divmod(step, self.steps_per_epoch)
        return epoch, steps * self.accumulation

    def epoch_at(self, epoch: int, batches: int, step: int) -> float:
        """The epoch as a fraction, `batches` micro-batches into pass number `epoch`, after `step` updates."""
        if self.batches_per_epoch is None:
            return step / self.max_steps
        return epoch + min(batches, self.batches_per_epoch) / max(self.batches_per_epoch, 1)


@dataclass
class Progress:
    """Where a run stands in its data and its log, beside what `TrainerState` tells callbacks; saved in checkpoints.

    Attributes:
        epoch: number of the pass over the data. epoch_ended: nothing more is drawn from it.
        batches: micro-batches that this process drew in this pass.
        loss_sum, loss_count: of the steps whose losses were logged already.
        last_logged: the step of the last record. grad_norm, learning_rate: of the last step.
    """

    epoch: int = 0
    epoch_ended: bool = False
    batches: int = 0
    loss_sum: float = 0.0
    loss_count: int = 0
    last_logged: int = 0
    grad_norm: float = 0.0
    learning_rate: float = 0.0


def make_plan(batches_per_epoch: int | None, accumulation: int, num_train_epochs: float, max_steps: int) -> Plan:
    """Plan a run; `max_steps` > 0 beats `num_train_epochs`.

    Raises:
        ValueError: the data has no known length and no `max_steps` is set, or there is not one batch.
    """
    if batches_per_epoch == 0:
        raise ValueError(
            "The training dataloader yields no batch: the dataset is empty, or dataloader_drop_last=True drops its "
            "only, incomplete batch. Give more rows, or a smaller per_device_train_batch_size."
        )
    if batches_per_epoch is None:
        if max_steps <= 0:
            raise ValueError(
                "The training data has no known length (it is iterable without __len__), so the number of updates "
                "cannot be computed from num_train_epochs. Set max_steps."
            )
        return Plan(accumulation, None, max_steps, sys.maxsize)
    steps_per_epoch = max(math.ceil(batches_per_epoch / accumulation), 1)
    if max_steps > 0:
        return Plan(accumulation, batches_per_epoch, max_steps, math.ceil(max_steps / steps_per_epoch))
    return Plan(
        accumulation, batches_per_epoch, math.ceil(num_train_epochs * steps_per_epoch), math.ceil(num_train_epochs)
    )


def resumed(plan: Plan, step: int, epoch: int, batches: int, keeps_max_steps: bool) -> Plan:
    """`plan` for going on after `step` updates of another size, `batches` of its own micro-batches into pass number
    `epoch`.

    Args:
        keeps_max_steps: the run ends after ``plan.max_steps`` updates, of whatever size; else with the last row of its
            epochs.
    """
    if plan.steps_per_epoch is None:
        return plan
    done = epoch * plan.steps_per_epoch + math.ceil(batches / plan.accumulation)
    if keeps_max_steps:
        left = max(plan.max_steps - step, 0)
        return replace(plan, num_epochs=math.ceil((done + left) / plan.steps_per_epoch))
    return replace(plan, max_steps=step + max(plan.max_steps - done, 0))


def windows(batches: Iterable[Batch], accumulation: int) -> Iterator[list[Batch]]:
    """Cut a stream of micro-batches into the windows of one update each; the last may be short."""
    stream = iter(batches)
    while window := list(islice(stream, accumulation)):
        yield window


def as_steps(interval: float, max_steps: int) -> int:
    """An interval in updates: below 1 it is a share of the whole run, rounded up."""
    return max(math.ceil(interval * max_steps), 1) if interval < 1 else int(interval)
