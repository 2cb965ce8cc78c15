"""Makes rollouts: has prompts completed and scored, and puts together what the loss needs of them.

    new_samples -> sample -> score -> make (log-probabilities, advantages) -> parts_of (micro-batches)

It imports no trainer: `owner` is the one whose hooks it calls.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from posttrain.core.data import accelerator
from posttrain.core.data.samplers import mix
from posttrain.core.evaluation.eval_loop import eval_mode
from posttrain.core.logging.metrics import Metrics
from posttrain.rl.generation.engines import cause_of_gap, settings_of
from posttrain.rl.generation.sampling import is_float32
from posttrain.rl.losses import credit, policy_losses
from posttrain.rl.online import reporting
from posttrain.rl.online.arguments import RolloutConfig
from posttrain.rl.online.asynchronous import Turns
from posttrain.rl.online.reporting import Summary
from posttrain.rl.online.sampler import with_versions
from posttrain.rl.policy.logprobs import logp_gaps
from posttrain.rl.policy.reference import start_problem
from posttrain.rl.rewards.scoring import GroupScores, Scores
from posttrain.rl.samples.samples import Rollout, Sample, sequences

if TYPE_CHECKING:
    from posttrain.rl.online.trainer import RolloutTrainer

logger = logging.getLogger(__name__)

NO_LOGPS = (
    "max_staleness above 0 learns from completions of earlier weights, and {} returned no log-probabilities, by which "
    "they are weighted. Leave out top_p, top_k, min_p, repetition_penalty and what else changes probabilities, such as "
    "vllm_structured_outputs_regex and generation_kwargs, which hide them, or set max_staleness=0; "
    "vllm_importance_sampling_correction=False learns without weights."
)

NOT_THE_POLICYS = (
    "The log-probabilities that %s returned with its completions are not those of the policy: %s From now on the "
    "trainer computes them itself, by one more forward of each rollout where the loss needs them."
)


class Rollouts:
    """Completes and scores prompts, and makes rollouts of them, for the `owner`, a trainer, which is held by a weak
    reference: one that is dropped must free its memory at once.
    """

    def __init__(self, owner: RolloutTrainer, args: RolloutConfig) -> None:
        self.owner, self.args = owner, args
        self._scoring = Turns(args.reward_concurrency) if args.max_staleness else nullcontext()

    # ------------------------------------------------------------------------------------------------ samples

    @property
    def overlap(self) -> bool:
        """Whether rollouts may be completed at the same time."""
        owner, environments = self.owner, self.owner.environments
        talks = owner.rollout_func is None and owner.sampler.has_tools and environments.run_beside
        return (owner.episodes is not None or talks) and owner.sampler.may_overlap

    def sync(self) -> None:
        owner = self.owner
        owner.sampler.sync_weights(owner.model, owner.state.global_step, owner.clock)

    def sample(self, samples: list[Sample], temperature: float | None = None) -> list[Sample]:
        """The `samples` completed by the current weights. Every process must call it, also one that has none."""
        with self.owner.sampler.weights_to_generate(self.owner.model):
            self.sync()
            return self.complete(samples, temperature)

    def sample_to_score(self, samples: list[Sample]) -> list[Sample]:
        """As `sample`; where ``reward_concurrency`` is above 1, the scores of each group begin when it has ended."""
        owner, size = self.owner, self.owner.num_generations
        if self.args.reward_concurrency == 1 or owner.dist.peers > 1:
            return self.sample(samples)
        score = partial(owner.rewards.of, trainer_state=owner.state, is_whole=False)
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
        with nullcontext() if sampler.may_overlap else sampler.generating, sampler.session():
            version = sampler.version if owner.source.background is not None else None
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
            scores: Scores = owner.dist.on_first(partial(owner.score, samples))
        scores = replace(scores, names=owner.rewards.names, weights=owner.rewards.weights)
        if owner.sampler.environments.factories:
            owner.sampler.environments.give_back(samples)
        for name, seconds in zip(scores.names, scores.seconds, strict=True):
            clock.add(f"reward_{name}", seconds)
        for name, values in scores.metrics.items():
            owner.metrics.add_sum(name, sum(values), len(values))
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
        source.num_tokens += int(everyone.prompt_lengths.sum() + everyone.lengths.sum())  # read and written
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

    def with_logps(self, rollout: Rollout, samples: list[Sample]) -> tuple[Rollout, torch.Tensor | None]:
        """(`rollout` with log-probabilities of the old and the reference policy, their KL if requested)."""
        owner, samples = self.owner, sequences(samples)
        rollout, old = owner.old_logps.of(rollout, all(sample.is_exact for sample in samples))
        rollout, kl = owner.complete_rollout(rollout, samples), None
        if owner.old_logps.begins is not None:
            owner.old_logps.check_reference(rollout, owner.old_logps.begins)
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
        owner, multiple = self.owner, self.args.pad_to_multiple_of
        multiple = None if multiple == "auto" else multiple
        positions = None if owner.image_prompts is None else owner.image_prompts.positions
        pad = owner.sampler.codec.tokenizer.pad_token_id
        return rollout.micro_batches(owner.train_batch_size, owner.shares_prompts, pad, multiple, positions)

    # ------------------------------------------------------------------------------------------------ evaluation

    def evaluate(self, rows: list[dict[str, Any]], models: Sequence[nn.Module]) -> None:
        """Complete and score a batch of prompts; logs rewards, ``pass@k`` and the policy loss. Every process must call
        it, also one without rows, as the weights of `models` are gathered for the loss.
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


class OldLogps:
    """The log-probabilities of the policy that sampled: those of the engine, once they are proved, or computed again.

    An engine may declare that what it returns is exact, as training computes it. At the first rollout of a run that is
    compared with a forward of the policy, and where it is wrong, every rollout takes one from then on.

    Args:
        owner: the trainer, by a weak reference, which says what its loss reads.

    Attributes:
        recomputes: the engine's log-probabilities were found to be others than the policy's.
        compared: this run has compared them.
        starts_at_reference: the reference should be the policy of the first optimizer step.
        begins: (N, C) what the policy gives there, to be compared with the reference.
    """

    def __init__(self, owner: RolloutTrainer, args: RolloutConfig) -> None:
        self.owner, self.args, self.dist = owner, args, owner.dist
        self.recomputes, self.compared, self.starts_at_reference = False, True, False
        self.begins: torch.Tensor | None = None

    def begin_run(self) -> None:
        self.recomputes = self.compared = False

    def of(self, rollout: Rollout, is_exact: bool) -> tuple[Rollout, torch.Tensor | None]:
        """(`rollout` with what the loss reads, (N, C) log-probabilities of the old policy where they are known). With
        `is_exact` the engine declares its own exact. Raises ValueError where completions of earlier weights cannot be
        weighted.
        """
        owner, needs_old = self.owner, self.owner.needs_old_logps
        sampled, stale, quantile = rollout.sampling_logps, rollout.versions is not None, 1 - owner.top_entropy_quantile
        declared = is_exact and sampled is not None and self.dist.precision == "no"
        exact = declared and not stale and not self.recomputes
        wants = not self.recomputes and owner._corrects_engine
        corrects = wants and not exact and sampled is not None
        if stale and wants and not corrects:
            raise ValueError(NO_LOGPS.format(type(owner.generator).__name__))
        first, self.compared = not self.compared, True
        starts, self.starts_at_reference = first and self.starts_at_reference and owner.state.global_step == 0, False
        old, self.begins = sampled if exact else None, None
        asked = (needs_old or owner.needs_kl_of_samples) and (first or old is None)
        if quantile > 0 or corrects or starts or asked:
            found = owner.rollout_maker.logps_of(owner.model, rollout, quantile > 0)
            if first and declared and self.misses(found[0], rollout):
                exact = corrects = False
            old = sampled if exact and quantile <= 0 else found[0]
            if quantile > 0:
                entropies, mask = (values.to(self.dist.device) for values in (found[1], rollout.loss_mask))
                rollout = replace(rollout, entropy_mask=owner.get_high_entropy_mask(entropies, mask, quantile).cpu())
            if sampled is not None and old is not None and corrects:
                weights = correction(old, sampled, rollout.loss_mask, self.args, owner.metrics)
                rollout = replace(rollout, correction=weights)
            self.begins = found[0] if starts else None
        return replace(rollout, old_logps=old if needs_old or corrects else None), old

    def check_reference(self, rollout: Rollout, begins: torch.Tensor) -> None:
        """Raise ValueError where the reference is not the policy, whose log-probabilities `begins` are: (N, C)."""
        if rollout.ref_logps is not None and rollout.routes is None:
            half = self.dist.precision != "no" or not is_float32(self.owner.model)
            begun, reference = ((logps * rollout.loss_mask).sum(1) for logps in (begins, rollout.ref_logps))
            if problem := start_problem(begun, reference, half):
                raise ValueError(problem)

    def misses(self, found: torch.Tensor, rollout: Rollout) -> bool:
        """Whether log-probabilities that an engine declared exact are not those `found`, in any process; then they are
        recomputed from now on, with one warning.
        """
        sampled, mask, why = rollout.sampling_logps, rollout.loss_mask, None
        step = self.owner.state.global_step
        same_weights = rollout.versions is None or bool((rollout.versions == step)[mask].all())
        if sampled is not None and same_weights:
            gaps, limit = logp_gaps(found, sampled, mask, bool(self.args.tf32))
            if not gaps.max() <= limit:
                why = f"they differ by {float(gaps.max()):.2g}, and rounding explains {limit:.2g}. "
                why += cause_of_gap(self.owner.model, settings_of(self.args), rollout.prompt_lengths, gaps > limit)
        whys = [one for one in self.dist.gather_object(why) if one is not None]
        self.recomputes = bool(whys)
        if whys and self.dist.is_main:
            logger.warning(NOT_THE_POLICYS, type(self.owner.generator).__name__, whys[0])
        return self.recomputes


def correction(
    old_logps: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor, args: RolloutConfig, metrics: Metrics
) -> torch.Tensor:
    """Weights (N, C) or (N, 1), from log-probabilities (N, C) of the policy and of the engine; logs both."""
    gap = (old_logps - sampled).abs()[mask]
    gap = gap[~gap.isnan()]
    metrics.add_sum("sampling/sampling_logp_difference/mean", float(gap.sum()), len(gap))
    _add_range(metrics, "sampling/sampling_logp_difference", gap, ("max",))
    mode, least = args.vllm_importance_sampling_mode, args.vllm_importance_sampling_clip_min
    most = args.vllm_importance_sampling_clip_max
    weights = policy_losses.engine_correction(old_logps, sampled, mask.float(), mode, least, most)
    counted = weights.flatten() if weights.shape[1] == 1 else weights[mask]
    metrics.add_sum("sampling/importance_sampling_ratio/mean", float(counted.sum()), len(counted))
    _add_range(metrics, "sampling/importance_sampling_ratio", counted, ("min", "max"))
    return weights


def _add_range(metrics: Metrics, name: str, values: torch.Tensor, which: tuple[str, ...]) -> None:
    for end in which if values.numel() else ():
        metrics.add_extreme(f"{name}/{end}", getattr(values, end)().item(), end)
