"""Samples and scores rollouts in the background while the trainer learns from earlier ones.

    prompts -> [generate -> score] -> queue -> advantages -> windows of micro-batches -> loss

The main thread reads the prompts, sends the weights and learns. One thread generates and `reward_concurrency` threads
score, so that by default no user code is called twice at a time. Where the engine can, rollouts of an agent overlap,
and those with tools and environments that run beside each other: async ones, or ones in a process of their own. A batch
of prompts is handed over at the earliest optimizer step from which its completions are at most `max_staleness` steps
old when they are learned from. So the bound holds without dropping a completion, and it limits the queue.

Each token keeps the log-probability under the weights that wrote it, and completions are weighted by the ratio of the
policy at the beginning of their rollout to it: decoupled PPO, Hilton et al. 2021, https://arxiv.org/abs/2110.00641, as
in AReaL, Fu et al. 2025, https://arxiv.org/abs/2505.24298.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from posttrain.core.data import pipeline
from posttrain.core.logging.metrics import Clock, Metrics
from posttrain.core.training.plan import Plan
from posttrain.rl.rewards.background import fulfil, keep_device
from posttrain.rl.rewards.scoring import Scores
from posttrain.rl.samples.samples import Sample

if TYPE_CHECKING:
    from posttrain.rl.online.rollouts import Rollouts

Value = TypeVar("Value")
Scored = tuple[list[Sample], Scores]

NO_WEIGHTS = (
    "max_staleness above 0 samples while the policy is trained, and {} generates with the weights that are being "
    "trained. Set use_vllm=True with vllm_mode='server', leave the generator out, or set max_staleness=0."
)
LAST_CALL = 10.0
"""Seconds that the end of a run waits for a call of user code in the background."""

_own = threading.local()


class PerThread:
    """Stands for the `metrics` or `clock` of a trainer; in the threads of a `Background`, for those of their job."""

    def __init__(self, name: str, of_main: Any) -> None:
        self._name, self._of_main = name, of_main

    def __getattr__(self, attribute: str) -> Any:
        return getattr(vars(_own).get(self._name, self._of_main), attribute)

    def __call__(self, phase: str) -> Any:
        return vars(_own).get(self._name, self._of_main)(phase)

    def copy(self) -> PerThread:
        return PerThread(self._name, self._of_main.copy())


class Turns:
    """A lock that `number` threads at a time get, in the order in which they ask."""

    def __init__(self, number: int = 1) -> None:
        self._next, self._free = threading.Lock(), threading.Semaphore(number)

    def __enter__(self) -> None:
        with self._next:
            self._free.acquire()

    def __exit__(self, *error: object) -> None:
        self._free.release()


class Worker:
    """Threads that begin calls in their order, and for which the program does not wait when it ends."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._keep_device = keep_device()
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, future: Future[Value], call: Callable[[], Value]) -> None:
        """Let `future` have the result of ``call()``."""
        self._calls.put((future, call))

    def end(self, wait: float = LAST_CALL) -> None:
        """End the threads after the calls that were submitted; wait for that so many seconds at most."""
        until = time.monotonic() + wait
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))

    def _work(self) -> None:
        self._keep_device()
        while (item := self._calls.get()) is not None:
            if item[0].set_running_or_notify_cancel():
                fulfil(*item)
            del item


@dataclass
class Job:
    """A batch of prompts that is sampled and scored in the background.

    Attributes:
        epoch: that its rows are of. position: of the loader before these rows.
        number: of the rollout, which gives its random numbers.
        metrics, clock: what the background threads have logged.
    """

    epoch: int
    rows: list[dict[str, Any]]
    position: dict[str, Any]
    number: int = 0
    metrics: Metrics = field(default_factory=Metrics)
    clock: Clock = field(default_factory=Clock)
    sampled: Future[list[Sample]] = field(default_factory=Future)
    scored: Future[Scored] = field(default_factory=Future)

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        """What this thread logs is kept here."""
        _own.metrics, _own.clock = self.metrics, self.clock
        try:
            yield
        finally:
            del _own.metrics, _own.clock


class Background:
    """The rollouts of one run that are on their way."""

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts, self.max_staleness = rollouts, rollouts.args.max_staleness
        self.jobs: deque[Job] = deque()
        self._sampler = Worker("posttrain-sample", self.max_staleness + 1 if rollouts.overlap else 1)
        self._scorer = Worker("posttrain-score", rollouts.args.reward_concurrency)
        self._epoch, self._plan = 0, Plan(1, None, 0, 0)
        self._loader: Any = None
        self._batches: Iterator[Any] = iter(())
        self._ahead: Iterator[Any] | None = None  # of the next epoch
        self._num_ahead = 0
        self._next: Job | None = None  # read, and not yet begun
        self._of_main: tuple[Any, Any] | None = None  # the trainer's metrics and clock

    def read(self, epoch: int, loader: Any, batches: Iterator[Any] | None = None) -> Iterator[Any]:
        """Take the prompts of `epoch` from `loader`, which may be read already, or from `batches`. Returns them."""
        if self._of_main is None:
            owner: Any = self.rollouts.owner
            self._of_main = owner.metrics, owner.clock
            owner.metrics, owner.clock = PerThread("metrics", owner.metrics), PerThread("clock", owner.clock)
        if self._ahead is not None and epoch == self._epoch + 1:
            batches = self._ahead
        self._batches = iter(loader) if batches is None else batches
        self._epoch, self._loader, self._ahead, self._num_ahead = epoch, loader, None, 0
        for job in [job for job in self.jobs if job.epoch < epoch]:  # a callback ended the epoch
            self._drop(job, "its epoch has ended")
        if self._next is not None and self._next.epoch < epoch:
            self._next = None
        return self._batches

    def fill(self, plan: Plan, step: int, left: int) -> None:
        """Begin the rollouts that may begin at the start of an accumulation window, after so many optimizer steps of
        `plan`, with so many micro-batches `left` of the present rollout.
        """
        self._plan = plan
        most = min(self.max_staleness, plan.max_steps - step - 1)
        while (job := self._peek()) is not None and self._steps_until(job, left) <= most:
            self._begin(job)

    def take(self) -> Job | None:
        """The oldest rollout of this epoch, scored; None where the prompts are used up."""
        if not self.jobs and (job := self._peek()) is not None:
            self._begin(job)
        if not self.jobs or self.jobs[0].epoch != self._epoch:
            return None
        self.rollouts.owner.sampler.with_attempts(lambda: self.jobs[0].sampled.result(), self._again)
        self.jobs[0].scored.result()
        return self.jobs.popleft()

    def _again(self) -> None:
        """Send the weights to an engine that came back, and begin the rollouts that it lost again."""
        self.rollouts.sync()
        for job in self.jobs:
            if job.sampled.done() and job.sampled.exception() is not None:
                self._submit(job)

    def position(self) -> dict[str, Any]:
        """Where reading and numbering go on in a run that resumes: the rollouts on their way are sampled again, from
        the same prompts, with the weights of the checkpoint.
        """
        if self.jobs:
            return {"loader": self.jobs[0].position, "rollouts": self.jobs[0].number}
        return {} if self._next is None else {"loader": self._next.position}

    def close(self) -> None:
        """Drop what is on its way."""
        for job in list(self.jobs):
            self._drop(job, "the run has ended")
        self._sampler.end()
        self._scorer.end()
        if self._of_main is not None:
            self.rollouts.owner.metrics, self.rollouts.owner.clock = self._of_main

    def _drop(self, job: Job, why: str) -> None:
        self.jobs.remove(job)
        if self.rollouts.ledger is not None:
            self.rollouts.ledger.dropped(job.number, why)
        job.sampled.cancel()
        job.scored.cancel()

    def _steps_until(self, job: Job, left: int) -> int:
        """Optimizer steps before the window that will begin with `job`, which is the next one."""
        here, size = sum(job.epoch == self._epoch for job in self.jobs), self._plan.accumulation
        per_rollout = self.rollouts.per_rollout
        micro_batches = left + here * per_rollout
        if job.epoch == self._epoch:
            return micro_batches // size
        return -(-micro_batches // size) + (len(self.jobs) - here) * per_rollout // size

    def _begin(self, job: Job) -> None:
        """Begin the rollout of the prompts that were read last."""
        self._next = None
        self.rollouts.sync()
        job.rows, job.number = self.rollouts.begun(job.rows)
        self._submit(job)
        self.jobs.append(job)

    def _submit(self, job: Job) -> None:
        job.sampled, job.scored = sampled, _ = Future[list[Sample]](), Future[Scored]()

        def sample() -> list[Sample]:
            with job.logging():
                return self.rollouts.complete(self.rollouts.begin(job.rows, job.number))

        def score() -> Scored:
            samples = sampled.result()
            with job.logging():
                return samples, self.rollouts.score(samples)

        self._sampler.submit(job.sampled, sample)
        self._scorer.submit(job.scored, score)

    def _peek(self) -> Job | None:
        """The prompts that come next; None where there are no more that may be read now."""
        if self._next is None:
            epoch, position, rows = self._epoch, self._loader.state_dict(), next(self._batches, None)
            if rows is None and self._may_read_ahead():
                self._ahead = iter(self._loader) if self._ahead is None else self._ahead
                epoch, position, rows = epoch + 1, self._loader.state_dict(), next(self._ahead, None)
                self._num_ahead += 1
            self._next = None if rows is None else Job(epoch, rows, position)
        return self._next

    def _may_read_ahead(self) -> bool:
        """Whether the loader stands in the next epoch and has more of it: one more reading would lead beyond it."""
        loader, following = self._loader, self._epoch + 1
        if following >= self._plan.num_epochs or not pipeline.has_length(loader):
            return False
        return loader.epoch == following and self._num_ahead < len(loader)
