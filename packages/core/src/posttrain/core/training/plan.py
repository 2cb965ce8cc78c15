"""Computes the length of a run and the data position of a step."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from posttrain.core.fields.durations import NEVER, as_steps, parse

if TYPE_CHECKING:
    import torch

#: What to set for data without a known length.
END_OF_STREAM = (
    "Set max_steps; or max_duration in tokens, such as '100Mtok', which the schedule then follows; or max_duration in "
    "epochs or time with lr_scheduler_type='constant_with_warmup', which needs no end."
)


@dataclass(frozen=True)
class Plan:
    """The length of a run in optimizer steps."""

    accumulation: int  # micro-batches of one optimizer step; an epoch's last window may hold fewer
    batches_per_epoch: int | None  # micro-batches each process draws; None where the data has no known length
    max_steps: int  # optimizer steps after which the run ends; `NEVER` where tokens, time or the data end it
    num_epochs: int  # the maximum number of started epochs
    #: (step, epoch, micro-batches left of it) from which on all steps hold as many rows; None: all do.
    resized_at: tuple[int, int, int] | None = None
    uses: int | None = None  # micro-batches that are made of each batch of the loader; None: it is one

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in one epoch, including a short last window."""
        if self.batches_per_epoch is None:
            return None
        return max(math.ceil(self.batches_per_epoch / self.accumulation), 1)

    @property
    def is_open(self) -> bool:
        """Whether the number of optimizer steps of the run is unknown."""
        return self.max_steps >= NEVER

    def position(self, step: int) -> tuple[int, int]:
        """(epoch, micro-batches of it already drawn) after `step` optimizer steps; needs a known length."""
        epoch, steps = divmod(step, self.steps_per_epoch or 1)
        return epoch, steps * self.accumulation

    def epoch_at(self, epoch: int, batches: int, step: int) -> float:
        """The epoch as a fraction, `batches` micro-batches into epoch number `epoch`, after `step` optimizer steps."""
        if self.batches_per_epoch is None:
            return float(epoch) if self.is_open else step / self.max_steps
        return epoch + min(batches, self.batches_per_epoch) / max(self.batches_per_epoch, 1)


@dataclass
class Progress:
    """The position of a run in its data and its log, in addition to `TrainerState`; saved in checkpoints."""

    epoch: int = 0  # number of the pass over the data
    epoch_ended: bool = False  # nothing more is drawn from it
    batches: int = 0  # micro-batches that this process drew in this pass
    loss_sum: float = 0.0  # of the steps whose losses were already logged
    loss_count: float = 0
    last_logged: int = 0  # the step of the last record
    grad_norm: float | torch.Tensor = 0.0  # of the last step
    learning_rate: float = 0.0
    ended_at: int = 0  # the step with which the run ended, once callbacks were asked what to do at its end; 0: none
    own_count: bool = False  # each micro-batch's loss is given its own count, as was measured (`losses.scale_check`)

    def add_losses(self, total: float, count: float) -> None:
        """Add the losses of a record to those of the run, unless their sum is not finite."""
        if math.isfinite(total):
            self.loss_sum, self.loss_count = self.loss_sum + total, self.loss_count + count

    def mean_loss(self, had_losses: bool) -> float:
        """The mean loss of the run; without a finite one, NaN where there were losses, else 0."""
        return self.loss_sum / self.loss_count if self.loss_count else math.nan if had_losses else 0.0


def make_plan(
    batches_per_epoch: int | None,
    accumulation: int,
    num_train_epochs: float,
    max_steps: int,
    epochs_of_stream: float | None = None,
) -> Plan:
    """Plan a run; `max_steps` > 0 overrides `num_train_epochs`. Of data without a known length, a run without
    `max_steps` ends after `epochs_of_stream` passes, infinity where something else ends it. Raises a `ValueError` where
    that is None, so that nothing ends the run, or where there is no batch.
    """
    if batches_per_epoch == 0:
        raise ValueError(
            "The training dataloader yields no batch: the dataset is empty, or dataloader_drop_last=True drops its "
            "only, incomplete batch. Give more rows, or a smaller per_device_train_batch_size."
        )
    if batches_per_epoch is None:
        if max_steps > 0:
            return Plan(accumulation, None, max_steps, sys.maxsize)
        if epochs_of_stream is None:
            raise ValueError(
                "The training data has no known length (it is iterable without __len__), so the number of optimizer "
                f"steps cannot be computed from num_train_epochs. {END_OF_STREAM}"
            )
        return Plan(accumulation, None, NEVER, math.ceil(min(epochs_of_stream, sys.maxsize)))
    steps_per_epoch = math.ceil(batches_per_epoch / accumulation)
    if max_steps > 0:
        return Plan(accumulation, batches_per_epoch, max_steps, math.ceil(max_steps / steps_per_epoch))
    steps, epochs = math.ceil(num_train_epochs * steps_per_epoch), math.ceil(num_train_epochs)
    return Plan(accumulation, batches_per_epoch, steps, epochs)


def resumed(plan: Plan, step: int, epoch: int, left: int, keeps_max_steps: bool) -> Plan:
    """`plan` for resuming after `step` optimizer steps of another size, with `left` micro-batches of epoch `epoch` to
    come. The run ends with its last row, or with ``plan.max_steps`` optimizer steps of any size (`keeps_max_steps`).
    """
    whole, total = plan.steps_per_epoch, plan.batches_per_epoch
    if whole is None or total is None:
        return plan
    changed = replace(plan, resized_at=(step, epoch, left))
    here = math.ceil(left / plan.accumulation)
    if keeps_max_steps:
        later = math.ceil((plan.max_steps - step - here) / whole)
        return replace(changed, num_epochs=epoch + 1 + max(later, 0))
    last = plan.max_steps - (plan.num_epochs - 1) * whole  # steps of the last epoch, which a fraction of one may cut
    to_come = plan.num_epochs - 1 - epoch
    if to_come > 0:
        return replace(changed, max_steps=step + here + (to_come - 1) * whole + last)
    unread = max(total - last * plan.accumulation, 0)
    steps = math.ceil((left - unread) / plan.accumulation) if to_come == 0 else 0
    return replace(changed, max_steps=step + max(steps, 0))


def number_of_saves(plan: Plan, args: Any) -> int:
    """Checkpoints that a run writes as often as `args` say, or as many as one may be sure of."""
    if plan.is_open:
        return 1
    every = {"steps": as_steps(args.save_steps, plan.max_steps), "epoch": plan.steps_per_epoch}
    return -(-plan.max_steps // max(every.get(str(args.save_strategy)) or plan.max_steps, 1))


def steps_left(state: Any, max_tokens: float) -> float | None:
    """Optimizer steps to the end of a run with this `TrainerState`, estimated where `max_tokens` ends it; None:
    unknown.
    """
    left, seen = state.max_steps - state.global_step, state.num_input_tokens_seen
    by_tokens = state.global_step * max(max_tokens - seen, 0) / seen if seen else math.inf
    if state.max_steps >= NEVER:
        return None if math.isinf(by_tokens) else by_tokens
    return min(left, by_tokens)


def check_intervals(plan: Plan, args: Any) -> None:
    """Raise a `ValueError` for an interval in epochs where the data has no known length, or for a share of a run
    without one.
    """
    for name in ("logging_steps", "eval_steps", "save_steps"):
        interval = vars(args)[name]
        if plan.steps_per_epoch is None and isinstance(interval, str) and parse(interval).unit == "epochs":
            raise ValueError(
                f"{name}={interval!r} counts epochs, but the training data has no known length (it is iterable without "
                "__len__). Count steps (500), tokens (10Mtok) or time (30min)."
            )
        by_steps = vars(args)[name.replace("_steps", "_strategy")] == "steps"
        if plan.is_open and by_steps and isinstance(interval, float) and interval < 1:
            raise ValueError(
                f"{name}={interval} is a share of all optimizer steps, whose number is unknown, since the training "
                "data has no known length. Count steps (500), tokens (10Mtok) or time (30min)."
            )
