"""Pure loss functions of a policy on completions that it or an earlier version has sampled.

Shapes: N completions of up to T tokens. Values per completion are (N, 1) and broadcast. `mask` (N, T) is 1 at trained
tokens, which the policy chose, and 0 at padding and tool answers.

A loss consists of a function of each token (`LOSSES`) and a normalization of the sum over tokens (`Average`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

# --------------------------------------------------------------------------------------------------------- components


def of_trajectory(values: torch.Tensor, trajectories: torch.Tensor | None) -> torch.Tensor:
    """(N,) or (N, 1) `values` of sequences, summed over each trajectory, at every one of its sequences. `trajectories`
    has the number of each one's, (N,), below N; None where each is one.
    """
    if trajectories is None:
        return values
    return torch.zeros_like(values).index_add(0, trajectories, values)[trajectories]


def importance_ratio(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    mask: torch.Tensor,
    level: str = "token",
    trajectories: torch.Tensor | None = None,
) -> torch.Tensor:
    r""":math:`\pi_\theta / \pi_{old}`, of each token (N, T), or of each trajectory (N, 1) as GSPO has it of a response.

    GSPO, Zheng et al. 2025, https://arxiv.org/abs/2507.18071, equation 7: the geometric mean of the tokens' ratios.
    With the level "sequence_token", GSPO-token, equation 14, that is the value at each token, (N, T), and the gradient
    is the token's own.
    """
    log_ratio = logps - old_logps
    if level in ("sequence", "sequence_token"):
        tokens = of_trajectory(mask.sum(1, keepdim=True), trajectories)
        log_ratio = of_trajectory((log_ratio * mask).sum(1, keepdim=True), trajectories) / tokens.clamp(min=1)
    elif level != "token":
        raise ValueError(f"level={level!r} is none of token, sequence and sequence_token.")
    if level == "sequence_token":
        log_ratio = log_ratio.detach() + logps - logps.detach()
    return log_ratio.exp()


def k3(logps: torch.Tensor, ref_logps: torch.Tensor) -> torch.Tensor:
    r"""An estimate of :math:`KL(\pi_\theta \| \pi_{ref})` at each token that is never negative: :math:`e^d - d - 1`
    with :math:`d = \log\pi_{ref} - \log\pi_\theta` (Schulman 2020, http://joschu.net/blog/kl-approx.html). (N, T) ->
    (N, T).

    Times the importance ratio, its gradient is unbiased too (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section
    3.1).
    """
    d = ref_logps - logps
    return d.exp() - d - 1


def clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, delta: float | None = None
) -> torch.Tensor:
    r"""PPO's surrogate, Schulman et al. 2017, https://arxiv.org/abs/1707.06347, equation 7, as a loss:
    :math:`-\min(\rho A, \mathrm{clip}(\rho, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A)`.

    Args:
        high: a separate upper bound (clip-higher, DAPO, Yu et al. 2025, https://arxiv.org/abs/2503.14476, equation 10).
        delta: also an upper bound of the ratio where A < 0 (two-sided clipping, INTELLECT-2,
            https://arxiv.org/abs/2505.07291, section 3.4). Should be larger than ``1 + high``.
    """
    bounded = ratio.clamp(1 - low, 1 + high)
    if delta is not None:
        ratio = ratio.clamp(max=delta)
    return -torch.minimum(ratio * advantages, bounded * advantages)


def cispo(logps: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, high: float) -> torch.Tensor:
    r"""CISPO, MiniMax-M1, https://arxiv.org/abs/2506.13585, equation 4:
    :math:`-\mathrm{sg}[\min(\rho, \epsilon_{max})] A \log\pi_\theta`. The weight is bounded, not the gradient: every
    token keeps a gradient.
    """
    return -ratio.clamp(max=high).detach() * advantages * logps


def sapo(ratio: torch.Tensor, advantages: torch.Tensor, positive: float, negative: float) -> torch.Tensor:
    r"""SAPO, https://arxiv.org/abs/2511.20347: :math:`-\frac{4}{\tau}\sigma(\tau(\rho - 1)) A`. A smooth gate takes the
    place of the clip; its temperature is `positive` where A > 0, else `negative`.
    """
    tau = torch.where(advantages > 0, positive, negative)
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages


@torch.no_grad()
def vespo_weight(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    correction: torch.Tensor | None,
    positive: tuple[float, float],
    negative: tuple[float, float],
) -> torch.Tensor:
    r"""VESPO, https://arxiv.org/abs/2602.10693: :math:`\phi(w) = w^k e^{\lambda(1 - w)}` of the whole sequence's ratio
    w, (N, 1), without a gradient; 1 where w is 1.

    Args:
        log_ratio: (N, T) of each token. correction: (N, T) or (N, 1) ratios that multiply it, see `engine_correction`.
        positive, negative: (k, lambda) for either sign of the advantage.
    """
    log_w = (log_ratio.clamp(-20, 20) * mask).sum(1, keepdim=True)
    if correction is not None:
        log_w = log_w + correction.log().clamp(math.log(1e-8), 20).sum(1, keepdim=True)
    log_w = log_w.clamp(math.log(1e-8), 20)
    is_good = advantages >= 0
    k = torch.where(is_good, positive[0], negative[0])
    rate = torch.where(is_good, positive[1], negative[1]).clamp(min=1e-4)
    return (rate + k * log_w - rate * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def off_policy_mask(
    logps: torch.Tensor, sampling_logps: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, threshold: float
) -> torch.Tensor:
    """DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, equation 9: 0 for completions with A < 0 that are far from the
    sampling policy (mean log-ratio above `threshold`), else 1. (N, 1), or (N, T) for advantages of tokens.
    """
    gap = (sampling_logps - logps.detach()).nan_to_num(nan=0.0)
    mean_gap = (gap * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return ((advantages >= 0) | (mean_gap <= threshold)).to(logps.dtype)


def entropy_threshold(entropies: torch.Tensor, keep: float) -> torch.Tensor:
    """The entropy threshold of the `keep` most uncertain share of tokens: (tokens,) -> ().

    Wang et al. 2025, https://arxiv.org/abs/2506.01939: a fifth of the tokens drives the policy gradient.
    """
    if not entropies.numel():
        return entropies.new_zeros(())
    ordered, place = entropies.float().sort().values, (1 - keep) * (entropies.numel() - 1)
    below = int(place)  # linear interpolation; torch.quantile is limited to 16 million values
    above = min(below + 1, entropies.numel() - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def engine_correction(
    old_logps: torch.Tensor,
    sampling_logps: torch.Tensor,
    mask: torch.Tensor,
    mode: str,
    clip_min: float | None = None,
    clip_max: float | None = None,
) -> torch.Tensor:
    r"""Weights for completions of an engine whose probabilities differ from the trainer's:
    :math:`\pi_{old} / \pi_{engine}`, (N, T) for tokens, (N, 1) for sequences.

    Yao et al. 2025, https://fengyao.notion.site/off-policy-rl: truncated (TIS) or masked (MIS) importance sampling.

    Args:
        mode: "token_" or "sequence_" (the product over a completion), then "truncate" (bounded) or "mask" (0 outside).
        clip_min, clip_max: the bounds; None: none. NaN among the engine's log-probabilities counts as no difference.
    """
    level, _, how = mode.partition("_")
    log_ratio = ((old_logps - sampling_logps) * mask).nan_to_num(nan=0.0)
    ratio = (log_ratio.sum(1, keepdim=True) if level == "sequence" else log_ratio).exp()
    low, high = (-math.inf if clip_min is None else clip_min), (math.inf if clip_max is None else clip_max)
    return ratio.clamp(low, high) if how == "truncate" else ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


# ------------------------------------------------------------------------------------------------ each token's loss


class Policy(NamedTuple):
    """The inputs of a loss. logps: (N, T) of the policy, with the graph. old_logps: of that which made the rollout.
    ratio: see `importance_ratio`. advantages: (N, 1) or (N, T). mask: (N, T). correction: see `engine_correction`.
    """

    logps: torch.Tensor
    old_logps: torch.Tensor
    ratio: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    correction: torch.Tensor | None = None


@dataclass(frozen=True)
class PolicyLoss:
    """A loss by name.

    Attributes:
        of_tokens: ``(policy, options) -> (N, T) or (N, 1)``; options is a `GRPOConfig` or has its fields.
        average: the normalization, a name in `AVERAGES`.
        corrects_itself: the loss applies the engine correction itself.
    """

    of_tokens: Callable[[Policy, Any], torch.Tensor]
    average: str
    corrects_itself: bool = False


def _clipped(p: Policy, o: Any) -> torch.Tensor:
    high = o.epsilon if o.epsilon_high is None else o.epsilon_high
    return clipped(p.ratio, p.advantages, o.epsilon, high, o.delta)


def _cispo(p: Policy, o: Any) -> torch.Tensor:
    return cispo(p.logps, p.ratio, p.advantages, o.epsilon if o.epsilon_high is None else o.epsilon_high)


def _sapo(p: Policy, o: Any) -> torch.Tensor:
    return sapo(p.ratio, p.advantages, o.sapo_temperature_pos, o.sapo_temperature_neg)


def vespo_weight_of(p: Policy, o: Any) -> torch.Tensor:
    """`vespo_weight` with the settings of `o`: (N, 1)."""
    signs = (o.vespo_k_pos, o.vespo_lambda_pos), (o.vespo_k_neg, o.vespo_lambda_neg)
    return vespo_weight(p.logps - p.old_logps, p.advantages, p.mask, p.correction, *signs)


def _vespo(p: Policy, o: Any) -> torch.Tensor:
    return -vespo_weight_of(p, o) * p.advantages * p.logps


LOSSES: dict[str, PolicyLoss] = {
    "grpo": PolicyLoss(_clipped, "sequences"),  # Shao et al. 2024, https://arxiv.org/abs/2402.03300, equation 3
    "bnpo": PolicyLoss(_clipped, "tokens"),
    "dr_grpo": PolicyLoss(_clipped, "constant"),  # Liu et al. 2025, https://arxiv.org/abs/2503.20783, section 3.2
    "dapo": PolicyLoss(_clipped, "rollout_tokens"),  # Yu et al. 2025, https://arxiv.org/abs/2503.14476, equation 8
    "luspo": PolicyLoss(_clipped, "sums"),  # https://arxiv.org/abs/2602.05261
    "cispo": PolicyLoss(_cispo, "rollout_tokens"),
    "sapo": PolicyLoss(_sapo, "sequences"),
    "vespo": PolicyLoss(_vespo, "rollout_tokens", corrects_itself=True),
}
"""``loss_type`` -> the loss."""

# ------------------------------------------------------------------------------------------------------- the average

# A completion of several sequences, a trajectory, counts once.
AVERAGES = {
    "sequences": "the mean over completions of the mean over their tokens",
    "tokens": "the mean over the tokens of the optimizer step",
    "rollout_tokens": "the sum over tokens, divided by the rollout's mean number of tokens per optimizer step",
    "constant": "the sum over tokens, by completions times their greatest length: long ones weigh no less a token",
    "sums": "the mean over completions of the sum over their tokens",
}


def summed(
    of_tokens: torch.Tensor, mask: torch.Tensor, average: str, trajectories: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum that `count` of the same window divides: (N, T) or (N, 1), (N, T) -> (). For `trajectories` see
    `of_trajectory`.
    """
    masked = of_tokens * mask
    if average == "sequences":
        return (masked.sum(1) / of_trajectory(mask.sum(1), trajectories).clamp(min=1)).sum()
    return masked.sum()


def count(
    mask: torch.Tensor,
    average: str,
    max_length: int,
    tokens_per_row: float | torch.Tensor,
    num_trajectories: int | None = None,
) -> torch.Tensor:
    """What the sum over these rows is divided by, shape (): additive over micro-batches and processes.

    Args:
        mask: (N, T) of a micro-batch. max_length: the longest that a completion may get.
        tokens_per_row: tokens with a loss in the rollout that these rows belong to, by its trajectories.
        num_trajectories: that these rows are of; None: each is one.
    """
    if average == "tokens":
        return mask.sum().float()
    number = float(len(mask) if num_trajectories is None else num_trajectories)
    rows = torch.full((), number, device=mask.device)  # a tensor of a number would be copied to the device, with a wait
    if average == "rollout_tokens":
        return rows * tokens_per_row
    return rows * max_length if average == "constant" else rows
