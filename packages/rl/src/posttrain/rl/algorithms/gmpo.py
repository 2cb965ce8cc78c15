r"""Geometric-Mean Policy Optimization, Zhao et al. 2025, https://arxiv.org/abs/2507.20673, equation 4.

.. math::
    J = E\Big[\frac{1}{G} \sum_i \Big(\prod_t \min\big(\rho_{it}^{s}, \mathrm{clip}(\rho_{it}^{s}, e^{-\epsilon_{low}},
    e^{\epsilon_{high}})\big)^{s}\Big)^{1/|o_i|} A_i\Big], \quad s = \mathrm{sign}(A_i)

The geometric mean of the tokens' ratios moves less with a single large one than the arithmetic mean of GRPO, so the
bounds may be wider.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.core.config import opt, other_default, value_of
from posttrain.rl.algorithms.grpo import GRPOConfig, GRPOTrainer
from posttrain.rl.losses.policy_losses import Policy, of_trajectory
from posttrain.rl.online.reporting import log_clipping
from posttrain.rl.policy.logprobs import CompletionLogps


@dataclass
class GMPOConfig(GRPOConfig):
    """Arguments of `GMPOTrainer`."""

    epsilon: float = opt(0.4, "Bound of the log-ratio of a token: its ratio counts down to exp(-epsilon).", min=0)
    epsilon_high: float | None = opt(
        None, "Its upper bound: the ratio counts up to exp(epsilon_high); None: as epsilon.", min=0
    )
    loss_type: str = opt("grpo", "The average of the loss: over completions.", choices=("grpo",))
    use_bias_correction_kl: bool = other_default(GRPOConfig, "use_bias_correction_kl", False)

    def _problems(self) -> Iterator[str]:
        for name, usual in (("delta", None), ("importance_sampling_level", "token"), ("turn_credit", "outcome")):
            if (given := value_of(self, name)) != usual:
                yield f"{name}={given!r} has no effect: GMPO bounds each token and compares completions; leave it out"


class GMPOTrainer(GRPOTrainer):
    """Trains a policy on groups of completions, by the geometric mean of their tokens' ratios.

    Arguments: see `posttrain.rl.online.trainer.RolloutTrainer`.
    """

    config_class = GMPOConfig
    args: GMPOConfig
    tag_names = ("posttrain", "gmpo")

    def policy_loss(self, policy: CompletionLogps, inputs: dict[str, Any]) -> torch.Tensor:
        """-(the geometric mean of the bounded ratios) A, (N, 1); with a KL term (N, C)."""
        args, logps, mask = self.args, policy.logps, inputs["loss_mask"]
        advantages, trajectories = inputs["advantages"].unsqueeze(1), inputs.get("trajectories")
        old_logps = inputs.get("old_logps", logps.detach())
        log_ratio = logps - old_logps
        bounded = log_ratio.clamp(-args.epsilon, self.epsilon_high)
        bounded = torch.where(advantages > 0, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded))
        used = mask * inputs["entropy_mask"] if "entropy_mask" in inputs else mask
        total = of_trajectory((bounded * used).sum(1, keepdim=True), trajectories)
        loss = -(total / of_trajectory(used.sum(1, keepdim=True), trajectories).clamp(min=1)).exp() * advantages
        parts = Policy(logps, old_logps, log_ratio.exp(), advantages, mask, inputs.get("correction"))
        loss = self._weighted(loss, parts, inputs)
        # Both bounds are of logarithms, so what is compared with 1 - epsilon and 1 + epsilon is too.
        log_clipping(self.metrics, 1 + log_ratio.detach(), advantages, mask, args.epsilon, self.epsilon_high)
        return loss
