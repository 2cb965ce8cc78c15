"""Resuming: the plan, the best model and the data position of a run that starts from a checkpoint."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

from posttrain.core.checkpoint import elastic, sharded
from posttrain.core.optim import lr_scheduler
from posttrain.core.state import TrainerState
from posttrain.core.training.plan import Plan, Progress, resumed

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
        return plan
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
        "at which the checkpoint stands, %d steps are left, and the schedule ends at step %d.",
        rows_per_step, saved["rows_per_update"], checkpoint, changed.max_steps - step, changed.max_steps,
    )  # fmt: skip
    return changed


def from_weights_alone(
    checkpoint: Path, plan: Plan, step: int, progress: Progress, loader: Any, schedule: Any, skips_data: bool
) -> None:
    """Move `schedule`, `loader` and `progress`, which `checkpoint` lacks, to where they would be after `step` steps.

    Args:
        skips_data: whether to skip the rows of those steps (`ignore_data_skip` is not set).
    """
    data = "starts from the beginning"
    if not lr_scheduler.follows_a_metric(schedule):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the optimizer has made no step yet
            for _ in range(step):
                schedule.step()
    if plan.steps_per_epoch is not None and skips_data:
        progress.epoch, batches = plan.position(step)
        loader.set_epoch(progress.epoch)
        data = f"begins with epoch {progress.epoch}"
        if len(loader) == plan.batches_per_epoch:  # else each batch of it is several of the plan
            progress.batches, data = batches, f"continues with batch {batches} of epoch {progress.epoch}"
            loader.skip(batches)
    progress.last_logged = step
    logger.warning(
        "%s holds no optimizer and no random state that can be read (save_only_model=True, or another trainer "
        "wrote it): both start anew. The schedule continues at step %d, and the data %s.", checkpoint, step, data,
    )  # fmt: skip


def drop_missing_best(state: TrainerState, metric: str | None, is_there: bool) -> None:
    """Warn at once, rather than when it is to be loaded, that the best checkpoint of `state` is gone, and forget it."""
    if state.best_model_checkpoint is None or is_there:
        return
    logger.warning(
        "The best checkpoint so far, %s (%s=%s), is no longer there. The best of those that follow is kept if it is "
        "better than that.", state.best_model_checkpoint, metric, state.best_metric,
    )  # fmt: skip
    state.best_model_checkpoint = None
