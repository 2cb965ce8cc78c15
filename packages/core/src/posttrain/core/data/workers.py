"""Manages data loader workers: signals and shutdown."""

from __future__ import annotations

import atexit
import multiprocessing.util  # noqa: F401  whose own work at the end of the program must be registered before ours
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

_readers: weakref.WeakKeyDictionary[DataLoader, weakref.WeakSet] = weakref.WeakKeyDictionary()

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
    """Initialize a worker: it ignores SIGINT, and one SIGTERM if its parent continues (see `keep_through_sigterm`),
    because the current optimizer step still needs rows.

    Args:
        then: the user's own ``worker_init_fn``.
    """

    def __init__(self, then: Callable[[int], None] | None = None) -> None:
        global _shown
        if _shown is None:
            _shown = torch.full((1,), _goes_on, dtype=torch.uint8).share_memory_()
        self.then, self._shown = then, _shown

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        if self.then is not None:
            self.then(worker)

    def _on_sigterm(self, number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        if not self._shown[0]:
            os.kill(os.getpid(), number)


def iterate(loader: DataLoader) -> Iterator[Any]:
    """``iter(loader)``, with workers that `end` can stop."""
    reader = iter(loader)
    if hasattr(reader, "_workers"):
        _readers.setdefault(loader, weakref.WeakSet()).add(reader)
    return reader


def end(loader: DataLoader) -> None:
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
