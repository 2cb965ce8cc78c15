"""One checkpoint written by all processes of a run: it is there whole, or not at all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.core.checkpoint.store import Store
from posttrain.core.errors import CheckpointError

logger = logging.getLogger(__name__)


def transact(
    store: Store,
    step: int,
    write: Callable[[Path], None],
    *,
    is_main: bool,
    gather: Callable[[Any], list[Any]] = lambda value: [value],
    extra: dict[str, Any] | None = None,
    leader: int = 0,
) -> Path | None:
    """Let every process `write` into one temporary directory, then commit it as ``checkpoint-<step>``.

    Args:
        write: writes this process' files into the directory it is given.
        gather: lists what every process passed, in rank order; also the barrier between writing and committing.
        leader: the process with `is_main` whose directory this one writes into: rank 0, or the first of its machine.

    Returns:
        The checkpoint, or None where a write failed on any process (a full disk, a lost mount): what was written is
        removed, the failure is logged once, and the older checkpoints are untouched.
    """
    temp, failure = None, None
    if is_main:
        try:
            temp = store.begin(step)
        except (OSError, CheckpointError) as error:
            failure = str(error)
    temp = gather(temp)[leader]
    if temp is not None:
        try:
            with store.writing(temp):
                write(temp)
        except (OSError, CheckpointError) as error:
            failure = f"{type(error).__name__}: {error}"
        except BaseException:
            store.abort(temp)
            raise
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(gather(failure)) if text]
    final = None
    if is_main and not failures:
        try:
            final = store.commit(temp, extra)
        except (OSError, CheckpointError) as error:
            failures = [str(error)]
    if is_main and failures:
        if temp is not None:
            store.abort(temp)
        logger.warning(
            "checkpoint-%d was not saved: %s. Training goes on and saving is tried again at the next save; the "
            "checkpoints before it are untouched.", step, "; ".join(failures),
        )  # fmt: skip
    return gather(final)[leader]
