"""The rollouts of a run: prompts are completed and scored, what the loss needs of them is put together, and their
micro-batches are handed out.

    prompts -> sample -> score -> (leave out equal groups) -> log-probabilities, advantages -> rollout -> micro-batches

It imports no trainer: `owner` is the one whose hooks it calls.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from posttrain.core.data import accelerator
from posttrain.core.data.samplers import mix
from posttrain.core.evaluation.eval_loop import eval_mode
from posttrain.core.training.plan import Plan
from posttrain.core.training.preemption import Left
from posttrain.rl.losses import credit
from posttrain.rl.losses.advantages import equal_groups, total_rewards
from posttrain.rl.online import setup
from posttrain.rl.online.arguments import RolloutConfig
from posttrain.rl.online.asynchronous import Background, Scored, Turns
from posttrain.rl.online.curriculum import NUMBER, Curriculum, passed
from posttrain.rl.online.ledger import Ledger
from posttrain.rl.online.reporting import Summary
from posttrain.rl.online.sampler import with_versions
from posttrain.rl.rewards.scoring import GroupScores, Scores, joined
from posttrain.rl.samples.samples import Rollout, Sample, sequences

if TYPE_CHECKING:
    from posttrain.rl.online.trainer import RolloutTrainer

logger = logging.getLogger(__name__)

One = tuple[Sample, torch.Tensor, torch.Tensor, dict[int, credit.TurnRewards]]
"""A sample, its rewards and which of them failed, (F,) each, and what its turns were given."""


class Rollouts:
    """The rollouts of a run.

    Args:
        owner: the trainer, by a weak reference: one that is dropped must free its memory at once.

    Attributes:
        rollout: the one whose micro-batches are being learned from. used: how many of them were.
        num_rollouts: that were begun. num_tokens: that the policy has read and written.
        background: what samples while the policy is trained; None in synchronous training.
        ledger: of the run; None: nothing is noted.
        curriculum: chooses prompts; None: they are sampled as they are read.
        per_rollout: micro-batches that are made of a rollout.
    """

    def __init__(self, owner: RolloutTrainer, args: RolloutConfig) -> None:
        self.owner, self.args = owner, args
        self.background: Background | None = None
        self.curriculum: Curriculum | None = None
        self.ledger: Ledger | None = None
        #: Whether the next so many rollouts can be had at once, after a second's wait at most; the same on every
        #: process. None: they are made when they are asked for.
        self.are_there: Callable[[int], bool] | None = None
        self._until_left: Callable[[Callable[[], Any]], Any] = operator.call
        self._scoring = Turns(args.reward_concurrency) if args.max_staleness else contextlib.nullcontext()
        if args.max_staleness:
            owner.sampler.generating = Turns()
        self.forget()

    def forget(self, keeps_count: bool = False) -> None:
        """Drop the present rollout; start the counts again unless `keeps_count`."""
        self.rollout: Rollout | None = None
        self.used, self._length = 0, self.per_rollout
        self._read_again: dict[str, Any] = {}  # where a run that was left in a rollout reads on
        self.owner.sampler.synced_at = None
        if not keeps_count:
            self.num_rollouts = self.num_tokens = 0

    @property
    def per_rollout(self) -> int:
        return self.args.steps_per_generation * self.args.num_iterations

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The context of a run; with ``max_staleness`` above 0, completions are sampled in the background."""
        args, dist, sampler = self.args, self.owner.dist, self.owner.sampler
        if args.max_staleness and not sampler.can.runs_ahead:
            self.background = Background(self)
        wanted = args.max_staleness > 0 if args.sample_ledger is None else args.sample_ledger
        engine = getattr(sampler.generator, "name", type(sampler.generator).__name__)
        writes = wanted and not dist.peer_rank
        self.ledger = Ledger(args.output_dir, dist.rank, engine) if writes else None
        sampler.environments.overlaps = self.background is not None
        try:
            yield
        finally:
            if self.background is not None:
                self.background.close()
            if sampler.can.runs_ahead:
                cast(Any, sampler.generator).close()
            self.background, sampler.environments.overlaps = None, False

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

    def begin_window(self, plan: Plan) -> None:
        """Begin the rollouts that may begin before an optimizer step reads its micro-batches, and wait until those that
        it takes are there. A run that is to end is left meanwhile: a rollout may take long.
        """
        owner, are_there, wanted = self.owner, self.are_there, plan.accumulation
        if self.background is not None:
            self.background.fill(plan, owner.state.global_step, self.left)
            are_there = self.background.has
        if are_there is None:
            return
        if plan.batches_per_epoch is not None:
            wanted = min(wanted, plan.batches_per_epoch - owner.run.progress.batches)
        rollouts = -(-(wanted - self.left) // self.per_rollout)
        with owner.clock("wait"):
            while rollouts > 0 and not are_there(rollouts):
                if reason := owner.run.watch.settle(owner.dist.gather_patiently):
                    owner.run.interrupt(reason)

    def window(self, stream: Iterator[dict[str, Any]], size: int) -> list[dict[str, Any]]:
        """The next `size` micro-batches of `stream`. A signal that comes while their first rollout is sampled, or in a
        run of one process scored, is heard at once: the run is saved as it stood before, and left.
        """
        run, kept = self.owner.run, (self.rollout, self.used, self._length, self.num_rollouts)
        if self.background is not None or not run.watch.on_signals or not setup.generates_alone(self.owner):
            return list(islice(stream, size))
        position, undo = run.loader.state_dict(), run.undo_point()
        rates = None if self.curriculum is None else self.curriculum.state_dict()
        self._until_left = partial(run.watch.at_once, dist=self.owner.dist)
        try:
            return list(islice(stream, size))
        except Left as left:
            self.rollout, self.used, self._length, self.num_rollouts = kept
            if self.curriculum is not None and rates is not None:
                self.curriculum.load_state_dict(rates)
            self._read_again = {"loader": position}
            undo()
            run.interrupt(left.reason)
        finally:
            self._until_left = operator.call

    @property
    def left(self) -> int:
        """Micro-batches of the present rollout that are still to come."""
        return 0 if self.rollout is None else self.per_rollout - self.used

    def micro_batches(self, batches: Iterator[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
        """The micro-batches of the present rollout and of those that follow, which are made of `batches` on demand."""
        while True:
            if self.rollout is None:
                self.rollout, self.used = self.owner.make_rollout(batches), 0
                if self.rollout is None:
                    return
            parts = self.parts_of(self.rollout)
            self._length = len(parts) * self.args.num_iterations
            while self.used < self._length:
                self.used += 1  # before it is yielded: a checkpoint may be saved at the yield
                yield parts[(self.used - 1) % len(parts)]
            self.rollout = None

    # ------------------------------------------------------------------------------------------------ samples

    @property
    def overlap(self) -> bool:
        """Whether rollouts may be completed at the same time."""
        owner = self.owner
        return owner.rollout_func is None and owner.environments.run_beside and owner.sampler.may_overlap

    def sync(self) -> None:
        owner = self.owner
        owner.sampler.sync_weights(owner.model, owner.state.global_step, owner.clock)

    def sample(self, samples: list[Sample], temperature: float | None = None) -> list[Sample]:
        """The `samples` completed by the current weights. Every process must call it, also one that has none."""
        with self.owner.sampler.weights_to_generate(self.owner.model):
            self.sync()
            return cast(list[Sample], self._until_left(partial(self.complete, samples, temperature)))

    def sample_to_score(self, rows: list[dict[str, Any]], number: int) -> list[Sample]:
        """The completed samples of rollout `number`; where ``reward_concurrency`` is above 1, the scores of each group
        begin when it has ended.
        """
        owner, size, samples = self.owner, self.owner.num_generations, self.begin(rows, number)
        if self.args.reward_concurrency == 1 or owner.dist.peers > 1:
            return self.sample(samples)
        score = partial(owner.rewards.of_part, trainer_state=owner.state)
        groups = GroupScores(score, [one.place // size for one in samples], self.args.reward_concurrency)
        owner.sampler.ended = groups.ended
        try:
            samples = self.sample(samples)
            owner.rewards.groups = groups
        except BaseException:
            groups.close()
            raise
        finally:
            owner.sampler.ended = None
        return samples

    def complete(self, samples: list[Sample], temperature: float | None = None) -> list[Sample]:
        """The `samples` completed by the weights that the engine has."""
        owner, sampler = self.owner, self.owner.sampler
        with contextlib.nullcontext() if sampler.may_overlap else sampler.generating, sampler.session():
            version = sampler.version if self.background is not None or sampler.can.runs_ahead else None
            sampling = owner.sampling(temperature)
            if samples:
                with owner.clock("generate"), torch.no_grad(), owner.compute_loss_context_manager():
                    samples = owner.generate(samples, sampling)
            if samples is None:
                raise TypeError("generate() returned None. Return the completed samples: they are never changed.")
            return with_versions(samples, version, sampling.temperature == owner.logps_temperature)

    def score(self, samples: list[Sample]) -> Scores:
        """The scores of completed samples, once for the processes that have the same ones; logs them."""
        owner, clock = self.owner, self.owner.clock
        with self._scoring, clock("score"):
            score = partial(owner.score, samples)
            scores: Scores = owner.dist.on_first(score) if owner.dist.peers > 1 else score()
        scores = replace(scores, names=owner.rewards.names, weights=owner.rewards.weights)
        if owner.environments.factories:
            owner.environments.give_back(samples)
        for name, seconds in zip(scores.names, scores.seconds, strict=True):
            clock.add(f"reward_{name}", seconds)
        for name, values in scores.metrics.items():
            owner.metrics.add_sum(name, sum(values), len(values))
        return scores

    # ------------------------------------------------------------------------------------------------ scored samples

    def with_signal(self, samples: list[Sample], scores: Scores, batches: Iterator[list[dict[str, Any]]]) -> Scored:
        """`samples` with others in the place of groups that teach nothing, of the prompts that come next."""
        owner, dist, layout = self.owner, self.owner.dist, self.owner.layout
        size, wanted = layout.group_size, len(samples) * dist.world_size
        kept: list[One] = []
        spare: list[One] = []
        for number in range(1, self.args.dynamic_sampling_rounds + 1):
            alone = [replace(sample, environment=None) for sample in samples]  # it stays here, and its reward is known
            turns = scores.turns or [{}] * len(samples)
            ones = list(zip(alone, scores.rewards, scores.failed, turns, strict=True))
            dealt = [one for part in dist.gather_object(ones) for one in part]
            everyone = [dealt[place] for place in layout.dealt().argsort()]
            total = total_rewards(torch.stack([rewards for _, rewards, *_ in everyone]), scores.weights)
            for group, is_equal in enumerate(equal_groups(total, size).tolist()):
                members = everyone[group * size : (group + 1) * size]
                is_equal = is_equal and not (owner.credits_turns and credit.differ([given for *_, given in members]))
                (spare if is_equal else kept).extend(members)
            owner.metrics.add("dynamic_sampling/kept", len(kept) / (len(kept) + len(spare)))
            more = None
            if len(kept) < wanted and number < self.args.dynamic_sampling_rounds:
                more = self.next_scored(batches)
            if more is None:
                break
            samples, scores = more
        if dist.is_main and self.ledger is not None and (rest := (kept + spare)[wanted:]):
            left = replace(scores, rewards=torch.stack([rewards for _, rewards, *_ in rest]))
            self.ledger.used([sample for sample, *_ in rest], left.totals.tolist(), owner.sampler.version, None)
        mine = [(kept + spare)[number] for number in layout.numbers(dist.rank)]
        rewards, failed = torch.stack([r for _, r, *_ in mine]), torch.stack([f for *_, f, _ in mine])
        turns = [turns for *_, turns in mine]
        scores = replace(scores, rewards=rewards, failed=failed, columns={}, turns=turns)
        return [sample for sample, *_ in mine], scores

    def next_scored(self, batches: Iterator[list[dict[str, Any]]]) -> Scored | None:
        """Completions of the next batch of prompts; None where the epoch has no more."""
        sampler = self.owner.sampler
        if self.background is not None:
            if not (parts := self.background.scored(self.owner.metrics, self.owner.clock)):
                return None
            samples = [sample for some, _ in parts for sample in some]
            scores = joined([own for _, own in parts], [len(some) for some, _ in parts])
        else:
            if (read := next(batches, None)) is None:
                return None
            sample = partial(self.sample_to_score, *self.begun(read))
            if sampler.can.has_own_weights:
                self.sync()  # not below: an engine that stays away is waited for once
                samples = sampler.with_attempts(sample, self.sync)
            else:
                samples = sample()
            score = partial(self.score, samples)  # whose functions may wait for other processes
            scores = self._until_left(score) if self.owner.dist.num_processes == 1 else score()
        if self.curriculum is not None:
            own = passed([one.row_number for one in samples], scores.rewards[:, 0], self.args.pass_threshold)
            self.curriculum.update([one for part in self.owner.dist.gather_object(own) for one in part])
        return samples, scores

    def begin(self, rows: list[dict[str, Any]], number: int, part: int = 0) -> list[Sample]:
        """Samples of rollout `number`, without completions; `rows` are that part of it."""
        places, seed = self.owner.layout.numbers(self.owner.dist.rank).tolist(), self.args.seed
        places = places[part * len(rows) : (part + 1) * len(rows)]
        numbers = [row.get(NUMBER) for row in rows]
        rows = rows if self.curriculum is None else [{k: v for k, v in row.items() if k != NUMBER} for row in rows]
        return [
            replace(sample, seed=mix(seed, number, place), rollout=number, place=place, row_number=row_number)
            for sample, place, row_number in zip(self.owner.new_samples(rows), places, numbers, strict=True)
        ]

    def begun(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
        """(the prompts of a new rollout, for which `rows` were read, and its number)."""
        number = self.num_rollouts
        self.num_rollouts += 1
        if self.curriculum is not None:
            layout = self.owner.layout
            places = layout.numbers(self.owner.dist.rank) // layout.group_size
            rows = self.curriculum.choose(rows, places.tolist(), number)
        return rows, number

    # ------------------------------------------------------------------------------------------------ rollouts

    def make(self, batches: Iterator[list[dict[str, Any]]]) -> Rollout | None:
        """The next rollout; None where the epoch has no more prompts."""
        owner, dist, layout, metrics = self.owner, self.owner.dist, self.owner.layout, self.owner.metrics
        step, size = owner.state.global_step, owner.num_generations
        if (scored := self.next_scored(batches)) is None:
            return None
        if self.curriculum is not None:
            metrics.update({name: (value, 1) for name, value in self.curriculum.metrics().items()})
        samples, scores = self.with_signal(*scored, batches) if self.args.dynamic_sampling else scored
        self._until_left = operator.call  # what follows changes more
        rollout, kl = owner.old_logps.of(self.of(samples), samples)
        if kl is not None:
            kl = torch.stack([*map(rollout.of_trajectories, (kl, rollout.loss_mask.sum(1).to(kl.dtype)))])
        everyone = Summary.of(samples, scores, kl)
        if dist.world_size > 1:
            everyone = Summary.join(dist.gather_object(everyone), layout.dealt().argsort())
        self.num_tokens += int(everyone.prompt_lengths.sum() + everyone.lengths.sum())  # read and written
        kl = None if everyone.kl is None else everyone.kl[0]
        advantages = owner.compute_advantages(everyone.rewards, size, kl)
        logged: dict[str, Any] = {"num_tokens": (self.num_tokens, "max")}  # the same everywhere, and it only grows
        if dist.rank == 0:  # the same on every process
            logged |= everyone.metrics(size)
        metrics.update(logged)
        own = layout.numbers(dist.rank)
        at_tokens = rollout.of_completions(advantages[own])
        if owner.credits_turns:
            parts = dist.gather_object(credit.weighted(samples, scores.rewards, scores.turns, owner.rewards.weights))
            turns = credit.Turns.of([one for part in parts for one in part]).ordered(layout.dealt().argsort())
            by_turn = owner.compute_turn_advantages(advantages, turns, size)
            advantages = by_turn.sum(1) / turns.lengths.clamp(min=1)
            at_tokens = credit.of_tokens(by_turn[own], samples)
        advantages = advantages[own]
        if rollout.versions is not None and rollout.loss_mask.any():
            ages = step - rollout.versions[rollout.loss_mask]  # (trained tokens,) optimizer steps
            metrics.add_sum("staleness/mean", float(ages.sum()), len(ages))
            metrics.add_extreme("staleness/max", float(ages.max()), "max")
        if self.ledger is not None:
            self.ledger.used(samples, scores.totals.tolist(), owner.sampler.version, step + 1)
        if self.args.log_completions:
            rows = owner.reporter.rows(samples, scores, advantages, step)
            owner.reporter.show(rows, f"Step {step}", "completions", step)
        if self.args.log_trajectories:
            owner.reporter.store(samples, scores, advantages, step + 1, owner.codec.tokenizer)
        return owner.complete_scored(replace(rollout, advantages=at_tokens), samples, scores)

    def of(self, samples: list[Sample]) -> Rollout:
        """The tokens of `samples` alone. Raises ValueError where experts are replayed, and the engine returned none."""
        sampler, replays = self.owner.sampler, self.args.router_replay
        routes = [(one.routes, one.num_read) for one in sequences(samples)] if replays else []
        if any(known is None or len(known) < num_read for known, num_read in routes):
            raise ValueError(
                f"router_replay=True replays the experts chosen in sampling, and {type(sampler.generator).__name__} "
                "returned none. Use the local engine without generation_kwargs that it does not know, or vLLM in this "
                "process (use_vllm=True, vllm_mode='colocate'), or set router_replay=False."
            )
        return Rollout.of(samples, self.args.mask_truncated_completions, sampler.image_token_id)

    def logps_of(self, model: nn.Module, rollout: Rollout, with_entropy: bool = False) -> list[torch.Tensor]:
        """[(N, C) log-probabilities, (N, C) entropies] under the current `model`, without dropout; on the CPU."""
        owner = self.owner
        found: list[list[torch.Tensor]] = [[], []]
        with eval_mode(model), torch.no_grad(), owner.clock("logps"):
            for part in self.parts_of(rollout):
                with owner.compute_loss_context_manager():
                    values = owner.logps(model, owner.prepare_inputs(part), with_entropy, training=False)
                found[0].append(values.logps)
                found[1] += [values.entropies] if values.entropies is not None else []
        width = rollout.loss_mask.shape[1]  # read back once, not with each part
        whole = [torch.cat([nn.functional.pad(v, (0, width - v.shape[1])) for v in kind]) for kind in found if kind]
        with accelerator.waiting():
            return [values.cpu() for values in whole]

    def parts_of(self, rollout: Rollout) -> list[dict[str, Any]]:
        owner, multiple = self.owner, self.args.pad_to_multiple_of
        multiple = None if multiple == "auto" else multiple
        positions = None if owner.image_prompts is None else owner.image_prompts.positions
        pad = owner.codec.tokenizer.pad_token_id
        return rollout.micro_batches(owner.train_batch_size, owner.shares_prompts, pad, multiple, positions)

    # ------------------------------------------------------------------------------------------------ evaluation

    def evaluate(self, rows: list[dict[str, Any]], models: Sequence[nn.Module]) -> None:
        """Complete and score a batch of prompts; logs rewards, ``pass@k`` and the policy loss. Every process must call
        it, also one without rows, as the weights of `models` are gathered for the loss.
        """
        owner, size = self.owner, self.owner.num_generations_eval
        samples = owner.new_samples([row for row in rows for _ in range(size)]) if rows else []
        # Seeds are of the prompt, or of the row where that is not known yet: no batch size and no order changes them.
        known = (sample.prompt_ids or repr(sample.row).encode() for sample in samples)
        seeds = [mix(self.args.seed, i % size, *numbers) for i, numbers in enumerate(known)]
        samples = [replace(one, seed=seed, is_evaluated=True) for one, seed in zip(samples, seeds, strict=True)]
        with owner.sampler.weights_to_generate(owner.model):
            samples = self.sample(samples, self.args.eval_temperature)
            # Processes have other numbers of prompts and of tokens, so they cannot keep in step.
            with owner.dist.gathered(*models):
                if samples:
                    self._log_evaluation(samples, self.score(samples))

    def _log_evaluation(self, samples: list[Sample], scores: Scores) -> None:
        owner, size, summary = self.owner, self.owner.num_generations_eval, Summary.of(samples, scores)
        owner.metrics.update(summary.sums(size, self.args.pass_threshold))
        # Each prompt separately, so that normalization does not depend on the batch size.
        advantages = torch.cat([owner.compute_advantages(group, size, None) for group in scores.rewards.split(size)])
        if self.args.log_completions:
            owner.reporter.evaluated += owner.reporter.rows(samples, scores, advantages, owner.state.global_step)
        rollout = self.of(samples)
        rollout = replace(rollout, advantages=rollout.of_completions(advantages))
        rollout = owner.complete_rollout(rollout, sequences(samples))
        rollout = owner.complete_scored(rollout, samples, scores)
        for part in self.parts_of(rollout):
            part = owner.prepare_inputs(part)
            items = owner.count_items(part)
            with torch.no_grad(), owner.compute_loss_context_manager():
                loss, _ = owner.compute_loss(owner.model, part, True, items)
                owner.metrics.add_sum("loss", loss * items, items)

    # ------------------------------------------------------------------------------------------------ ledger and state

    @property
    def how_dealt(self) -> list[int]:
        """Completions on each process, processes, and completions in a micro-batch."""
        return [self.owner.layout.per_process, self.owner.dist.world_size, self.owner.train_batch_size]

    def state_dict(self) -> dict[str, Any]:
        """The rollout that is being gone through, the counts, and how completions are dealt."""
        state = {"rollouts": self.num_rollouts, "dealt": self.how_dealt, "num_tokens": self.num_tokens}
        state |= self._read_again if self.background is None else self.background.position()
        state |= {} if self.curriculum is None else {"curriculum": self.curriculum.state_dict()}
        if self.rollout is not None and self.used < self._length:
            state |= {"rollout": self.rollout.state_dict(), "used": self.used}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`, from the checkpoint of the optimizer step at which the trainer is."""
        self.forget()
        dealt = self.how_dealt
        if self.ledger is not None:
            self.ledger.resumed(self.owner.state.global_step, self.args.max_staleness)
        self.num_tokens, self.num_rollouts = state["num_tokens"], state["rollouts"]
        if self.curriculum is not None and "curriculum" in state:
            self.curriculum.load_state_dict(state["curriculum"])
        parts = None if self.background is None else self.background.parts
        if self.background is not None and [*dealt, parts] == [*state["dealt"], state.get("parts")]:
            self.background.used = {(number, part) for number, part in state["used_parts"]}
        elif "used_parts" in state:
            logger.warning(
                "The checkpoint was saved while groups of prompts were carried on, of rollouts that were divided "
                "differently: %d groups that were learned from are sampled again.",
                len(state["used_parts"]),
            )
        if "rollout" in state and state["dealt"] == dealt:
            self.rollout, self.used = Rollout.from_state(state["rollout"]), state["used"]
        elif "rollout" in state:
            logger.warning(
                "The checkpoint's rollout was distributed differently (%s completions on each of %s processes, %s in "
                "a micro-batch): the rest of it is skipped, and the next prompts are sampled.",
                *state["dealt"],
            )
