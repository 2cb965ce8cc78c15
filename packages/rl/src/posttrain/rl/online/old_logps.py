"""The log-probabilities of the policy that sampled: those of the engine, once they are proved, or computed again.

An engine may declare that what it returns is exact, as training computes it. At the first rollout of a run that is
compared with a forward of the policy, and where it is wrong, every rollout takes one from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from posttrain.core.distributed.strategies.base import Distributed
from posttrain.core.logging.metrics import Metrics
from posttrain.rl.generation import Generator
from posttrain.rl.generation.engines import cause_of_gap, settings_of
from posttrain.rl.generation.transformers import is_float32
from posttrain.rl.losses import policy_losses
from posttrain.rl.online.arguments import RolloutConfig
from posttrain.rl.policy.logprobs import logp_gaps
from posttrain.rl.policy.reference import check_start
from posttrain.rl.samples.samples import Rollout

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


@dataclass(frozen=True)
class Needs:
    """What a loss reads of the policy that sampled.

    Attributes:
        old_logps: its log-probabilities. kl: its divergence from the reference.
        correction: weights of completions of weights that are not quite the policy.
        entropy_mask: of (N, C) entropies and a mask: the tokens that are learned from; None: all.
    """

    old_logps: bool
    kl: bool
    correction: bool
    entropy_mask: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None


class OldLogps:
    """Decides what of a rollout is computed again.

    Attributes:
        recomputes: the engine's log-probabilities were found to be others than the policy's.
        compared: this run has compared them.
        starts_at_reference: the reference should be the policy of the first optimizer step.
    """

    def __init__(self, args: RolloutConfig, dist: Distributed) -> None:
        self.args, self.dist = args, dist
        self.recomputes, self.compared, self.starts_at_reference = False, True, False
        self._begins: torch.Tensor | None = None  # what the policy gives, to be compared with the reference

    def begin_run(self) -> None:
        """A run begins: its first rollout is compared."""
        self.recomputes = self.compared = False

    def of(
        self,
        rollout: Rollout,
        is_exact: bool,
        needs: Needs,
        compute: Callable[[bool], list[torch.Tensor]],
        model: nn.Module,
        generator: Generator,
        step: int,
        metrics: Metrics,
    ) -> tuple[Rollout, torch.Tensor | None]:
        """(`rollout` with what `needs` names, (N, C) log-probabilities of the old policy where they are known).

        Args:
            is_exact: the engine declares its log-probabilities exact.
            compute: those of the policy now; with True, and its entropies, each (N, C).
            step: the optimizer steps done.

        Raises:
            ValueError: completions of earlier weights cannot be weighted.
        """
        sampled, stale = rollout.sampling_logps, rollout.versions is not None
        declared = is_exact and sampled is not None and self.dist.precision == "no"
        exact = declared and not stale and not self.recomputes
        corrects = needs.correction and not exact and sampled is not None and not self.recomputes
        if stale and needs.correction and not corrects and not self.recomputes:
            raise ValueError(NO_LOGPS.format(type(generator).__name__))
        first, self.compared = not self.compared, True
        starts, self.starts_at_reference = first and self.starts_at_reference and step == 0, False
        by_entropy = needs.entropy_mask is not None
        old, self._begins = sampled if exact else None, None
        if by_entropy or corrects or starts or ((needs.old_logps or needs.kl) and (first or old is None)):
            found = compute(by_entropy)
            if first and declared and self.misses(found[0], rollout, model, generator, step):
                exact = corrects = False
            old = sampled if exact and not by_entropy else found[0]
            if needs.entropy_mask is not None:
                entropies, mask = (values.to(self.dist.device) for values in (found[1], rollout.loss_mask))
                rollout = replace(rollout, entropy_mask=needs.entropy_mask(entropies, mask).cpu())
            if sampled is not None and old is not None and corrects:
                rollout = replace(rollout, correction=correction(old, sampled, rollout.loss_mask, self.args, metrics))
            self._begins = found[0] if starts else None
        return replace(rollout, old_logps=old if needs.old_logps or corrects else None), old

    def check_reference(self, rollout: Rollout, model: nn.Module) -> None:
        """Raise ValueError where a reference that should be the policy's first weights is not, at the first rollout."""
        if self._begins is not None and rollout.ref_logps is not None and rollout.routes is None:
            half = self.dist.precision != "no" or not is_float32(model)
            check_start(self._begins, rollout.ref_logps, rollout.loss_mask, half)
        self._begins = None

    def misses(self, found: torch.Tensor, rollout: Rollout, model: nn.Module, generator: Generator, step: int) -> bool:
        """Whether log-probabilities that an engine declared exact are not those `found`, in any process; then they are
        recomputed from now on, with one warning.
        """
        sampled, mask, why = rollout.sampling_logps, rollout.loss_mask, None
        same_weights = rollout.versions is None or bool((rollout.versions == step)[mask].all())
        if sampled is not None and same_weights:
            gaps, limit = logp_gaps(found, sampled, mask, bool(self.args.tf32))
            if not gaps.max() <= limit:
                why = f"they differ by {float(gaps.max()):.2g}, and rounding explains {limit:.2g}. "
                why += cause_of_gap(model, settings_of(self.args), rollout.prompt_lengths, gaps > limit)
        whys = [one for one in self.dist.gather_object(why) if one is not None]
        self.recomputes = bool(whys)
        if whys and self.dist.is_main:
            logger.warning(NOT_THE_POLICYS, type(generator).__name__, whys[0])
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
