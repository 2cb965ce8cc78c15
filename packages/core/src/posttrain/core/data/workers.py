"""Manages data loader workers: signals, shutdown, and what is said of one that fails."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.connection
import multiprocessing.util  # whose own work at the end of the program must be registered before ours
import os
import pickle
import re
import signal
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from posttrain.core.errors import DataError

ROWS_NAMED = 16

_readers: weakref.WeakKeyDictionary[DataLoader[Any], weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
# By process id, what is said of a worker that ended on its own.
_ended: dict[int, str] = {}

# Whether this process continues for a while after a SIGTERM and needs rows. The workers read it from shared memory,
# because a launcher may send the signal to all processes at once.
_goes_on = False
_shown: torch.Tensor | None = None


def keep_through_sigterm(on: bool) -> None:
    """Whether workers, those of the present and of the future, are to outlive a first SIGTERM."""
    global _goes_on
    _goes_on = on
    if _shown is not None:
        _shown.fill_(on)


class WorkerStart:
    """Initialize a worker: it ignores SIGINT and SIGHUP, and one SIGTERM if its parent continues (see
    `keep_through_sigterm`), because the current optimizer step still needs rows; `then` comes the user's
    ``worker_init_fn``.
    """

    def __init__(self, then: Callable[[int], None] | None = None) -> None:
        global _shown
        if _shown is None:
            _shown = torch.full((1,), _goes_on, dtype=torch.uint8).share_memory_()
        self.then, self._shown = then, _shown

    def __call__(self, worker: int) -> None:
        for ignored in {"SIGINT", "SIGHUP"} & signal.Signals.__members__.keys():
            signal.signal(signal.Signals[ignored], signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        if self.then is not None:
            self.then(worker)

    def _on_sigterm(self, number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        if not self._shown[0]:
            os.kill(os.getpid(), number)


def iterate(loader: DataLoader[Any], owner: Any) -> Iterator[Any]:
    """``iter(loader)``, with workers that `end` can stop; `explain` names one that ends on its own.
    ``owner.rows_ahead(n)`` are the rows of the batch n batches after the one that is waited for, or None.
    """
    try:
        reader: Any = iter(loader)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        start = (loader.multiprocessing_context or multiprocessing).get_start_method()
        if loader.num_workers and start != "fork":
            error.add_note(
                f"Workers that are started by {start} get the dataset and the collator pickled. Define their classes "
                "and functions at the top level of a module, or set dataloader_num_workers=0 or "
                "dataloader_multiprocessing_context='fork'."
            )
        raise
    if not hasattr(reader, "_workers"):
        return reader
    reader.rows_ahead = weakref.WeakMethod(owner.rows_ahead)
    _readers.setdefault(loader, weakref.WeakSet()).add(reader)
    return _read(reader)


def _read(reader: Any) -> Iterator[Any]:
    """The batches of `reader`, with an error that `explain` knows where a worker breaks off in a message."""
    with explained():
        try:
            yield from reader
        except DataError as error:  # torch lets its text begin with the traceback of the worker
            _, found, own = str(error).rpartition(f"\n{DataError.__module__}.{DataError.__name__}: ")
            if not found:
                raise
            raise DataError(own.strip()) from error
        except (ConnectionError, EOFError) as error:
            closed = multiprocessing.connection.wait([worker.sentinel for worker in reader._workers], timeout=1)
            ended = [worker for worker in reader._workers if worker.sentinel in closed]
            for worker in ended:
                worker.join()  # its messages break off before its end is known
            if not ended:
                raise
            pids = ", ".join(str(worker.pid) for worker in ended)
            raise RuntimeError(f"DataLoader worker (pid(s) {pids}) exited unexpectedly") from error
        finally:  # an error somewhere else drops this reader before it is explained
            _remember(reader)


def _remember(reader: Any) -> None:
    """Keep what is to be said of those workers of `reader` that ended on their own."""
    rows_ahead = reader.rows_ahead() or (lambda batches: None)
    for number, worker in enumerate(reader._workers):
        if worker.exitcode:
            due = [i for i, info in sorted(reader._task_info.items()) if info == (number,)]
            rows = [row for i in due for row in rows_ahead(i - reader._rcvd_idx) or ()]
            named = ", ".join(map(str, rows[:ROWS_NAMED])) + (", ..." if len(rows) > ROWS_NAMED else "")
            what = f" while it read rows of the dataset among these: {named}; it ended" if rows else ""
            of = f"Worker {number} of {len(reader._workers)} (dataloader_num_workers)"
            _ended[worker.pid] = f"{of} ended{what} {_cause(worker.exitcode)}"


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Within this context an error for a worker that ended on its own is explained."""
    try:
        yield
    except RuntimeError as error:
        explain(error)
        raise


def explain(error: BaseException) -> None:
    """Add to torch's error for a worker that ended on its own what it read, why it may have ended, and what to set.

    torch raises it wherever this process is when the worker ends, also in the middle of a step.
    """
    if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
        for reader in [reader for readers in _readers.values() for reader in readers]:
            _remember(reader)
        for pid in map(int, re.findall(r"\d+", str(error))):
            if pid in _ended and _ended[pid] not in vars(error).get("__notes__", ()):
                error.add_note(_ended[pid])


def _cause(exit_code: int) -> str:
    """How a worker ended, why that may be, and what to set."""
    alone = "Set dataloader_num_workers=0 to read in the main process, where an error of the dataset shows."
    if exit_code > 0:
        return f"with exit code {exit_code}: something that it called ends the process. {alone}"
    name = signal.Signals(-exit_code).name
    if name == "SIGKILL":
        return (
            "by SIGKILL. The system ends processes in this way when memory runs out (dmesg names them): set a smaller "
            "dataloader_num_workers or dataloader_prefetch_factor. With dataloader_num_workers=0 the main process "
            "reads alone."
        )
    if name == "SIGBUS":
        return (
            "by SIGBUS: /dev/shm has no room for its batches. Enlarge it (docker run --shm-size=8g), or set a smaller "
            "dataloader_num_workers or dataloader_prefetch_factor."
        )
    return f"by {name}: a library that the dataset or the collator calls may have crashed. {alone}"


def end(loader: DataLoader[Any]) -> None:
    """End all workers of `loader`; its next iteration starts new ones."""
    readers = list(_readers.pop(loader, ()))
    if readers:
        loader._iterator = None  # where torch keeps persistent workers
    for reader in readers:
        if any(worker._parent_pid != os.getpid() for worker in reader._workers):
            continue  # this process was forked, and they belong to the other
        reader._shutdown_workers()
        for worker in reader._workers:
            if worker.is_alive():  # stuck where no signal is heard; the program would wait for it for ever
                worker.kill()
                worker.join()


def _end_all() -> None:
    keep_through_sigterm(False)
    for loader in list(_readers):
        end(loader)


atexit.register(_end_all)
