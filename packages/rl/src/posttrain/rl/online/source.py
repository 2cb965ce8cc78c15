"""Where training data comes from: prompts to scored completions, and rollouts to micro-batches.

    prompts -> sample -> score -> (leave out equal groups) -> rollout -> micro-batches

A source knows no trainer. It holds the rollout that is being learned from, how many there were, what is sampled ahead,
and the ledger.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from posttrain.core.data.samplers import mix
from posttrain.core.distributed.strategies.base import Distributed
from posttrain.core.logging.metrics import Clock, Metrics
from posttrain.rl.losses.advantages import equal_groups, total_rewards
from posttrain.rl.losses.credit import TurnRewards
from posttrain.rl.online.arguments import RolloutConfig
from posttrain.rl.online.asynchronous import Background, Scored, Turns
from posttrain.rl.online.curriculum import NUMBER, Curriculum
from posttrain.rl.online.ledger import Ledger
from posttrain.rl.online.rollouts import Rollouts
from posttrain.rl.online.sampler import Sampler
from posttrain.rl.rewards.scoring import Scores
from posttrain.rl.samples.samples import Rollout, Sample

logger = logging.getLogger(__name__)

One = tuple[Sample, torch.Tensor, torch.Tensor, dict[int, TurnRewards]]
"""A sample, its rewards and which of them failed, (F,) each, and what its turns were given."""


class Source:
    """The rollouts of a run.

    Args:
        rollouts: completes and scores samples.

    Attributes:
        rollout: the one whose micro-batches are being learned from. used: how many of them were.
        num_rollouts: that were begun. num_tokens: that the policy has read and written.
        background: what samples while the policy is trained; None in synchronous training.
        ledger: of the run; None: nothing is noted.
        curriculum: chooses prompts; None: they are sampled as they are read.
        per_rollout: micro-batches that are made of a rollout.
    """

    def __init__(self, args: RolloutConfig, dist: Distributed, sampler: Sampler, rollouts: Rollouts) -> None:
        self.args, self.dist, self.sampler, self.rollouts = args, dist, sampler, rollouts
        self.background: Background | None = None
        self.curriculum: Curriculum | None = None
        self.ledger: Ledger | None = None
        if args.max_staleness:
            sampler.generating = Turns()
        self.forget()

    def forget(self, keeps_count: bool = False) -> None:
        """Drop the present rollout; start the counts again unless `keeps_count`."""
        self.rollout: Rollout | None = None
        self.used, self._length = 0, self.per_rollout
        self.sampler.synced_at = None
        if not keeps_count:
            self.num_rollouts = self.num_tokens = 0

    @property
    def per_rollout(self) -> int:
        return self.args.steps_per_generation * self.args.num_iterations

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The context of a run; with ``max_staleness`` above 0, completions are sampled in the background."""
        args, environments = self.args, self.sampler.environments
        if args.max_staleness:
            self.background = Background(self)
        wanted = args.max_staleness > 0 if args.sample_ledger is None else args.sample_ledger
        engine = getattr(self.sampler.generator, "name", type(self.sampler.generator).__name__)
        writes = wanted and not self.dist.peer_rank
        self.ledger = Ledger(args.output_dir, self.dist.rank, engine) if writes else None
        environments.overlaps = self.background is not None
        try:
            yield
        finally:
            if self.background is not None:
                self.background.close()
            self.background, environments.overlaps = None, False

    # ------------------------------------------------------------------------------------------------ windows

    def begin_epoch(self, step: int) -> None:
        """An epoch begins at the optimizer step `step`: the rest of one that ended early is skipped."""
        self.forget(keeps_count=step > 0)
        if self.ledger is not None and step == 0:
            self.ledger.began(self.args.max_staleness)

    def read(self, epoch: int, loader: Any, batches: Iterator[Any] | None = None) -> Iterator[list[dict[str, Any]]]:
        """The batches of prompts of `epoch`, from `loader` or from `batches`."""
        if self.background is not None:
            return self.background.read(epoch, loader, batches)
        return iter(loader) if batches is None else batches

    @property
    def left(self) -> int:
        """Micro-batches of the present rollout that are still to come."""
        return 0 if self.rollout is None else self.per_rollout - self.used

    def micro_batches(
        self, make_rollout: Callable[[], Rollout | None], parts_of: Callable[[Rollout], list[dict[str, Any]]]
    ) -> Iterator[dict[str, Any]]:
        """The micro-batches of the present rollout and of those that follow, which are made on demand."""
        while True:
            if self.rollout is None:
                self.rollout, self.used = make_rollout(), 0
                if self.rollout is None:
                    return
            parts = parts_of(self.rollout)
            self._length = len(parts) * self.args.num_iterations
            while self.used < self._length:
                self.used += 1  # before it is yielded: a checkpoint may be saved at the yield
                yield parts[(self.used - 1) % len(parts)]
            self.rollout = None

    # ------------------------------------------------------------------------------------------------ scored samples

    def next(self, batches: Iterator[list[dict[str, Any]]], metrics: Metrics, clock: Clock) -> Scored | None:
        """The samples of the next rollout; None where the epoch has no more prompts."""
        found = self._next_scored(batches, metrics, clock)
        if found is not None and self.curriculum is not None:
            metrics.update({name: (value, 1) for name, value in self.curriculum.metrics().items()})
        if found is None or not self.args.dynamic_sampling:
            return found
        samples, scores = found
        layout = self.rollouts.owner.layout
        size, wanted = layout.group_size, len(samples) * self.dist.world_size
        kept: list[One] = []
        spare: list[One] = []
        for number in range(1, self.args.dynamic_sampling_rounds + 1):
            alone = [replace(sample, environment=None) for sample in samples]  # it stays here, and its reward is known
            turns = scores.turns or [{}] * len(samples)
            ones = list(zip(alone, scores.rewards, scores.failed, turns, strict=True))
            dealt = [one for part in self.dist.gather_object(ones) for one in part]
            everyone = [dealt[place] for place in layout.dealt().argsort()]
            total = total_rewards(torch.stack([rewards for _, rewards, *_ in everyone]), scores.weights)
            for group, is_equal in enumerate(equal_groups(total, size).tolist()):
                members = everyone[group * size : (group + 1) * size]
                is_equal = is_equal and not (self.rollouts.owner.credits_turns and _differ_in_turns(members))
                (spare if is_equal else kept).extend(members)
            metrics.add("dynamic_sampling/kept", len(kept) / (len(kept) + len(spare)))
            more = None
            if len(kept) < wanted and number < self.args.dynamic_sampling_rounds:
                more = self._next_scored(batches, metrics, clock)
            if more is None:
                break
            samples, scores = more
        if self.dist.is_main and (rest := (kept + spare)[wanted:]):
            left = replace(scores, rewards=torch.stack([rewards for _, rewards, *_ in rest]))
            self.log_used([sample for sample, *_ in rest], left, None)
        mine = [(kept + spare)[number] for number in layout.numbers(self.dist.rank)]
        rewards, failed = torch.stack([r for _, r, *_ in mine]), torch.stack([f for *_, f, _ in mine])
        turns = [turns for *_, turns in mine]
        scores = replace(scores, rewards=rewards, failed=failed, columns={}, turns=turns)
        return [sample for sample, *_ in mine], scores

    def _next_scored(self, batches: Iterator[list[dict[str, Any]]], metrics: Metrics, clock: Clock) -> Scored | None:
        """Completions of the next batch of prompts; None where the epoch has no more."""
        if self.background is not None:
            with clock("wait"):
                job = self.background.take()
            if job is None:
                return None
            metrics.update(job.metrics.state_dict())
            for phase, seconds in job.clock.phases.items():
                clock.add(phase, seconds)
            samples, scores = job.scored.result()
        else:
            if (read := next(batches, None)) is None:
                return None
            begun, rollouts = self.begun(read), self.rollouts

            def sample() -> list[Sample]:
                return rollouts.sample_to_score(self.begin(*begun))

            if self.sampler.can.has_own_weights:
                rollouts.sync()  # not below: an engine that stays away is waited for once
                samples = self.sampler.with_attempts(sample, rollouts.sync)
            else:
                samples = sample()
            scores = rollouts.score(samples)
        if self.curriculum is not None:
            self._count(self.curriculum, samples, scores)
        return samples, scores

    def _count(self, curriculum: Curriculum, samples: list[Sample], scores: Scores) -> None:
        """Let `curriculum` know which completions of all processes have passed."""
        first = scores.rewards[:, 0]
        passed = torch.where(first.isnan(), torch.nan, (first >= self.args.pass_threshold).float()).tolist()
        numbers = [sample.row_number for sample in samples]
        own = [(number, value) for number, value in zip(numbers, passed, strict=True) if number is not None]
        curriculum.update([one for part in self.dist.gather_object(own) for one in part])

    def begin(self, rows: list[dict[str, Any]], number: int) -> list[Sample]:
        """Samples of rollout `number`, without completions."""
        places, seed = self.rollouts.owner.layout.numbers(self.dist.rank).tolist(), self.args.seed
        numbers = [row.get(NUMBER) for row in rows]
        rows = rows if self.curriculum is None else [{k: v for k, v in row.items() if k != NUMBER} for row in rows]
        return [
            replace(sample, seed=mix(seed, number, place), rollout=number, place=place, row_number=row_number)
            for sample, place, row_number in zip(self.rollouts.owner.new_samples(rows), places, numbers, strict=True)
        ]

    def begun(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
        """(the prompts of a new rollout, for which `rows` were read, and its number)."""
        number = self.num_rollouts
        self.num_rollouts += 1
        if self.curriculum is not None:
            layout = self.rollouts.owner.layout
            places = layout.numbers(self.dist.rank) // layout.group_size
            rows = self.curriculum.choose(rows, places.tolist(), number)
        return rows, number

    # ------------------------------------------------------------------------------------------------ ledger and state

    def log_used(self, samples: list[Sample], scores: Scores, step: int | None) -> None:
        """Note the first optimizer step that learns from `samples`, in the ledger; None: they are left out."""
        if self.ledger is not None:
            self.ledger.used(samples, scores.totals.tolist(), self.sampler.version, step)

    def state_dict(self, dealt: list[int]) -> dict[str, Any]:
        """The rollout that is being gone through, the counts, and how completions are `dealt`: on each process,
        processes, in a micro-batch.
        """
        state = {"rollouts": self.num_rollouts, "dealt": dealt, "num_tokens": self.num_tokens}
        state |= {} if self.background is None else self.background.position()
        state |= {} if self.curriculum is None else {"curriculum": self.curriculum.state_dict()}
        if self.rollout is not None and self.used < self._length:
            state |= {"rollout": self.rollout.state_dict(), "used": self.used}
        return state

    def load_state_dict(self, state: dict[str, Any], dealt: list[int], step: int) -> None:
        """The inverse of `state_dict`, from the checkpoint of the optimizer step `step`."""
        self.forget()
        if self.ledger is not None:
            self.ledger.resumed(step, self.args.max_staleness)
        self.num_tokens, self.num_rollouts = state["num_tokens"], state["rollouts"]
        if self.curriculum is not None and "curriculum" in state:
            self.curriculum.load_state_dict(state["curriculum"])
        if "rollout" in state and state["dealt"] == dealt:
            self.rollout, self.used = Rollout.from_state(state["rollout"]), state["used"]
        elif "rollout" in state:
            logger.warning(
                "The checkpoint's rollout was distributed differently (%s completions on each of %s processes, %s in "
                "a micro-batch): the rest of it is skipped, and the next prompts are sampled.",
                *state["dealt"],
            )


def _differ_in_turns(members: list[One]) -> bool:
    """Whether turns of a group were rewarded differently: then it teaches something though its totals are equal."""
    first, *others = [{of: [*given.turns] for of, given in turns.items()} for *_, turns in members]
    return any(other != first for other in others)
