r"""REINFORCE++, Hu et al. 2025, https://arxiv.org/abs/2501.03262: advantages normalised over the batch, eq. 10 to 12.

.. math:: A_i = \frac{R_i - \mathrm{mean}(R)}{\mathrm{std}(R)}, \quad R_i = r_i - \mathrm{mean}(r \text{ of its group})

with mean and standard deviation over all prompts; without ``group_baseline``, R is r.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from posttrain.core.config import opt, value_of
from posttrain.rl.algorithms.grpo import GRPOConfig, GRPOTrainer
from posttrain.rl.losses.advantages import reinforce_plus_plus_advantages, total_rewards
from posttrain.rl.losses.policy_losses import LOSSES


@dataclass
class ReinforcePlusPlusConfig(GRPOConfig):
    """Arguments of `ReinforcePlusPlusTrainer`: those of `GRPOConfig`, less what scales rewards."""

    loss_type: str = opt(
        "bnpo",
        "The loss; the paper's is the clipped one, a mean over all tokens of an optimizer step.",
        choices=tuple(LOSSES),
    )
    group_baseline: bool = opt(
        True,
        "Subtract the mean reward of the group first (the paper's REINFORCE++-baseline); off, the batch is the "
        "baseline.",
    )

    def _problems(self) -> Iterator[str]:
        usual = {
            "scale_rewards": "group",
            "multi_objective_aggregation": "sum_then_normalize",
            "turn_credit": "outcome",
        }
        for name, default in usual.items():
            if (given := value_of(self, name)) != default:
                yield (
                    f"{name}={str(given)!r} is of GRPO; REINFORCE++ normalises the summed rewards over "
                    "the batch. Leave it out, or use GRPOTrainer"
                )


class ReinforcePlusPlusTrainer(GRPOTrainer):
    """Trains a policy by REINFORCE with PPO's clip and one normalisation for all prompts."""

    config_class = ReinforcePlusPlusConfig
    args: ReinforcePlusPlusConfig
    tag_names = ("posttrain", "reinforce++")

    def compute_advantages(self, rewards: torch.Tensor, group_size: int, kl: torch.Tensor | None) -> torch.Tensor:
        """Equations 10 to 12 of the paper."""
        total = total_rewards(rewards, self.rewards.weights)
        return reinforce_plus_plus_advantages(total, group_size, self.args.group_baseline)
