"""Makes rollouts: has prompts completed and scored, and puts together what the loss needs of them.

    new_samples -> sample -> score -> make (log-probabilities, advantages) -> parts_of (micro-batches)

It imports no trainer: `owner` is the one whose hooks it calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from posttrain.core.data import accelerator
from posttrain.core.data.samplers import mix
from posttrain.core.evaluation.eval_loop import eval_mode
from posttrain.rl.losses import credit
from posttrain.rl.online import reporting
from posttrain.rl.online.arguments import RolloutConfig
from posttrain.rl.online.asynchronous import Turns
from posttrain.rl.online.reporting import Summary
from posttrain.rl.rewards.scoring import Scores
from posttrain.rl.samples.samples import Rollout, Sample, sequences

if TYPE_CHECKING:
    from posttrain.rl.online.trainer import RolloutTrainer


class Rollouts:
    """Completes and scores prompts, and makes rollouts of them.

    Args:
        owner: the trainer, by a weak reference: one that is dropped must free its memory at once.
    """

    def __init__(self, owner: RolloutTrainer, args: RolloutConfig) -> None:
        self.owner, self.args = owner, args
        self._scoring = Turns(args.reward_concurrency) if args.max_staleness else nullcontext()

    # ------------------------------------------------------------------------------------------------ samples

    @property
    def overlap(self) -> bool:
        """Whether rollouts may be completed at the same time."""
        return self.owner.episodes is not None and self.owner.sampler.may_overlap

    def sync(self) -> None:
        """Send the weights to the engine, if they have changed."""
        owner = self.owner
        owner.sampler.sync_weights(owner.model, owner.state.global_step, owner.clock)

    def sample(self, samples: list[Sample], temperature: float | None = None) -> list[Sample]:
        """The `samples` completed by the current weights. Every process must call it, also one that has none."""
        with self.owner.sampler.weights_to_generate(self.owner.model):
            self.sync()
            return self.complete(samples, temperature)

    def complete(self, samples: list[Sample], temperature: float | None = None) -> list[Sample]:
        """The `samples` completed by the weights that the engine has."""
        owner = self.owner

        def generate(some: list[Sample]) -> list[Sample]:
            with owner.clock("generate"), torch.no_grad(), owner.compute_loss_context_manager():
                return owner.generate(some, owner.sampling(temperature)) if some else []

        return owner.sampler.complete(samples, generate, keeps_versions=owner.source.background is not None)

    def score(self, samples: list[Sample]) -> Scores:
        """The scores of completed samples, once for the processes that have the same ones; logs them."""
        owner, clock = self.owner, self.owner.clock
        with self._scoring, clock("score"):
            scores: Scores = owner.dist.on_first(lambda: owner.score(samples))
        scores = replace(scores, names=owner.rewards.names, weights=owner.rewards.weights)
        if owner.sampler.environments.factories:
            owner.sampler.environments.give_back(samples)
        reporting.log_scores(owner.metrics, clock, scores)
        return scores

    # ------------------------------------------------------------------------------------------------ rollouts

    def make(self, batches: Iterator[list[dict[str, Any]]]) -> Rollout | None:
        """The next rollout; None where the epoch has no more prompts."""
        owner, metrics, source, layout = self.owner, self.owner.metrics, self.owner.source, self.owner.layout
        dist, step, size = owner.dist, owner.state.global_step, owner.num_generations
        if (scored := source.next(batches, metrics, owner.clock)) is None:
            return None
        samples, scores = scored
        rollout, kl = self.with_logps(self.of(samples), samples)
        if kl is not None:
            kl = torch.stack([*map(rollout.of_trajectories, (kl, rollout.loss_mask.sum(1).to(kl.dtype)))])
        everyone = Summary.join(dist.gather_object(Summary.of(samples, scores, kl)), layout.dealt().argsort())
        source.num_tokens += everyone.num_tokens
        kl = None if everyone.kl is None else everyone.kl[0]
        advantages = owner.compute_advantages(everyone.rewards, size, kl)
        logged: dict[str, Any] = {"num_tokens": (source.num_tokens, "max")}  # the same everywhere, and it only grows
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
        if source.background is not None:
            reporting.log_staleness(metrics, rollout, step)
        source.log_used(samples, scores, step + 1)
        if self.args.log_completions:
            owner.reporter.report_rollout(samples, scores, advantages, step)
        if self.args.log_trajectories:
            owner.reporter.store(samples, scores, advantages, step + 1, owner.sampler.codec.tokenizer)
        return owner.complete_scored(replace(rollout, advantages=at_tokens), samples, scores)

    def of(self, samples: list[Sample]) -> Rollout:
        """The tokens of `samples`, without log-probabilities and advantages.

        Raises:
            ValueError: experts are replayed, and the engine returned none.
        """
        sampler, replays = self.owner.sampler, self.args.router_replay
        routes = [(one.routes, one.num_read) for one in sequences(samples)] if replays else []
        if any(known is None or len(known) < num_read for known, num_read in routes):
            raise ValueError(
                f"router_replay=True replays the experts chosen in sampling, and {type(sampler.generator).__name__} "
                "returned none. Use the local engine without generation_kwargs that it does not know, or vLLM in this "
                "process (use_vllm=True, vllm_mode='colocate'), or set router_replay=False."
            )
        return Rollout.of(samples, self.args.mask_truncated_completions, sampler.image_token_id)

    def with_logps(self, rollout: Rollout, samples: list[Sample]) -> tuple[Rollout, torch.Tensor | None]:
        """(`rollout` with log-probabilities of the old and the reference policy, their KL if requested)."""
        owner, samples = self.owner, sequences(samples)
        rollout, old = owner.old_logps.of(rollout, all(sample.is_exact for sample in samples))
        rollout, kl = owner.complete_rollout(rollout, samples), None
        owner.old_logps.check_reference(rollout)
        if owner.needs_kl_of_samples and old is not None and rollout.ref_logps is not None:
            kl = ((old - rollout.ref_logps) * rollout.loss_mask).sum(1)
        return rollout, kl

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
        """The micro-batches of `rollout`."""
        owner, multiple = self.owner, self.args.pad_to_multiple_of
        multiple = None if multiple == "auto" else multiple
        positions = None if owner.image_prompts is None else owner.image_prompts.positions
        pad = owner.sampler.codec.tokenizer.pad_token_id
        return rollout.micro_batches(owner.train_batch_size, owner.shares_prompts, pad, multiple, positions)

    # ------------------------------------------------------------------------------------------------ evaluation

    def evaluate(self, rows: list[dict[str, Any]], models: Sequence[nn.Module]) -> None:
        """Complete and score a batch of prompts; logs rewards, ``pass@k`` and the policy loss.

        Args:
            models: whose weights are gathered for the loss. Every process must call it, also one without rows.
        """
        owner = self.owner
        samples = self.eval_samples(rows)
        with owner.sampler.weights_to_generate(owner.model):
            samples = self.sample(samples, self.args.eval_temperature)
            # Processes have other numbers of prompts and of tokens, so they cannot keep in step.
            with owner.dist.gathered(*models):
                if samples:
                    self._log_evaluation(samples, self.score(samples))

    def eval_samples(self, rows: list[dict[str, Any]]) -> list[Sample]:
        """Samples without completions of prompts to evaluate on."""
        size = self.owner.num_generations_eval
        samples = self.owner.new_samples([row for row in rows for _ in range(size)]) if rows else []
        # Seeds are of the prompt, or of the row where that is not known yet: no batch size and no order changes them.
        known = (sample.prompt_ids or repr(sample.row).encode() for sample in samples)
        seeds = [mix(self.args.seed, i % size, *numbers) for i, numbers in enumerate(known)]
        return [replace(one, seed=seed, is_evaluated=True) for one, seed in zip(samples, seeds, strict=True)]

    def _log_evaluation(self, samples: list[Sample], scores: Scores) -> None:
        owner, size, summary = self.owner, self.owner.num_generations_eval, Summary.of(samples, scores)
        owner.metrics.update(summary.sums(size, self.args.pass_threshold))
        # Each prompt separately, so that normalization does not depend on the batch size.
        advantages = torch.cat([owner.compute_advantages(group, size, None) for group in scores.rewards.split(size)])
        owner.reporter.collect(samples, scores, advantages, owner.state.global_step)
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
