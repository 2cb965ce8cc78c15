"""Elastic jobs: where a job that its launcher has restarted goes on, and what each process then takes over where their
number is another one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.core.checkpoint import codec
from posttrain.core.checkpoint.arguments import AUTO
from posttrain.core.checkpoint.store import Store
from posttrain.core.data import pipeline
from posttrain.core.data.rng import rng_state, set_rng_state
from posttrain.core.errors import CheckpointError
from posttrain.core.logging.metrics import Metrics

logger = logging.getLogger(__name__)


def starting_point(
    store: Store, wanted: bool | str | Path | None, environ: Mapping[str, str] = os.environ
) -> Path | None:
    """The checkpoint from which a run that was asked to resume from `wanted` starts; None: from the beginning. A job
    that its launcher has restarted (``torchrun --max-restarts``, by its variables in `environ`) goes on from the newest
    whole checkpoint that it has written, whatever its first start was asked for. Raises a `CheckpointError` where
    `wanted` is damaged or not there; or where the job may be restarted, and would then go on from a checkpoint of an
    earlier run.
    """
    restarts, may_restart = (int(environ.get(f"TORCHELASTIC_{n}", 0)) for n in ("RESTART_COUNT", "MAX_RESTARTS"))
    if (wanted == AUTO or restarts) and (store.has_begun() or wanted in (AUTO, None, False)):
        start = store.resolve(True) if store.has_begun() else None
        place = f"the beginning, for {store.output_dir} holds no checkpoint yet" if start is None else str(start)
        logger.info("%sThe run starts from %s.", f"Restart {restarts} of this job. " if restarts else "", place)
        return start
    start = store.resolve(wanted) if wanted else None
    newest = store.newest_whole() if may_restart else None
    if newest is not None and (start is None or start.resolve() != newest.resolve()):
        raise CheckpointError(
            f"The launcher may restart this job (max_restarts={may_restart}), which then goes on from the newest "
            f"checkpoint in {store.output_dir}. That would be {newest.name}, of an earlier run. Set "
            f"resume_from_checkpoint={AUTO!r} to go on from it now, or set another output_dir."
        )
    return start


def load(checkpoint: Path, rank: int, world_size: int) -> dict[str, Any]:
    """The state of process `rank`: its own, or merged from all if the number of processes changed, and then without
    random numbers (``"rng"`` is None). Raises a `CheckpointError` where that of a process is missing.
    """
    count = len(list(Path(checkpoint).glob("rank-*.json")))
    if count == world_size:
        return codec.load_tree(Path(checkpoint) / f"rank-{rank}")
    saved = [codec.load_tree(Path(checkpoint) / f"rank-{number}") for number in range(count)]
    if not saved:
        raise CheckpointError(f"{checkpoint} holds the state of no process: rank-0.json is missing.")
    return saved[0] | {"trainer": dealt([one["trainer"] for one in saved], rank, world_size), "rng": None}


def dealt(states: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """The trainer state of one process, merged from those of all earlier processes: metrics are joined and given to the
    first, and the data position is counted in rows and equal in all. Raises a `CheckpointError` where each process read
    its own shards of a stream.
    """
    first, before = states[0], len(states)
    if any(state["loader"].get("dataset") != first["loader"].get("dataset") for state in states):
        raise CheckpointError(
            f"Each of {before} processes read its own shards of the stream, so its position fits no other number. "
            f"Resume with {before} processes, or set ignore_data_skip=True to restart the epoch's data."
        )
    everyone = Metrics()
    for state in states:
        everyone.update(state["metrics"])
    metrics: dict[str, Any] = everyone.state_dict()
    # A step's loss is the mean over processes of their shares times their number, so the weight of a step must stay the
    # same.
    share = world_size / before
    if "loss" in metrics:
        metrics["loss"] = (metrics["loss"][0] * share, metrics["loss"][1] * share)
    progress = dict(first["progress"])
    progress["loss_sum"], progress["loss_count"] = progress["loss_sum"] * share, progress["loss_count"] * share
    return first | {"metrics": metrics if rank == 0 else {}, "progress": progress}


def fresh_random_numbers(seed: int, step: int, rank: int) -> dict[str, Any]:
    """The state of generators seeded for this position of the run; this process's generators do not change."""
    if rank == 0:
        logger.warning(
            "The checkpoint has another number of processes: the remaining rows stay the same, and random numbers "
            f"(dropout) are reseeded from seed {seed} and step {step}."
        )
    before = rng_state()
    pipeline.set_seed(int(np.random.SeedSequence((seed, step, rank)).generate_state(1)[0]))
    fresh = rng_state()
    set_rng_state(before)
    return fresh
