"""Resuming: the plan, the best model and the data position of a run that starts from a checkpoint."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

from torch.utils.data import SequentialSampler

from posttrain.core.checkpoint import elastic, sharded
from posttrain.core.checkpoint.foreign import Taken
from posttrain.core.checkpoint.manifest import is_foreign
from posttrain.core.data.samplers import EpochSampler
from posttrain.core.optim import lr_scheduler as schedules
from posttrain.core.optim import schedule
from posttrain.core.state import TrainerState
from posttrain.core.training.plan import Plan, resumed
from posttrain.core.training.run import RunState

logger = logging.getLogger(__name__)


def resume_plan(
    plan: Plan, checkpoint: Path, rows_per_step: int, rows_per_batch: int, rank: int, world_size: int, by_steps: bool
) -> Plan:
    """`plan` for a run that resumes from `checkpoint`, whose optimizer steps may have held another number of rows.

    Args:
        rows_per_step: batch x accumulation x processes.
        rows_per_batch: rows that the loader draws at once, on all processes.
        by_steps: the run ends after `max_steps`, and not with its epochs.
    """
    if not sharded.is_there(checkpoint, "rank-0"):
        return _plan_without_position(plan, checkpoint, by_steps)
    saved = elastic.load(checkpoint, rank, world_size)
    if saved.get("rows_per_update", rows_per_step) == rows_per_step:
        return plan
    step = TrainerState.load_from_json(checkpoint / "trainer_state.json").global_step
    progress, position = saved["trainer"]["progress"], saved["trainer"]["loader"]
    ended = progress["epoch_ended"] or position["epoch"] > progress["epoch"]
    batches = 0 if ended else sum(position["given"]) // rows_per_batch
    changed = resumed(plan, step, progress["epoch"] + ended, batches, by_steps)
    logger.warning(
        "A step holds %d rows (batch x accumulation x processes) and held %d in %s: the data continues with the row "
        "at which the checkpoint stands, %d steps are left, and the schedule ends at step %d. global_batch_size=%d "
        "would keep the step, with any number of processes.",
        rows_per_step, saved["rows_per_update"], checkpoint, changed.max_steps - step, changed.max_steps,
        saved["rows_per_update"],
    )  # fmt: skip
    return changed


def _plan_without_position(plan: Plan, checkpoint: Path, by_steps: bool) -> Plan:
    state = TrainerState.load_from_json(checkpoint / "trainer_state.json")
    if plan.steps_per_epoch is None or (at := position(plan, state)) == plan.position(state.global_step):
        return plan
    changed = resumed(plan, state.global_step, *at, by_steps)
    logger.warning(
        "%s stands at epoch %.4g after %d steps, so its steps held another number of rows: the data continues there, "
        "%d steps are left, and the schedule ends at step %d.",
        checkpoint, state.epoch, state.global_step, changed.max_steps - state.global_step, changed.max_steps,
    )  # fmt: skip
    return changed


def position(plan: Plan, state: TrainerState) -> tuple[int, int]:
    """(epoch, micro-batches of it already drawn) of a checkpoint that holds `state` and no position of the data.

    Where its steps held another number of rows, the share of the epoch that they had read tells.
    """
    epoch, batches = plan.position(state.global_step)
    length = plan.batches_per_epoch or 1
    if not state.epoch or abs(plan.epoch_at(epoch, batches, state.global_step) - state.epoch) < 0.5 / length:
        return epoch, batches
    return int(state.epoch), int((state.epoch % 1) * length + 1e-6)


def without_position(
    checkpoint: Path, plan: Plan, state: TrainerState, run: RunState, lr_scheduler: Any, taken: Taken, skips_data: bool
) -> None:
    """Move `run` and `lr_scheduler` to where `checkpoint` stands, which holds no position: it is of `save_only_model`
    or of another trainer.

    Args:
        taken: what was loaded from it already.
        skips_data: whether to skip the rows of the steps that are done (`ignore_data_skip` is not set).
    """
    step, lacks = state.global_step, list(taken.lacks)
    if "schedule" not in taken.parts and not schedules.follows_a_metric(lr_scheduler):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the optimizer has made no step yet
            for _ in range(min(step, 1) if isinstance(lr_scheduler, schedule.TokenLR) else step):
                schedule.step(lr_scheduler, state.num_input_tokens_seen)
    run.progress.last_logged, run.rng = step, taken.rng
    data = _seek(run, plan, state) if plan.steps_per_epoch is not None and skips_data else "starts from the beginning"
    known = "holds no optimizer and no random state (save_only_model=True): both start anew."
    if is_foreign(checkpoint):
        if (checkpoint / "training_args.bin").is_file():
            lacks.append("the arguments (training_args.bin is a pickle; those of this run count)")
        parts, missed = ", ".join(["weights", "log", "step", *taken.parts]), "; ".join(lacks) or "nothing"
        known = "was written by another trainer, such as transformers' or trl's, and cannot be verified. "
        known += f"Taken from it: {parts}. Not taken: {missed}."
    logger.warning("%s %s The schedule continues at step %d, and the data %s.", checkpoint, known, step, data)


def _seek(run: RunState, plan: Plan, state: TrainerState) -> str:
    """Let the data continue after `state`; what it does, in words."""
    run.progress.epoch, batches = position(plan, state)
    run.loader.set_epoch(run.progress.epoch)
    if len(run.loader) != plan.batches_per_epoch:  # each batch of it is several of the plan
        return f"begins with epoch {run.progress.epoch}"
    run.progress.batches = batches
    run.loader.skip(batches)
    of_transformers = type(run.loader.sampler) in (EpochSampler, SequentialSampler)
    order = "in the order of transformers' Trainer" if of_transformers else "in an order of this run's own"
    return f"continues with batch {batches} of epoch {run.progress.epoch}, {order} for its seed"


def drop_missing_best(state: TrainerState, metric: str | None, is_there: bool) -> None:
    """Warn at once, rather than when it is to be loaded, that the best checkpoint of `state` is gone, and forget it."""
    if state.best_model_checkpoint is None or is_there:
        return
    logger.warning(
        "The best checkpoint so far, %s (%s=%s), is no longer there. The best of those that follow is kept if it is "
        "better than that.", state.best_model_checkpoint, metric, state.best_metric,
    )  # fmt: skip
    state.best_model_checkpoint = None
