r"""Odds Ratio Preference Optimization, Hong et al. 2024, https://arxiv.org/abs/2403.07691.

With p the probability of a token on average (the geometric mean over a completion) and odds :math:`= p / (1 - p)`, eq.
6:

.. math:: -\log p_w - \lambda\log\sigma\left(\log\frac{odds_w}{odds_l}\right)

Fine-tuning and preference in one stage, without a reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from posttrain.compat.trainer_names import reads_from_arguments
from posttrain.core import opt
from posttrain.rl.preference.arguments import WITHOUT_REFERENCE, PreferenceConfig
from posttrain.rl.preference.reference_free import ReferenceFreeTrainer
from posttrain.rl.preference.trainer import Completions


def log_odds(mean_logp: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)) of log p < 0, shape kept. At p = 1 the odds of the largest p below 1 that float32 has."""
    mean_logp = mean_logp.clamp(max=-torch.finfo(torch.float32).eps)
    return mean_logp - torch.log(-torch.expm1(mean_logp))


def odds_ratio(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    r""":math:`-\log\sigma(\log odds_w - \log odds_l)`, eq. 7, of log-probabilities per token: (B,), (B,) -> (B,)."""
    return -F.logsigmoid(log_odds(chosen) - log_odds(rejected))


@dataclass
class ORPOConfig(PreferenceConfig):
    """Arguments of `ORPOTrainer`."""

    beta: float = opt(0.1, "Weight of the odds ratio term; lambda in the paper.", above=0)

    OLD_NAMES = WITHOUT_REFERENCE


@reads_from_arguments("beta", "max_length")
class ORPOTrainer(ReferenceFreeTrainer):
    """Fine-tunes on the chosen completion of each pair and away from the rejected one at once, without a reference.

    The arguments are those of `posttrain.rl.algorithms.dpo.DPOTrainer`, without ``ref_model``.
    """

    config_class = ORPOConfig
    args: ORPOConfig
    tag_names = ("posttrain", "orpo")

    def preference_loss(self, chosen: Completions, rejected: Completions, inputs: dict[str, Any]) -> torch.Tensor:
        """Eq. 6 of each pair, (B,)."""
        ratio, pairs = odds_ratio(chosen.mean_logp, rejected.mean_logp), len(chosen.logp)
        with torch.no_grad():
            difference = log_odds(chosen.mean_logp) - log_odds(rejected.mean_logp)
            self.metrics.add_sum("nll_loss", -chosen.mean_logp.sum(), pairs)
            self.metrics.add_sum("log_odds_ratio", -ratio.sum(), pairs)
            self.metrics.add_sum("log_odds_chosen", difference.sum(), pairs)
        return -chosen.mean_logp + self.args.beta * ratio

    def compared_logp(self, side: Completions) -> torch.Tensor:
        """(B,) the log-probability of a token, on average."""
        return side.mean_logp
