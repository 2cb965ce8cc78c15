"""The guards of a run: what looks at each optimizer step before it is applied, and may leave it out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

from posttrain.core.models import compiling
from posttrain.core.training import loss_spikes, nonfinite, nonfinite_report, override_checks
from posttrain.core.training.nonfinite import Update
from posttrain.core.training.owner import Owner


class Guard(Protocol):
    """Looks at each optimizer step before it is applied."""

    def may_step(self, optimizer: Any, update: Update, loss_scale: Callable[[], float] | None = None) -> bool:
        """Whether `optimizer` may apply `update`.

        Args:
            loss_scale: returns the scale of an active loss scaler.
        """

    def settle(self) -> Any:
        """Check all steps that were applied unchecked: before a log record, an evaluation or a checkpoint."""

    def logged(self) -> dict[str, int]:
        """Counts since the last call, of a record."""


def make(owner: Owner) -> tuple[nonfinite.FiniteGuard, loss_spikes.SpikeWatch | None]:
    """(the guard against steps that are not finite, that against spikes of the loss where `on_loss_spike` asks)."""
    args, dist, policy = owner.args, owner.dist, owner.args.on_nonfinite
    if policy == "stop" and dist.scaler is None and nonfinite.has_float16(owner.model):
        policy = "skip"  # as a loss scaler would: that one batch overflows in 16 bits is no fault of the run
    report = nonfinite_report.Reporter(
        owner.model,
        args.on_nonfinite,
        args.output_dir,
        rank=dist.rank,
        world_size=dist.world_size,
        gather=dist.gather_object,
        rows_of=lambda epoch, number: rows_of(owner, epoch, number),
        find=lambda update: find_fault(owner, update),
    )
    total = dist.sum if dist.world_size > 1 else None
    finite = nonfinite.FiniteGuard(policy, args.max_nonfinite_steps, report, total)
    return finite, loss_spikes.watch(args, total, dist.world_size, report.named)


def rows_of(owner: Owner, epoch: int, number: int) -> list[int] | None:
    """Indices of the dataset in micro-batch `number` of `epoch`; None where batches are made in some other way."""
    if not all(override_checks.is_from(owner, method, "Trainer") for method in ("windows", "get_batch_samples")):
        return None
    return owner.run.loader.rows_of(epoch, number)


def find_fault(owner: Owner, update: Update) -> str | None:
    """Where the numbers of `update` go bad, found by running it again; nothing of that is kept."""
    objective, run = owner.scaling.objective, owner.run

    def again(batch: Any) -> torch.Tensor:
        if not owner.scaling.steps_in_backward:
            return owner.training_step(*(owner.model, batch, update.num_items)[: run.step_takes])
        with torch.no_grad(), owner.compute_loss_context_manager():
            inputs = owner.prepare_inputs(batch)
            return objective(owner.compute_loss, owner.model, inputs, update.num_items)[0]

    before, run.num_items = run.num_items, update.num_items
    with contextlib.ExitStack() as apart:
        for context in (owner.metrics.apart(), objective.frozen(), compiling.uncompiled()):
            apart.enter_context(context)
        apart.callback(objective.take_terms)
        apart.callback(setattr, run, "num_items", before)
        return nonfinite_report.find_fault(update, owner.model, run.parameters, again)
