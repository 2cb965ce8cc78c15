"""Keeps trajectories going, each on its own clock: the engine writes the turns that wait, whoever asks for them.

    trajectories -> turns to write -> engine -> turns that have ended -> trajectories

Conversations with tools (`posttrain.rl.agents.environments`) and episodes of agents (`posttrain.rl.agents.agent`) are
the two kinds of trajectories.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any, Protocol

from posttrain.rl.generation.protocol import Sampling
from posttrain.rl.samples.samples import Sample

QUIET = 0.01
"""Seconds without a request after which those that wait are answered, while nothing else is written."""


class Turns(Protocol):
    """Turns of the policy that are written: `begin` takes ``(key, sample, how it is drawn)``.

    Attributes:
        quiet: seconds without a request after which those that wait are begun, while nothing is written.
    """

    quiet: float

    def __bool__(self) -> bool:
        """Whether `step` has something to do."""
        ...

    def begin(self, asked: Sequence[tuple[Any, Sample, Sampling]]) -> None: ...

    def drop(self, is_unwanted: Callable[[Any], bool]) -> None:
        """Stop the turns of such keys: no one waits for them."""
        ...

    def step(self) -> list[tuple[Any, Sample]]:
        """Write on: the keys and samples of turns that have ended."""
        ...


class Policy(Protocol):
    """The engine and its weights, which write the turns of trajectories."""

    def open(self, wake: Callable[[], None]) -> AbstractContextManager[Turns]:
        """A context in which turns are begun at any time, for this thread alone.

        Args:
            wake: is called from any thread when `Turns.step` has something to do that it had not before.
        """
        ...


def serve(
    asked: SimpleQueue[Any],
    policy: Policy,
    answer: Callable[[Any, Sample], Any],
    is_unwanted: Callable[[Any], bool] | None = None,
) -> None:
    """Have the turns in `asked` written until there is None. They join those that are being written.

    Args:
        asked: ``(place of the trajectory, key, sample with its prompt, how it is drawn)``; or a function without
            arguments, which is called in this thread.
        answer: ``(key, sample with its turn)``, is called in this thread.
        is_unwanted: whether no one waits for the turn of a key any more.
    """
    with policy.open(lambda: asked.put(_nothing)) as turns:
        while (new := _new(asked, waits=not turns, quiet=turns.quiet)) is not None:
            turns.begin([request[1:] for request in new])
            if is_unwanted is not None:
                turns.drop(is_unwanted)
            for key, sample in turns.step():
                answer(key, sample)


def _nothing() -> None:
    pass


def _new(asked: SimpleQueue[Any], waits: bool, quiet: float) -> list[Any] | None:
    """The requests that there are, by their places; None after the last.

    Args:
        waits: for the first, and for others that come close behind it, such as those of one group.
    """
    found: list[Any] = []
    is_first = waits
    while is_first or not asked.empty() or (waits and not _is_quiet(asked, quiet)):
        item, is_first = asked.get(), False
        if callable(item):
            item()
        else:
            found.append(item)
    return None if None in found else sorted(found, key=lambda request: request[0])


def _is_quiet(asked: SimpleQueue[Any], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while asked.empty():
        if time.monotonic() > until:
            return True
        time.sleep(seconds / 10)
    return False
