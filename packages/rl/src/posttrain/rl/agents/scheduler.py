"""Keeps trajectories going, each on its own clock: the engine writes the turns that wait, whoever asks for them.

    trajectories -> turns to write -> engine -> turns that have ended -> trajectories

Conversations with tools (`posttrain.rl.agents.environments`) and episodes of agents (`posttrain.rl.agents.agent`) are
the two kinds of trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from posttrain.rl.generation.protocol import Completions, Sampling
from posttrain.rl.rewards import background
from posttrain.rl.samples.samples import Sample, alike, complete_in_room

if TYPE_CHECKING:
    from posttrain.rl.generation.local_steps import Call, LocalSteps

Asked = tuple[Any, Sample, Sampling]
"""A turn to write: a key by which it is known, the sample with its prompt, and how it is drawn."""
QUIET = 0.01
"""Seconds without a request after which those that wait are answered, while nothing else is written."""


class TurnsApart:
    """Turns of an engine that takes several calls at a time: each is a call of its own, in a thread of its own."""

    quiet = 0.0

    def __init__(
        self, turn: Callable[[list[Sample], Sampling], list[Sample]], wake: Callable[[], None], threads: Executor
    ) -> None:
        self.turn, self.wake, self._threads = turn, wake, threads
        self._ended: SimpleQueue[tuple[Any, Future[list[Sample]]]] = SimpleQueue()

    def __bool__(self) -> bool:
        return not self._ended.empty()

    def begin(self, asked: Sequence[Asked]) -> None:
        """Begin turns, each ``(key, sample, how it is drawn)``."""
        for key, sample, sampling in asked:
            call = self._threads.submit(self.turn, [sample], sampling)
            call.add_done_callback(partial(self._end, key))

    def _end(self, key: Any, call: Future[list[Sample]]) -> None:
        self._ended.put((key, call))
        self.wake()

    def drop(self, is_unwanted: Callable[[Any], bool]) -> None:
        """The engine writes what it was asked for."""

    def step(self) -> list[tuple[Any, Sample]]:
        """The keys and samples of the turns that have ended."""
        found = []
        while self:
            key, call = self._ended.get()
            found.append((key, call.result()[0]))
        return found


class TurnsTogether:
    """Turns of an engine that writes a batch to its end before it takes another: those that wait make the next."""

    quiet = QUIET

    def __init__(self, turn: Callable[[list[Sample], Sampling], list[Sample]], context: int | None = None) -> None:
        self.turn, self.context = turn, context
        self._open: list[Asked] = []

    def __bool__(self) -> bool:
        return bool(self._open)

    def begin(self, asked: Sequence[Asked]) -> None:
        """Let turns wait, each ``(key, sample, how it is drawn)``."""
        self._open += asked

    def drop(self, is_unwanted: Callable[[Any], bool]) -> None:
        """Forget the turns of such keys."""
        self._open = [each for each in self._open if not is_unwanted(each[0])]

    def step(self) -> list[tuple[Any, Sample]]:
        """Write all turns that wait: their keys and samples."""
        open_, self._open = self._open, []
        found = []
        for kind, some in _by_kind(open_):
            most = replace(kind, max_new_tokens=max(sampling.max_new_tokens for *_, sampling in some))
            done = complete_in_room([sample for _, sample, _ in some], most, self.context, self.turn)
            found += [(key, _cut(one, own.max_new_tokens)) for (key, _, own), one in zip(some, done, strict=True)]
        return found


def _cut(sample: Sample, most: int) -> Sample:
    logps = None if sample.logps is None else sample.logps[:most]
    versions = None if sample.versions is None else sample.versions[:most]
    routes = None if sample.routes is None else sample.routes[: len(sample.prompt_ids) + most - 1]
    finished = sample.finished and len(sample.ids) <= most
    return replace(sample, ids=sample.ids[:most], logps=logps, versions=versions, routes=routes, finished=finished)


def _by_kind(asked: Sequence[Asked]) -> Iterator[tuple[Sampling, list[Asked]]]:
    """Turns that are drawn alike but for their number of tokens."""
    for kind in dict.fromkeys(replace(sampling, max_new_tokens=1) for *_, sampling in asked):
        yield kind, [each for each in asked if replace(each[2], max_new_tokens=1) == kind]


class OpenTurns:
    """Turns of the policy that begin and end at any token, written by the `steps` of an engine that batches what is
    open. `completed` makes a sample with the one completion of it.
    """

    quiet = QUIET

    def __init__(self, completed: Callable[[Sample, Completions], Sample], steps: LocalSteps) -> None:
        self.completed, self.steps = completed, steps
        self._open: dict[tuple[Call, int], tuple[Any, Sample]] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def begin(self, asked: Sequence[Asked]) -> None:
        """Begin turns, each ``(key, sample, how it is drawn)``. Adjacent ones with the same prompt share its cache."""
        for kind, some in _by_kind(asked):
            for size, rows in alike([sample for _, sample, _ in some]):
                most = [some[row][2].max_new_tokens for row in rows]
                prompts, seeds = [some[r][1].prompt_ids for r in rows[::size]], [some[r][1].seed for r in rows]
                call = self.steps.add(prompts, size, replace(kind, max_new_tokens=max(most)), seeds, most)
                self._open |= {(call, number): some[row][:2] for number, row in enumerate(rows)}

    def drop(self, is_unwanted: Callable[[Any], bool]) -> None:
        """Write the turns of such keys no further."""
        for (call, row), (key, _) in self._open.items():
            if is_unwanted(key):
                call.most[row] = 0

    def step(self) -> list[tuple[Any, Sample]]:
        """Write one more token of each turn: the keys and samples of those that have ended."""
        found = []
        for call, rows in self.steps.step():
            for row in rows:
                key, sample = self._open.pop((call, row))
                found.append((key, self.completed(sample, call.completion(row))))
        return found


Turns = TurnsApart | TurnsTogether | OpenTurns
"""Turns that are being written, by the keys that `begin` was given. `step` has something to do where they are true.
`quiet`: seconds without a request after which those that wait are begun, while nothing is written."""
Opening = Callable[[Callable[[], None]], AbstractContextManager[Turns]]


def serve(
    asked: SimpleQueue[Any],
    open_turns: Opening,
    answer: Callable[[Any, Sample], Any],
    is_unwanted: Callable[[Any], bool] | None = None,
    stalled: Callable[[], None] = lambda: None,
) -> None:
    """Have the turns in `asked` written until there is None. They join those that are being written. Each is ``(place
    of the trajectory, key, sample with its prompt, how it is drawn)``, or a function without arguments. That is called
    in this thread, and so is ``answer(key, sample with its turn)``. A turn for whose key `is_unwanted` is true is
    written no further. `stalled` is called where nothing has been asked for or written for `background.SLOW` seconds.
    """
    with open_turns(lambda: asked.put(lambda: None)) as turns:
        while (new := _new(asked, not turns, turns.quiet, stalled)) is not None:
            turns.begin([request[1:] for request in new])
            if is_unwanted is not None:
                turns.drop(is_unwanted)
            for key, sample in turns.step():
                answer(key, sample)


def _new(asked: SimpleQueue[Any], waits: bool, quiet: float, stalled: Callable[[], None]) -> list[Any] | None:
    """The requests that there are, by their places; None after the last. It `waits` for the first, and for others that
    come close behind it, such as those of one group.
    """
    found: list[Any] = []
    is_first = waits
    seconds: float | None = background.SLOW if waits else 0.0
    while True:
        try:
            item = asked.get(timeout=seconds)
        except Empty:
            if is_first:
                stalled()
                seconds = None
                continue
            return None if None in found else sorted(found, key=lambda request: request[0])
        is_first, seconds = False, quiet if waits else 0.0
        if callable(item):
            item()
        else:
            found.append(item)
