"""The log-probabilities of the policy that sampled, and the weights of completions of other weights."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from posttrain.core.logging.metrics import Metrics
from posttrain.rl.generation.engines import cause_of_gap, settings_of
from posttrain.rl.generation.sampling import is_float32
from posttrain.rl.losses import policy_losses
from posttrain.rl.online.arguments import RolloutConfig
from posttrain.rl.policy.logprobs import logp_gaps
from posttrain.rl.policy.reference import start_problem
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
    """

    def __init__(self, owner: RolloutTrainer, args: RolloutConfig) -> None:
        self.owner, self.args, self.dist = owner, args, owner.dist
        self.recomputes, self.compared, self.starts_at_reference = False, True, False

    def begin_run(self) -> None:
        self.recomputes = self.compared = False

    def of(self, rollout: Rollout, samples: list[Sample]) -> tuple[Rollout, torch.Tensor | None]:
        """(`rollout`, of `samples`, with the log-probabilities of the old and the reference policy that the loss reads;
        their KL, (N,), if requested). Raises ValueError where completions of earlier weights cannot be weighted, or the
        reference is not what the policy begins with.
        """
        owner, needs_old, samples = self.owner, self.owner.needs_old_logps, sequences(samples)
        sampled, stale, quantile = rollout.sampling_logps, rollout.versions is not None, 1 - owner.top_entropy_quantile
        declared = all(one.is_exact for one in samples) and sampled is not None and self.dist.precision == "no"
        exact = declared and not stale and not self.recomputes
        wants = not exact and not self.recomputes and owner._corrects_engine
        corrects = wants and sampled is not None
        if stale and wants and not corrects:
            raise ValueError(NO_LOGPS.format(type(owner.generator).__name__))
        first, self.compared = not self.compared, True
        starts, self.starts_at_reference = first and self.starts_at_reference and owner.state.global_step == 0, False
        old, begins = sampled if exact else None, None
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
            begins = found[0] if starts else None
        rollout = replace(rollout, old_logps=old if needs_old or corrects else None)
        rollout, kl = owner.complete_rollout(rollout, samples), None
        if begins is not None:
            self.check_reference(rollout, begins)
        if owner.needs_kl_of_samples and old is not None and rollout.ref_logps is not None:
            kl = ((old - rollout.ref_logps) * rollout.loss_mask).sum(1)
        return rollout, kl

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
    if len(gap):
        metrics.add_extreme("sampling/sampling_logp_difference/max", gap.max().item(), "max")
    mode, least = args.vllm_importance_sampling_mode, args.vllm_importance_sampling_clip_min
    most = args.vllm_importance_sampling_clip_max
    weights = policy_losses.engine_correction(old_logps, sampled, mask.float(), mode, least, most)
    counted = weights.flatten() if weights.shape[1] == 1 else weights[mask]
    metrics.add_sum("sampling/importance_sampling_ratio/mean", float(counted.sum()), len(counted))
    if len(counted):
        metrics.add_extreme("sampling/importance_sampling_ratio/min", counted.min().item(), "min")
        metrics.add_extreme("sampling/importance_sampling_ratio/max", counted.max().item(), "max")
    return weights
