"""Writes one checkpoint from all processes atomically, directly or in the background."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.checkpoint.blocks import Digest, Memory, Part
from posttrain.core.checkpoint.store import Store
from posttrain.core.errors import CheckpointError

logger = logging.getLogger(__name__)

_LEAVING = 10.0  # seconds that the first process still waits for the others when training has failed


@dataclass
class Outcome:
    """The result of a save; `path` is None if it failed, which was logged with the reason: `why`, where it is known."""

    step: int
    path: Path | None
    why: str = ""


class Saver:
    """Lets every process write into one temporary directory, then commits it as ``checkpoint-<step>``.

    A write that fails on any process (a full disk, a lost mount) costs only that checkpoint: its files are removed, the
    failure is logged once, and older checkpoints are untouched.

    What every process passed is listed by `gather` in rank order, never from a thread. A process writes into the
    directory of its `leader`: rank 0, or the first of its machine. The first process waits so many seconds (`patience`)
    for files that the others write in the background. `pending` is the step whose save `settle` is still to answer
    for.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int = 0,
        world_size: int = 1,
        gather: Callable[[Any], list[Any]] = lambda value: [value],
        patience: float = 1800.0,
        leader: int = 0,
    ) -> None:
        self.store, self.rank, self.world_size, self.patience = store, rank, world_size, patience
        self._gather, self._leader = gather, leader
        self._team = [other for other, led_by in enumerate(gather(leader)) if led_by == leader]
        self._memory, self._leaving = Memory(), threading.Event()
        self._written: Future[tuple[Path | None, list[str]]] = Future()  # of the save that is pending
        self.pending: int | None = None

    def save(
        self, step: int, write: Callable[[Path], None], later: bool = False, extra: dict[str, Any] | None = None
    ) -> None:
        """Write the checkpoint of `step`, whose manifest keeps `extra`; `settle` returns the result. `write` writes
        this process' files into the directory it is given. `later`: only copy the tensors now, into a reused host
        buffer; a thread writes and commits them. The previous save must be settled.
        """
        if self.pending is not None:
            raise RuntimeError(f"The save of step {self.pending} is not settled yet.")
        temp, failure = None, None
        if self.rank == self._leader:
            try:
                temp = self.store.begin(step)
            except (OSError, CheckpointError) as error:
                failure = str(error)
        temp, part = self._gather(temp)[self._leader], None
        if temp is not None:
            part = Part(temp, self._memory, later)
            try:
                with part.writing():
                    failure = self._attempt(temp, write, temp)
            except BaseException:
                self.store.abort(temp)
                raise
        reports = self._gather((failure, None if later or part is None else part.digests))
        if later and temp is not None and part is not None and not any(failure for failure, _ in reports):
            writer = ThreadPoolExecutor(1, "checkpoint-writer")
            self._written = writer.submit(self._finish, temp, part, extra)
            writer.shutdown(wait=False)  # its thread ends with the save; a program that ends waits for it
        else:
            self._written = Future()
            self._written.set_result(self._conclude(temp, reports, extra))
        self.pending = step  # not before: a signal's error, as of a worker that died, may have come between

    def settle(self, wait: bool = True) -> Outcome | None:
        """The result of the last save, once; None if there is none, or if it is not written yet and this does not
        `wait`. All processes must pass the same value. Raises a background error other than a failed write.
        """
        if self.pending is None or (not wait and any(self._gather(not self._written.done()))):
            return None
        step, self.pending = self.pending, None
        error = self._written.exception()  # once it is written
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(self._gather(error and repr(error))) if text]
        path, failures = self._written.result()  # which raises the error
        if failed:
            raise RuntimeError(f"checkpoint-{step} was not saved: {'; '.join(failed)}.")
        if why := "; ".join(failures).rstrip("."):
            logger.warning(
                f"checkpoint-{step} was not saved: {why}. Training continues, and the next save tries again; earlier "
                "checkpoints are untouched."
            )
        return Outcome(step, *self._gather((path, why))[self._leader])

    def leave(self) -> Path | None:
        """Finish the pending save without the other processes; returns its result."""
        if self.pending is None:
            return None
        step, self.pending = self.pending, None
        self._leaving.set()
        error = self._written.exception()  # once it is written
        self._leaving.clear()
        path, failures = (None, [repr(error)]) if error is not None else self._written.result()
        if failures:
            logger.warning("checkpoint-%d was not saved: %s.", step, "; ".join(failures))
        return path

    def _attempt(self, temp: Path, work: Callable[..., None], *given: Any) -> str | None:
        try:
            with self.store.writing(temp):
                work(*given)
        except (OSError, CheckpointError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _conclude(self, temp: Path | None, reports: list[tuple[Any, Any]], extra: Any) -> tuple[Path | None, list[str]]:
        if self.rank != self._leader:
            return None, []
        failures = [f"rank {rank}: {failure}" for rank, (failure, _) in enumerate(reports) if failure]
        if failures or temp is None:
            if temp is not None:
                self.store.abort(temp)
            return None, failures
        known = {name: digests for rank in self._team for name, digests in reports[rank][1].items()}
        try:
            path = self.store.commit(temp, extra, known)
        except (OSError, CheckpointError) as error:
            self.store.abort(temp)
            return None, [str(error)]
        if self.store.remote is not None:
            self.store.push(self.store.remote)
        return path, []

    # ---- in the background: a thread of each process; files signal what is written ----

    def _finish(self, temp: Path, part: Part, extra: Any) -> tuple[Path | None, list[str]]:
        unexpected, failure = None, None
        try:
            failure = self._attempt(temp, part.finish)
        except Exception as error:
            unexpected, failure = error, repr(error)
        if self.rank != self._leader:
            self._report(temp, failure, part)
            if unexpected is not None:
                raise unexpected
            return None, []
        reports: list[tuple[Any, Any]] = [(None, {})] * self.world_size  # of other machines: each commits for itself
        until = time.monotonic() + self.patience
        for rank in self._team:
            reports[rank] = (failure, part.digests) if rank == self.rank else self._report_of(temp, rank, until)
        if unexpected is not None:
            self.store.abort(temp)
            raise unexpected
        return self._conclude(temp, reports, extra)

    def _report(self, temp: Path, failure: str | None, part: Part) -> None:
        path = _report_path(temp, self.rank)
        try:
            unfinished = path.with_suffix(".tmp")
            unfinished.write_text(json.dumps([failure, part.digests]), encoding="utf-8")
            os.replace(unfinished, path)
        except OSError:
            with contextlib.suppress(OSError):
                path.touch()  # an empty file often fits on a full disk

    def _report_of(self, temp: Path, rank: int, until: float) -> tuple[str | None, dict[str, list[Digest]]]:
        path = _report_path(temp, rank)
        while not path.exists():
            if self._leaving.is_set():
                until = min(until, time.monotonic() + _LEAVING)
                self._leaving.clear()
            if time.monotonic() > until:
                return "its files did not come", {}
            time.sleep(0.02)
        text = path.read_text(encoding="utf-8")
        path.unlink()
        return tuple(json.loads(text)) if text else ("its files could not be written", {})


def _report_path(temp: Path, rank: int) -> Path:
    return temp / f".written-by-{rank}.json"
