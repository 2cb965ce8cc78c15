"""Ends a run of several processes when one fails or hangs.

A process that waits for another longer than ``ddp_timeout`` sets an alarm in the shared store. A thread of every
process, also of the hanging one, then writes the stacks of all threads and ends the job.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from posttrain.core.distributed.waits import LEFT, LostProcessError, beat, is_lost, read

FOLDER = "hang"
_ALARM, _DONE = "posttrain/alarm", "posttrain/done"
_LOOK = 2.0  # seconds of a wait after which it is seen whether another process of this machine is lost
_FRAMES = 4  # innermost lines of a process that its report names


class Watchdog(threading.Thread):
    """Ends this process, and with it the job, when any process has waited longer than `seconds` for the others.

    The `store`, a `torch.distributed.Store`, is shared by all. Stacks go into ``rank-<k>.txt`` of `folder`. Where one
    of the ranks `beside` this one, on its machine, is lost, a collective of NCCL never ends. The process is ended by
    `leave`: `os._exit`, for the main thread may never return.

    `step` is the optimizer step that this process is in, from 1, or 0 before the first; `batches` the micro-batches of
    its epoch that it had read when that began; `waits` how often it has waited for the others; and `waited` the seconds
    that its main thread has waited so far.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        seconds: float,
        folder: str | Path,
        leave: Callable[[int], Any] = os._exit,
        beside: Iterable[int] = (),
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.store, self.rank, self.world_size = store, rank, world_size
        self.seconds, self.folder, self.leave = seconds, Path(folder), leave
        self.beside = list(beside)
        self._waits: tuple[str, float] | None = None
        self._what = ""
        self.step, self.batches, self.waits, self.waited = 0, 0, 0, 0.0
        self._main = threading.main_thread().ident
        self._stopped = threading.Event()

    def __call__(self, what: str) -> Watchdog:
        """A context in which the main thread waits for the other processes; contexts do not nest."""
        self._what = what
        return self

    def __enter__(self) -> None:
        self.waits += 1
        self._waits = (self._what, time.monotonic())

    def __exit__(self, *error: object) -> None:
        if self._waits is not None:
            self.waited += time.monotonic() - self._waits[1]
        self._waits = None

    def stop(self) -> None:
        """End the thread and wait for it: a thread that still uses the store would abort the interpreter at exit."""
        self._stopped.set()
        if self.is_alive():
            self.join(timeout=5)
            if "last_value" not in vars(sys):  # no error ends this process
                with contextlib.suppress(RuntimeError):  # the store is gone, with its process
                    beat(self.store, self.rank, LEFT)

    def run(self) -> None:
        interval, count = min(1.0, self.seconds / 10), 0
        while not self._stopped.is_set():
            try:
                count += 1
                beat(self.store, self.rank, count)
                what, began = self._waits or ("", math.inf)
                seconds, place = time.monotonic() - began, f"for the others in {what}{self._at()}"
                if seconds > self.seconds:
                    how = f"rank {self.rank} has waited {self.seconds:g} s {place} (ddp_timeout)."
                    self.store.set(_ALARM, f"{how} Check those that did not wait.")
                elif seconds > _LOOK and (lost := [rank for rank in self.beside if is_lost(self.store, rank)]):
                    how = f"rank {self.rank} waits {place}, and rank {lost[0]} has ended."
                    self.store.set(_ALARM, f"{how} See its error.")
                if alarm := read(self.store, _ALARM):
                    return self._end(alarm)
                self._stopped.wait(interval)
            except Exception:  # the store is gone, with the process that kept it: the launcher ends this one
                return

    def _end(self, alarm: str) -> None:
        waits = self._waits
        mine = (
            f"waited in {waits[0]} for {time.monotonic() - waits[1]:.0f} s{self._at()}"
            if waits
            else f"did not wait for the others{self._at()}: it is at {self._place()}"
        )
        path = self.folder / f"rank-{self.rank}.txt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {self.rank} of {self.world_size}, process ")
                file.write(f"{os.getpid()} on {socket.gethostname()}: it {mine}.\nThe alarm: {alarm}\n\n")
                file.flush()
                faulthandler.dump_traceback(file=file, all_threads=True)
        except OSError as error:
            mine += f" (its stacks could not be written: {error})"
        try:
            self.store.set(f"{_DONE}/{self.rank}", mine)
            if self.rank == 0:
                self._report(alarm)
                self.store.set(_DONE, "all")
            else:
                self._wait_for(_DONE, 8)  # else the launcher may end a process that has not written yet
        finally:
            self.leave(1)

    def _at(self) -> str:
        step = f"step {self.step}, from batch {self.batches} of its epoch, " if self.step else ""
        return f" ({step}wait number {self.waits})"

    def _place(self) -> str:
        """Where the main thread is: its innermost lines, the innermost first."""
        frame = sys._current_frames().get(self._main or 0)
        stack = traceback.extract_stack(frame)[-_FRAMES:] if frame is not None else []
        lines = [f"{one.name} ({os.sep.join(Path(one.filename).parts[-2:])}:{one.lineno})" for one in reversed(stack)]
        return ", called by ".join(lines) or "its end"

    def _report(self, alarm: str) -> None:
        lines = []
        for rank in range(self.world_size):
            said = self._wait_for(f"{_DONE}/{rank}", 0 if is_lost(self.store, rank) else 5)
            lines.append(f"  rank {rank} {said or 'did not answer: it is dead, or stopped'}")
        listed = "\n".join(lines)
        message = f"The processes of this run hang: {alarm}\n{listed}\nThe stacks of all threads are in {self.folder}."
        print(message, file=sys.stderr, flush=True)
        record_failure(TimeoutError(message))

    def _wait_for(self, key: str, seconds: float) -> str:
        end = time.monotonic() + seconds
        while not (said := read(self.store, key)) and time.monotonic() < end:
            time.sleep(0.05)
        return said


def record_failure(error: BaseException) -> None:
    """Leave `error` for the launcher (torchrun and those built on it), which shows that of the first process to fail,
    last.
    """
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:
            raise error
        except BaseException as raised:  # so that the handler finds its traceback
            get_error_handler().record_exception(raised)


def report_failures() -> None:
    """From now on, an exception that ends this process is left for the launcher too."""
    if getattr(sys.excepthook, "reports_to_launcher", False) or not os.environ.get("TORCHELASTIC_ERROR_FILE"):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        before(kind, error, traceback)
        if is_consequence(error):
            time.sleep(3)  # the launcher ends this process meanwhile, and takes the one that broke off for the first
        if not issubclass(kind, KeyboardInterrupt):
            record_failure(error)

    hook.reports_to_launcher = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def is_consequence(error: BaseException) -> bool:
    """Whether `error` only reports that another process is gone."""
    signs = "connection (closed by peer|reset by peer|refused)|broken pipe|remote process|ncclRemoteError"
    is_of_torch = isinstance(error, RuntimeError) and re.search(signs, str(error), re.IGNORECASE)
    return isinstance(error, LostProcessError) or bool(is_of_torch)
