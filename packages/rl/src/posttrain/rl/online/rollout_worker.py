"""Completions that another program samples and scores: a rollout worker, with the methods of trl's.

A worker puts scored completions in its queue. The trainer takes them as it needs them, tells the worker the optimizer
step of its weights, and leaves out completions of weights that are too old.
"""

from __future__ import annotations

import logging
import math
import pickle
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn

from posttrain.core.distributed.environment import rank
from posttrain.core.errors import DataError
from posttrain.rl.generation.protocol import Completions, Sampling
from posttrain.rl.generation.weights import Weights
from posttrain.rl.rewards import background, process
from posttrain.rl.rewards.background import fulfil

logger = logging.getLogger(__name__)

POLL = 1.0
"""Seconds between two questions whether a worker with an empty queue is well, and whether the run is to be left."""


class ScoredCompletion(Protocol):
    """What a worker puts in its queue.

    Attributes:
        prompt, completion: as the reward functions have seen them.
        input_ids: tokens of prompt and completion. completion_mask: 1 at those that the policy wrote.
        old_log_probs: of the policy that wrote them; 0 elsewhere.
        advantage: of each of them. model_version: the optimizer step of the weights that wrote them.
        metrics: ``reward``, and ``rewards/name`` of each reward function.
    """

    prompt: Any
    completion: Any
    input_ids: Sequence[int]
    completion_mask: Sequence[int]
    old_log_probs: Sequence[float]
    advantage: float
    model_version: int
    metrics: dict[str, float]


class RolloutWorker(Protocol):
    """Samples and scores completions in threads, processes or programs of its own."""

    rollout_buffer: queue.Queue[ScoredCompletion]

    def start(self) -> None:
        """Begin. Called once, after the first weights were sent."""
        ...

    def stop(self) -> None:
        """End. Called at the end of the run."""
        ...

    def update_model_version(self, model_version: int) -> None:
        """The weights after so many optimizer steps were sent."""
        ...

    def check_health(self, stale_after_s: float) -> None:
        """Raise where the worker has failed, or has not shown for so many seconds that it is alive."""
        ...


class WeightTransfer(Protocol):
    """Sends weights to where a worker samples."""

    def init_weight_transfer(self) -> None:
        """Called once, before the first weights."""
        ...

    def pause(self) -> None:
        """Stop sampling: weights come."""
        ...

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send all weights, each by the name that a saved checkpoint has."""
        ...

    def resume(self) -> None:
        """Go on sampling."""
        ...

    def destroy(self) -> None:
        """Called at the end of the run."""
        ...


class WorkerEngine:
    """A worker in the place of a generation engine. The first process talks to it, for all of them.

    Args:
        transfer: sends it the weights; None: it has them from elsewhere.
        max_staleness: optimizer steps that a completion may be old when it is taken. stale_after: see
            `RolloutWorker.check_health`.

    Attributes:
        version: the optimizer step of the weights that were sent last.
        dropped: completions that were too old, before those that were taken last.
        is_shared: other processes are sent what is taken.
        on_main: `posttrain.core.distributed.world.World.on_main` of the run, by which errors of the worker are raised
            in every process, and the others wait for it without a limit.
    """

    has_own_weights = True
    runs_ahead = True

    def __init__(
        self, worker: RolloutWorker, transfer: WeightTransfer | None, max_staleness: int, stale_after: float
    ) -> None:
        self.worker, self.transfer = worker, transfer
        self.max_staleness, self.stale_after = max_staleness, stale_after
        self.version, self.dropped, self.is_shared, self._is_running = 0, 0, False, False
        self._found: list[ScoredCompletion] = []
        self._old, self._heard = 0, 0.0
        self.on_main: Callable[[Callable[[], Any], str], Any] = lambda work, what: work()

    def sync_weights(self, model: nn.Module) -> None:
        """Send the weights, and start the worker after the first ones. Every process must call it."""
        weights = Weights(model) if self.transfer is not None else None
        sent: Future[None] = Future()
        try:
            if rank() == 0:
                fulfil(sent, lambda: self._send(weights))
        finally:
            if weights is not None and weights.are_in_pieces:
                weights.gather_rest()
        self.on_main(sent.result, "the weights of the rollout_worker")

    def _send(self, weights: Weights | None) -> None:
        if weights is not None and self.transfer is not None:
            if not self._is_running:
                self.transfer.init_weight_transfer()
            self.transfer.pause()
            try:
                self.transfer.send_weights(iter(weights))
            finally:
                self.transfer.resume()
        self.worker.update_model_version(self.version)
        if not self._is_running:
            self._is_running, self._heard = True, time.monotonic()
            self.worker.start()

    def take(self, number: int) -> list[ScoredCompletion]:
        """The next `number` completions that are not too old, waited for; none but in the first process. Every process
        must call it. Raises what `check_health` raises.
        """
        while not self.has(number):
            pass
        found, self._found = self._found[:number], self._found[number:]
        self.dropped, self._old = self._old, 0
        return found

    def has(self, number: int) -> bool:
        """Whether the next `number` completions that are not too old are there; False after `POLL` seconds without one.
        Every process must call it. Raises what `check_health` raises.
        """
        return bool(self.on_main(lambda: self._has(number), "completions of the rollout_worker"))

    def _has(self, number: int) -> bool:
        self._found = [one for one in self._found if not self._is_old(one, number)]
        while len(self._found) < number:
            try:
                one = self.worker.rollout_buffer.get(timeout=POLL)
            except queue.Empty:
                self.worker.check_health(self.stale_after)
                if time.monotonic() - self._heard > background.SLOW:
                    self._heard = math.inf  # it is said once
                    logger.warning(
                        "The rollout_worker has given no completion for %g seconds, and its check_health() finds no "
                        "fault. The run waits for it.",
                        background.SLOW,
                    )
                return False
            self._heard = time.monotonic()
            if not self._is_old(one, number):
                check(one)
                self._found.append(portable(one) if self.is_shared else one)
        return True

    def _is_old(self, one: ScoredCompletion, number: int) -> bool:
        """Whether it is too old, which is counted; warns of as many as a `number` that was asked for."""
        if self.version - one.model_version <= self.max_staleness:
            return False
        self._old += 1
        if self._old == number:
            said = "The rollout_worker has given %d completions of old weights, the last of step %s at step %d."
            logger.warning(said, number, one.model_version, self.version)
        return True

    def close(self) -> None:
        """Stop the worker and the transfer, if they were started."""
        if self._is_running:
            self._is_running = False
            self.worker.stop()
            if self.transfer is not None:
                self.transfer.destroy()

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> Completions:
        """Not possible: the worker chooses its prompts. Raises ValueError."""
        raise ValueError(
            "A rollout_worker chooses its prompts, and completes no others, such as those of evaluations. Set "
            "eval_strategy='no' and evaluate a checkpoint with another trainer, or pass an engine as generator."
        )


class Portable(SimpleNamespace):
    """A completion that other processes are sent, whose class they need not have; its parts were `pickled` before."""

    def __reduce__(self) -> Any:
        return pickle.loads, (self.pickled,)


def portable(one: ScoredCompletion) -> Any:
    """What other processes are sent of a completion; a DataError where a part of it cannot be sent."""
    parts = {name: getattr(one, name) for name in ScoredCompletion.__annotations__}
    try:
        return Portable(**parts, pickled=pickle.dumps(SimpleNamespace(**parts)))
    except Exception:
        why = process.unsendable(parts, pickle.dumps)
        raise DataError(
            f"The rollout_worker gave a completion that cannot be sent to the other processes: {why}. Give numbers, "
            f"texts, lists and dicts. The prompt is {one.prompt!r:.200}"
        ) from None


def check(one: ScoredCompletion) -> None:
    """Raise DataError where a completion is not one of `ScoredCompletion`."""
    lengths = [len(values) for values in (one.input_ids, one.completion_mask, one.old_log_probs)]
    if len(set(lengths)) > 1 or not any(one.completion_mask) or one.completion_mask[0]:
        raise DataError(
            "The rollout_worker gave a completion with {} input_ids, {} completion_mask and {} old_log_probs, of which "
            "{} were written by the policy. Give lists of one length, which begin with a prompt and end as written. "
            "The prompt is {!r:.200}".format(*lengths, int(sum(one.completion_mask)), one.prompt)
        )
