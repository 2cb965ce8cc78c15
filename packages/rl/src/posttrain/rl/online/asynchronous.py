"""Samples and scores rollouts in the background while the trainer learns from earlier ones.

    prompts -> [generate -> score] -> queue -> advantages -> windows of micro-batches -> loss

The main thread reads the prompts, sends the weights and learns. One thread generates and `reward_concurrency` threads
score, so that by default no user code is called twice at a time. Where the engine can, rollouts overlap, whose tools
and environments, if any, run beside each other: async ones, or ones in a process of their own. A batch of prompts is
handed over at the earliest optimizer step from which its completions are at most `max_staleness` steps
old when they are learned from. So the bound holds without dropping a completion, and it limits the queue.

With `sample_ahead` below that, batches are handed over later, and their completions have steps to spare: a rollout is
made of the parts that have ended first, whichever batches they are of, unless the others would be too old by their
turn. Where rollouts overlap, a part is one group, else a whole batch.

Each token keeps the log-probability under the weights that wrote it, and completions are weighted by the ratio of the
policy at the beginning of their rollout to it: decoupled PPO, Hilton et al. 2021, https://arxiv.org/abs/2110.00641, as
in AReaL, Fu et al. 2025, https://arxiv.org/abs/2505.24298.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
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


@dataclass(eq=False)
class Job:
    """A batch of prompts, or a part of it, that is sampled and scored in the background.

    Attributes:
        epoch: that its rows are of. position: of the loader before the batch.
        number: of the batch, which gives its random numbers. part: of the batch, from 0.
        version: the optimizer step of the weights with which it was begun.
        metrics, clock: what the background threads have logged.
    """

    epoch: int
    rows: list[dict[str, Any]]
    position: dict[str, Any]
    number: int = 0
    part: int = 0
    version: int = 0
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
    """The rollouts of one run that are on their way.

    Attributes:
        jobs: in the order of their batches. parts: of a batch.
        used: of batches of which other parts are on their way, those that are not: (number, part).
    """

    def __init__(self, rollouts: Rollouts) -> None:
        args, layout, overlap = rollouts.args, rollouts.owner.layout, rollouts.overlap
        self.rollouts, self.max_staleness = rollouts, args.max_staleness
        self.ahead = args.sample_ahead or args.max_staleness
        divides = overlap and self.ahead < self.max_staleness and layout.chunk % layout.group_size == 0
        self.parts = layout.per_process // layout.group_size if divides else 1
        self.jobs: list[Job] = []
        self.used: set[tuple[int, int]] = set()
        self._sampler = Worker("posttrain-sample", self.parts * (self.ahead + 1) if overlap else 1)
        self._scorer = Worker("posttrain-score", args.reward_concurrency)
        self._epoch, self._plan = 0, Plan(1, None, 0, 0)
        self._window = 0, 0  # optimizer steps before it, and micro-batches left of an earlier rollout
        self._taken = 0  # rollouts, since the window began
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
        self._drop([job for job in self.jobs if job.epoch < epoch], "its epoch has ended")  # by a callback
        if self._next is not None and self._next.epoch < epoch:
            self._next = None
        return self._batches

    def fill(self, plan: Plan, step: int, left: int) -> None:
        """Begin the rollouts that may begin at the start of an accumulation window, after so many optimizer steps of
        `plan`, with so many micro-batches `left` of the present rollout.
        """
        self._plan, self._window, self._taken = plan, (step, left), 0
        if self.parts > 1:
            self.rollouts.sync()  # also where only other processes begin something
        most = min(self.ahead, plan.max_steps - step - 1)
        while (job := self._peek()) is not None and self._steps_until(job, left) <= most:
            self._begin(job)

    def has(self, rollouts: int, seconds: float = 1.0) -> bool:
        """Whether all processes can take those of the next `rollouts` that are on their way, waited for so many
        `seconds`. Every process must call it.
        """
        until, gather = time.monotonic() + seconds, self.rollouts.owner.dist.gather_patiently
        while not (is_there := self._are_there(rollouts)) and time.monotonic() < until:
            self._wait(until - time.monotonic())
        return all(gather(is_there, "that the rollouts of all processes have ended"))

    def _are_there(self, rollouts: int) -> bool:
        here = self._here
        for number in range(rollouts):
            if (found := self._ended(here, self._taken + number)) is None:
                return False
            here = [job for job in here if job not in found]
        return True

    def take(self) -> list[Job]:
        """The parts of the next rollout of this epoch, scored; none where the prompts are used up."""
        if not self.jobs and (job := self._peek()) is not None:
            self._begin(job)
        while (found := self._ended(self._here, self._taken)) is None:
            self._wait()
        if not found:
            return []
        self.rollouts.owner.sampler.with_attempts(lambda: [job.sampled.result() for job in found], self._again)
        for job in found:
            job.scored.result()
            self.jobs.remove(job)
        oldest = self.jobs[0].number if self.jobs else math.inf
        self.used = {one for one in self.used | {(job.number, job.part) for job in found} if one[0] >= oldest}
        self._taken += 1
        return found

    def scored(self, metrics: Metrics, clock: Clock) -> list[Scored]:
        """What `take` gives; adds what its jobs have logged to `metrics` and `clock`."""
        with clock("wait"):
            jobs = self.take()
        for job in jobs:
            metrics.update(job.metrics.state_dict())
        phases = [job.clock.phases for job in jobs]
        for phase in {name: None for own in phases for name in own}:
            clock.add(phase, max(own.get(phase, 0.0) for own in phases))  # they ran beside each other
        return [job.scored.result() for job in jobs]

    @property
    def _here(self) -> list[Job]:
        """Those of this epoch."""
        return [job for job in self.jobs if job.epoch == self._epoch]

    def _wait(self, seconds: float | None = None) -> None:
        """Until one more has ended, or so many `seconds` are over."""
        wait([job.scored for job in self._here if not job.scored.done()], seconds, FIRST_COMPLETED)

    def _ended(self, here: list[Job], taken: int) -> list[Job] | None:
        """Those of `here` that make the rollout after so many `taken` ones: the first that have ended, once the others
        can wait; None: they cannot, or too few have ended.
        """
        if self.ahead == self.max_staleness:
            return here[: self.parts] if all(job.scored.done() for job in here[: self.parts]) else None
        ended = [job for job in here if job.scored.done()]  # asked once: others end meanwhile
        found = ended[: self.parts]
        left = [job for job in here if job not in found]
        turns = (self._step_of(taken + 1 + place // self.parts) for place in range(len(left)))
        can_wait = all(turn <= job.version + self.max_staleness for turn, job in zip(turns, left, strict=True))
        return found if len(ended) == len(here) or (can_wait and len(found) == self.parts) else None

    def _step_of(self, rollout: int) -> int:
        """The optimizer steps before the window that `rollout` begins in, of those since the present window began."""
        step, left = self._window
        return step + (left + rollout * self.rollouts.per_rollout) // self._plan.accumulation

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
            used = {"used_parts": list(map(list, self.used)), "parts": self.parts} if self.used else {}
            return {"loader": self.jobs[0].position, "rollouts": self.jobs[0].number} | used
        return {} if self._next is None else {"loader": self._next.position}

    def close(self) -> None:
        """Drop what is on its way."""
        self._drop(list(self.jobs), "the run has ended")
        self._sampler.end()
        self._scorer.end()
        if self._of_main is not None:
            self.rollouts.owner.metrics, self.rollouts.owner.clock = self._of_main

    def _drop(self, jobs: list[Job], why: str) -> None:
        for job in jobs:
            self.jobs.remove(job)
            job.sampled.cancel()
            job.scored.cancel()
        for number in dict.fromkeys(job.number for job in jobs):
            if self.rollouts.ledger is not None:
                self.rollouts.ledger.dropped(number, why)

    def _steps_until(self, job: Job, left: int) -> int:
        """Optimizer steps before the window that will begin with `job`, which is the next one."""
        here, size = sum(job.epoch == self._epoch for job in self.jobs), self._plan.accumulation
        per_rollout, others = self.rollouts.per_rollout, len(self.jobs) - here
        micro_batches = left - (-here // self.parts) * per_rollout
        if job.epoch == self._epoch:
            return micro_batches // size
        return -(-micro_batches // size) + others // self.parts * per_rollout // size

    def _begin(self, job: Job) -> None:
        """Begin what is not used yet of the batch of prompts that was read last."""
        self._next = None
        self.rollouts.sync()
        rows, number = self.rollouts.begun(job.rows)
        size, version = len(rows) // self.parts, self.rollouts.owner.sampler.version
        for part in range(self.parts):
            if (number, part) not in self.used:
                own = rows[part * size : (part + 1) * size]
                self.jobs.append(Job(job.epoch, own, job.position, number, part, version))
                self._submit(self.jobs[-1])

    def _submit(self, job: Job) -> None:
        job.sampled, job.scored = sampled, scored = Future[list[Sample]](), Future[Scored]()

        def sample() -> list[Sample]:
            with job.logging():
                return self.rollouts.complete(self.rollouts.begin(job.rows, job.number, job.part))

        def score() -> Scored:
            samples = sampled.result()
            with job.logging():
                return samples, self.rollouts.score(samples)

        sampled.add_done_callback(lambda _: self._scorer.submit(scored, score))
        self._sampler.submit(sampled, sample)

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
