"""Waits of unlimited length for another process, through the shared store instead of a collective.

A collective has a time limit, but data preparation may take hours. Such a wait ends when the work is done, fails, or
its process dies: processes send a heartbeat at least four times a minute.

torchrun keeps one store for all starts of a job (torch 2.13; `TORCH_DISABLE_SHARE_RDZV_TCP_STORE` makes it a new one
for each). A process that looks for the address of another one there may find that of a process that is dead, and one
that waits for a message may find that of an earlier start. So the processes of a start agree on a name, under which
they keep their keys.
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

_ALIVE, _WAIT, _KEY = "posttrain/alive", "posttrain/wait", "posttrain/attempt"
SCHEME = "posttrain-attempt"
LEFT = "left"
SILENCE = 60.0  # least seconds without a sign of life after which a process of another machine counts as gone
_FIRST_WORD = 60.0  # seconds after which a wait is logged


class LostProcessError(RuntimeError):
    """The process that this one waited for has ended; see its error."""


def _machine() -> str:
    """What two processes must share to see each other's process numbers."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{socket.gethostname()} {space}"


def beat(store: Any, rank: int, count: int | str) -> None:
    """Show that this process lives, or that it ends as it should (`LEFT`)."""
    store.set(f"{_ALIVE}/{rank}", f"{count}\n{os.getpid()}\n{_machine()}")


class _Pulse:
    """Whether the process `rank` lives, as far as can be seen from here."""

    def __init__(self, store: Any, rank: int, seconds: float) -> None:
        self.store, self.rank, self.limit = store, rank, max(seconds, SILENCE)
        self.last, self.seen = "", time.monotonic()

    def problem(self) -> str | None:
        said, now = read(self.store, f"{_ALIVE}/{self.rank}"), time.monotonic()
        if said != self.last:
            self.last, self.seen = said, now
        if _has_ended(said):
            return "has ended"
        return f"has shown no sign of life for {self.limit:g} s" if now - self.seen > self.limit else None


def read(store: Any, key: str) -> str:
    """What `store` holds under `key`; the empty string where that is nothing."""
    return store.get(key).decode() if store.check([key]) else ""


def _has_ended(said: str) -> bool:
    _, number, machine = said.split("\n") if said else ("", "0", "")
    return machine == _machine() and not _runs(int(number))


def is_lost(store: Any, rank: int) -> bool:
    """Whether process `rank` of this machine was killed, or failed. Of one of another machine it is not known."""
    said = read(store, f"{_ALIVE}/{rank}")
    return not said.startswith(LEFT) and _has_ended(said)


def _runs(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return not Path("/proc/self").exists()  # without /proc it is unknown
    except (OSError, IndexError):
        return True


def portable(error: BaseException | None) -> BaseException | None:
    """`error`, or one with the same message if `error` cannot be pickled."""
    if error is not None and not isinstance(error, Exception):  # Ctrl-C, or the end of the program
        return LostProcessError(f"Another process was ended by {type(error).__name__} while this one waited for it.")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class Waits:
    """Messages between the processes of a run through `store`, a `torch.distributed.Store` that they share, in the same
    order on each. A process on another machine may be silent for so many `seconds`.
    """

    def __init__(self, store: Any, rank: int, world_size: int, seconds: float) -> None:
        self.store, self.rank, self.world_size, self.seconds = store, rank, world_size, seconds
        self._count = 0
        self._said: list[str] = []

    def next(self) -> str:
        """A name for what follows, the same in each process."""
        self._count += 1
        return f"{_WAIT}/{self._count}"

    def tell(self, name: str, value: Any) -> None:
        """Release the processes that wait in `hear` for this process under `name`. Raises a `LostProcessError` where
        the process that keeps the store has ended.
        """
        try:
            self.store.set(f"{name}/{self.rank}", pickle.dumps(value))
        except RuntimeError as error:
            raise LostProcessError(f"The processes cannot reach each other any more ({error}).") from error
        self._said.append(f"{name}/{self.rank}")

    def hear(self, name: str, rank: int, what: str) -> Any:
        """Wait for the message of process `rank` under `name`; the log describes the wait by `what`. Raises a
        `LostProcessError` where it ended without a message.
        """
        key, pause, began = f"{name}/{rank}", 0.001, time.monotonic()
        pulse, looked, word = _Pulse(self.store, rank, self.seconds), began, _FIRST_WORD
        try:
            while not self.store.check([key]):
                time.sleep(pause)
                pause, now = min(pause * 1.5, 0.25), time.monotonic()
                if now - looked > 1:
                    looked = now
                    if (problem := pulse.problem()) is not None and not self.store.check([key]):
                        raise LostProcessError(f"Process {rank} {problem}, and this one waited for it: {what}.")
                if now - began > word:
                    logger.info("Process %d has waited %.0f s for process %d: %s.", self.rank, word, rank, what)
                    word *= 2
            return pickle.loads(self.store.get(key))
        except LostProcessError:
            raise
        except RuntimeError as error:  # torch's errors of a store that is gone
            raise LostProcessError(
                f"The processes cannot reach each other any more ({error}), and this one waited for process {rank}: "
                f"{what}."
            ) from error

    def all_come(self, name: str, seconds: float) -> bool:
        """Whether every process comes here with the same `name`, and has waited as often as this one before, within
        `seconds`: only then can what follows wait for the others.
        """
        key = f"{_WAIT}/{self._count} {name}"
        wanted = [f"{key}/all"] if self.rank else [f"{key}/{rank}" for rank in range(self.world_size)]
        until = time.monotonic() + seconds * (1 + (self.rank > 0))  # rank 0 decides, and the others wait for it
        try:
            self.store.set(f"{key}/{self.rank}", "here")
            while not self.store.check(wanted):
                if time.monotonic() > until:
                    return False
                time.sleep(0.05)
            self.store.set(f"{key}/all", "here")
        except RuntimeError:  # torch's errors of a store that is gone, with the process that held it
            return False
        return True

    def gather(self, value: Any, what: str) -> list[Any]:
        """What every process passed, in rank order."""
        name, said = self.next(), self._said
        self._said = []
        self.tell(name, value)
        if self.rank:
            values = self.hear(f"{name}/all", 0, what)
        else:
            values = [value, *(self.hear(name, rank, what) for rank in range(1, self.world_size))]
            self.tell(f"{name}/all", values)
        for key in said:  # all processes are here and have read the earlier messages
            self.store.delete_key(key)
        return values

    def break_off(self, error: BaseException) -> None:
        """Have the others find `error` in place of what this process passes to their next `gather`, in which they wait
        for it or will: it does not come.
        """
        name, said = self.next(), portable(error)
        self.tell(name if self.rank else f"{name}/all", said if self.rank else [said])


# ------------------------------------------------------------------------------------------------- starts of a job


def init_method(environ: Mapping[str, str] = os.environ) -> str | None:
    """The ``init_method`` for the process group of a job that may be restarted with its store; None: torch's own."""
    shares = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not shares or not int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        return None
    _register()
    return f"{SCHEME}://"


@functools.cache
def _register() -> None:
    torch.distributed.register_rendezvous_handler(SCHEME, _meet)


def _meet(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    store, rank, world_size = next(torch.distributed.rendezvous("env://", **options))
    yield torch.distributed.PrefixStore(agreed_name(store, rank, world_size), store), rank, world_size


def agreed_name(store: Any, rank: int, world_size: int, seconds: float = 600) -> str:
    """A name that all processes of this start have, and those of no other start; `store` may hold the keys of earlier
    ones. Rank 0 answers each process with what that one has just made up, so that no answer to an earlier start is
    taken for one, until all have said that they know its name. Raises a `TimeoutError` where some do not come within
    `seconds`.
    """
    own, until = uuid.uuid4().hex, time.monotonic() + seconds
    if rank:
        store.set(f"{_KEY}/hello/{rank}", own)
        while not (answer := read(store, f"{_KEY}/welcome/{rank}")).startswith(own):
            _pause(until, "rank 0")
        name = answer.partition(" ")[2]
        store.set(f"{_KEY}/known/{rank}", name)
        return name
    answered: dict[int, str] = {}
    missing = set(range(1, world_size))
    while missing:
        for other in sorted(missing):
            hello = read(store, f"{_KEY}/hello/{other}")
            if hello and hello != answered.get(other):
                store.set(f"{_KEY}/welcome/{other}", f"{hello} {own}")
                answered[other] = hello
            if read(store, f"{_KEY}/known/{other}") == own:
                missing.discard(other)
        if missing:
            _pause(until, f"ranks {', '.join(map(str, sorted(missing)))}")
    return own


def _pause(until: float, whom: str) -> None:
    if time.monotonic() > until:
        raise TimeoutError(f"The processes of this job could not begin: no word from {whom}. See their own errors.")
    time.sleep(0.01)
