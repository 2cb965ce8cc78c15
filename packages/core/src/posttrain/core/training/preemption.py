"""Graceful preemption: catches signals and the time limit and stops where the run can resume. And a file by which a
person asks for a checkpoint.

A run checks at the end of each optimizer step and between the batches of an evaluation. Several processes must stop at
the same step: about four times a second they start an asynchronous reduction and act on the result of the previous one.
What takes long and changes nothing that a checkpoint holds, such as sampling, is left at once, see `Watch.at_once`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from posttrain.core.config import opt
from posttrain.core.data import accelerator, workers
from posttrain.core.distributed.waits import LostProcessError, read
from posttrain.core.distributed.world import Maximum, World
from posttrain.core.fields import durations

Value = TypeVar("Value")
SIGNALS = [one for one in signal.Signals if one.name in ("SIGTERM", "SIGINT", "SIGHUP")]
#: A reason to leave, below those of signals, which are the exit codes that they lead to.
TIME_IS_UP = 1
#: A file of this name in the output folder asks for a checkpoint. It is removed when it is seen.
SAVE_NOW = "save_now"
#: Seconds between two looks for it, and between two reductions, about.
INTERVAL = 0.25


@dataclass
class InterruptArguments:
    """What happens when a run is to end before it is done."""

    save_on_signal: bool | None = opt(
        None,
        "At SIGTERM, SIGINT (Ctrl-C) or SIGHUP (a terminal that is closed), finish the optimizer step, save a "
        "checkpoint and end with exit code 143, 130 or 129; a second signal ends at once. None: unless save_strategy "
        "is 'no'.",
        flag=True,
    )
    enable_jit_checkpoint: bool = opt(
        False, "transformers' name for `save_on_signal`: on, signals are answered with save_strategy='no' too."
    )
    save_on_exception: bool = opt(
        False,
        "If training raises, save the last complete optimizer step first; of several processes, if all of them raise "
        "in the same step. Costs a copy of the random state at each step.",
    )
    max_time: float | str | None = opt(
        None,
        "Save a checkpoint and stop after this time: seconds, '[days:]hours:minutes:seconds', or such as 90min or 2h. "
        "The current optimizer step is finished first, so leave time for it and for the save.",
    )

    def _problems(self) -> Iterator[str]:
        try:
            if self.max_time is not None and seconds(self.max_time) <= 0:
                yield f"max_time={self.max_time!r} must be more than nothing"
        except ValueError:
            how = "give seconds, '[days:]hours:minutes:seconds', or such as 90min or 2h"
            yield f"max_time={self.max_time!r} is no time: {how}"


def saves_on_signal(args: Any) -> bool:
    """Whether a signal makes the run save a checkpoint."""
    if args.save_on_signal is None:
        return args.save_strategy != "no" or args.enable_jit_checkpoint
    return args.save_on_signal


def may_save(args: Any) -> bool:
    """Whether the arguments let the run save a checkpoint at all."""
    return args.save_strategy != "no" or saves_on_signal(args) or args.save_on_exception or args.max_time is not None


def seconds(duration: float | str) -> float:
    """``"1:30:00"`` or ``"90min"`` -> 5400.0; a number, or its text, is seconds already. Raises a `ValueError` where it
    is neither.
    """
    if not isinstance(duration, str) or re.fullmatch(r"\s*\d+(\.\d*)?\s*", duration):
        return float(duration)
    if ":" not in duration:
        value, unit = durations.parse(duration)
        if unit != "seconds":
            raise ValueError(f"{duration!r} is no time")
        return value
    match = re.fullmatch(r"\s*(?:(\d+):)?(\d+):([0-5]?\d):([0-5]?\d)\s*", duration)
    if match is None:
        raise ValueError(f"{duration!r} is no duration")
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


class Left(BaseException):
    """Training is left: its checkpoint is written. The `reason` is 128 + the number of the signal, or `TIME_IS_UP`. Not
    an `Exception`, so that no code in between takes it for an error.
    """

    def __init__(self, reason: int) -> None:
        super().__init__(reason)
        self.reason = reason

    def exit(self) -> BaseException | None:
        """Ends the program with exit code 128 + the signal's number, which a scheduler distinguishes from success. None
        for the time limit.
        """
        if self.reason == TIME_IS_UP:
            return None
        return (Interrupted if self.reason == 128 + signal.SIGINT else SystemExit)(self.reason)


class Interrupted(KeyboardInterrupt, SystemExit):
    """Ctrl-C, after the checkpoint: scripts and notebooks catch it as the `KeyboardInterrupt` that they expect, and a
    program that does not catch it ends with its exit code.
    """

    def __init__(self, code: int) -> None:
        SystemExit.__init__(self, code)


def what_ended(error: BaseException) -> str:
    """What ended a run that `error` left: its time limit, a signal, or the class of the error."""
    end = error.exit() if isinstance(error, Left) else error
    if end is None:
        return "its time limit"
    if isinstance(end, SystemExit) and not isinstance(end, Interrupted):
        return next((one.name for one in SIGNALS if end.code == 128 + one), "SystemExit")
    return "Ctrl-C" if isinstance(end, KeyboardInterrupt) else type(end).__name__


class EvaluationLeft(Left):
    """Aborts an evaluation because the run must end; it is repeated when the run resumes."""


class Watch:
    """Catches signals (if `on_signals`) and a time limit, so many seconds after `begin`, from `begin` to `end`.
    Handlers are set in the main thread only, and only if the program has none. All of `world_size` processes get the
    same result from `due`.

    It also looks for a `file` that asks for a checkpoint once it is there, None where another process does.
    `asks_for_save` then is True on all processes alike; who saves it clears it.
    """

    def __init__(
        self,
        on_signals: bool = True,
        limit: float | None = None,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        file: Path | None = None,
    ) -> None:
        self.asks_for_save, self._file, self._looked = False, file, -INTERVAL
        self.on_signals, self.limit, self.world_size = on_signals, limit, world_size
        self._device = torch.device(device)
        self._reason, self._terminals = 0, [number for number in (1, 2) if os.isatty(number)]
        self._until: float | None = None
        self._before: dict[int, Any] = {}
        self._maximum: Maximum | None = None
        self._calls, self._every, self._asked = 0, 1, time.monotonic()
        self._process, self._leaves_at_once = os.getpid(), False

    def begin(self) -> None:
        """Notice from now on."""
        self._until = None if self.limit is None else time.monotonic() + self.limit
        if self.on_signals and threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.getsignal(number)
                if before in (signal.SIG_DFL, signal.default_int_handler):
                    self._before[number] = before
                    signal.signal(number, self._notice)
        workers.keep_through_sigterm(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)

    def end(self) -> None:
        """Give the signals back; the run is over."""
        self._give_back()
        workers.keep_through_sigterm(False)

    def _give_back(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def at_once(self, work: Callable[[], Value], dist: World) -> Value:
        """``work()``, which a signal ends: it raises `Left` in the main thread, also one that has come before. Several
        processes call this together, for work in which none waits for another, and meet afterwards: a signal to one
        ends the work of all that are still at it, and either all raise `Left` or none does.
        """
        if dist.waits is None or not self.on_signals:
            return self._until_signal(work)
        found, error, name = None, None, dist.waits.next()
        with self._listening(dist.waits.store, name):
            try:
                found = self._until_signal(work)
            except (Left, ConnectionError) as caught:  # a lost engine is asked again, once all have come here
                error = caught
            except BaseException as caught:
                with contextlib.suppress(LostProcessError):  # the others are gone
                    dist.waits.break_off(caught)
                raise
            own = error.reason if isinstance(error, Left) else 0
            ends = dist.gather_patiently(own, "that all have ended what each does by itself")
        if failed := [one for one in ends if isinstance(one, Exception)]:
            raise failed[0]
        if reason := max(ends):
            raise Left(reason)
        if error is not None:
            raise error
        return cast(Value, found)

    def _until_signal(self, work: Callable[[], Value]) -> Value:
        try:
            self._leaves_at_once = True
            if self._reason:
                self._leave()
            return work()
        finally:
            self._leaves_at_once = False

    def _leave(self, *_: Any) -> None:
        """Raise `Left` where a signal does, and once: what catches it must not be left in its turn."""
        if self._leaves_at_once:
            self._leaves_at_once = False
            raise Left(self._reason)

    @contextlib.contextmanager
    def _listening(self, store: Any, name: str) -> Iterator[None]:
        """In this context a thread tells the other processes of a signal to this one, under `name` in their `store`. It
        interrupts the main thread where one of them has had a signal.
        """
        if threading.current_thread() is not threading.main_thread():
            yield  # signals are not caught
            return
        over, main = threading.Event(), threading.get_ident()

        def listen() -> None:
            with contextlib.suppress(RuntimeError):  # the store is gone, with its process: the main thread finds that
                while not over.wait(INTERVAL):
                    if self._reason:
                        store.set(name, str(self._reason))
                        return
                    if said := read(store, name):
                        self._reason = int(said)
                        signal.pthread_kill(main, signal.SIGURG)
                        return

        before = signal.signal(signal.SIGURG, self._leave)  # see `posttrain.rl.rewards.background`
        thread = threading.Thread(target=listen, name="posttrain-leave", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            signal.signal(signal.SIGURG, before or signal.SIG_DFL)

    def _notice(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:
            return  # a forked worker: the process that it works for decides
        self._reason = 128 + number
        self._give_back()  # the next signal has its default effect: it ends the program at once
        # Not by `logging`, whose locks the interrupted code may hold.
        name, first = signal.Signals(number).name, "" if self._leaves_at_once else "finishing this optimizer step and "
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(2, f"\n{name}: {first}saving a checkpoint; a second signal ends at once.\n".encode())
        if name == "SIGHUP":  # what is written to a terminal that is gone would be an error
            for terminal in self._terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), terminal)
        self._leave()

    @property
    def own(self) -> int:
        """The reason of this process to leave; 0: none."""
        if self._reason == 0 and self._until is not None and time.monotonic() >= self._until:
            return TIME_IS_UP
        return self._reason

    def _finds_file(self) -> bool:
        if self._file is None or time.monotonic() - self._looked < INTERVAL:
            return False
        self._looked = time.monotonic()
        try:
            self._file.unlink()
        except OSError:  # it is not there
            return False
        return True

    def due(self) -> int:
        """The reason to stop now; 0: none. All processes get the same result, that of the previous reduction."""
        if self.world_size == 1:
            self.asks_for_save |= self._finds_file()
            return self.own
        self._calls += 1
        if self._calls < self._every:
            return 0
        reason, now = self._count(), time.monotonic()
        # In whole milliseconds since the last reduction, so that all agree on an interval of about a quarter of a
        # second.
        asked = [self.own, int(1000 * (now - self._asked)), int(self._finds_file())]
        self._maximum = Maximum(asked, self._device)
        self._calls, self._asked = 0, now
        return reason

    def settle(self, gather: Callable[[Any], list[Any]]) -> int:
        """The reason to stop at the end of the run."""
        self._count()
        return max(gather(self.own))

    def _count(self) -> int:
        if self._maximum is None:
            return 0
        held, self._maximum = self._maximum, None
        with accelerator.waiting():
            reason, milliseconds, asks_for_save = held.read()
        self.asks_for_save |= bool(asks_for_save)
        self._every = min(max(self._every * 250 // max(milliseconds, 1), 1), 64)
        return reason
