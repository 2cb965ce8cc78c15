r"""Contrastive Preference Optimization, Xu et al. 2024, https://arxiv.org/abs/2401.08417, and SimPO on the same base.

CPO, eq. 3 and 5, with a uniform prior instead of DPO's reference:

.. math:: -\log\sigma(\beta(\log\pi(y_w|x) - \log\pi(y_l|x))) - \alpha_{cpo}\log\pi(y_w|x)

SimPO, Meng et al. 2024, https://arxiv.org/abs/2405.14734, eq. 6, with log-probabilities per token and a target margin:

.. math:: -\log\sigma(\beta(\overline{\log\pi}(y_w|x) - \overline{\log\pi}(y_l|x)) - \gamma)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.compat.trainer_names import reads_from_arguments
from posttrain.core import opt
from posttrain.rl.algorithms.dpo import alpha_score, logistic
from posttrain.rl.preference.arguments import WITHOUT_REFERENCE, PreferenceConfig
from posttrain.rl.preference.reference_free import ReferenceFreeTrainer
from posttrain.rl.preference.trainer import Completions


def sigmoid(margin: torch.Tensor, beta: float, label_smoothing: float, gamma: float) -> torch.Tensor:
    """The logistic loss of CPO; `label_smoothing` is the assumed share of mislabelled pairs."""
    return logistic(beta * margin, label_smoothing)


def simpo(margin: torch.Tensor, beta: float, label_smoothing: float, gamma: float) -> torch.Tensor:
    """SimPO, eq. 6: the logistic loss of margins per token, less `gamma`."""
    return sigmoid(margin - gamma / beta, beta, label_smoothing, gamma)


def hinge(margin: torch.Tensor, beta: float, label_smoothing: float, gamma: float) -> torch.Tensor:
    r"""SLiC, Zhao et al. 2023, https://arxiv.org/abs/2305.10425: :math:`\max(0, 1 - \beta d)`."""
    return torch.relu(1 - beta * margin)


def ipo(margin: torch.Tensor, beta: float, label_smoothing: float, gamma: float) -> torch.Tensor:
    r"""Azar et al. 2023, https://arxiv.org/abs/2310.12036, eq. 17, of margins per token: :math:`(d - 1/2\beta)^2`."""
    return (margin - 1 / (2 * beta)) ** 2


#: ``(margin (B,), beta, label_smoothing, gamma) -> (B,)``
LOSSES = {"sigmoid": sigmoid, "hinge": hinge, "ipo": ipo, "simpo": simpo}
OF_THE_MEAN = ("ipo", "simpo")


@dataclass
class CPOConfig(PreferenceConfig):
    """Arguments of `CPOTrainer`."""

    beta: float = opt(0.1, "Steepness of the loss over the margin. SimPO takes 2 to 2.5.", above=0)
    loss_type: str = opt("sigmoid", "A loss in `posttrain.rl.algorithms.cpo.LOSSES`.", choices=tuple(LOSSES))
    label_smoothing: float = opt(0.0, "Assumed share of mislabelled pairs.", min=0, below=0.5)
    cpo_alpha: float = opt(1.0, "Weight of the likelihood of the chosen completion; 0 for SimPO as published.", min=0)
    simpo_gamma: float = opt(0.5, "SimPO's target margin.", min=0, needs="loss_type=simpo")
    alpha: float = opt(
        0.0, "AlphaPO's transformation of the reward: log-probabilities p become (1 - p^-alpha) / alpha. 0: no change."
    )

    OLD_NAMES = WITHOUT_REFERENCE

    @classmethod
    def accept_old_names(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        """``loss_type="alphapo"``, which is simpo without the likelihood of the chosen completion, and with an
        alpha.
        """
        kwargs = super().accept_old_names(kwargs)
        if kwargs.get("loss_type") == "alphapo":
            kwargs = {"cpo_alpha": 0.0} | kwargs | {"loss_type": "simpo"}
        return kwargs

    def _problems(self) -> Iterator[str]:
        if self.label_smoothing and self.loss_type in ("hinge", "ipo"):
            yield f"label_smoothing={self.label_smoothing} has no meaning for loss_type={self.loss_type!r}; set it to 0"


@reads_from_arguments("alpha", "beta", "cpo_alpha", "label_smoothing", "loss_type", "max_length", "simpo_gamma")
class CPOTrainer(ReferenceFreeTrainer):
    """Trains a policy to prefer the chosen completion of each pair, without a reference: CPO and SimPO.

    The arguments are those of `posttrain.rl.algorithms.dpo.DPOTrainer`, without ``ref_model``.
    """

    config_class = CPOConfig
    args: CPOConfig
    tag_names = ("posttrain", "cpo")

    def preference_loss(self, chosen: Completions, rejected: Completions, inputs: dict[str, Any]) -> torch.Tensor:
        """The loss of each pair, (B,). The likelihood is that of a token of the chosen completion, on average."""
        args, margin = self.args, self.score_of(chosen) - self.score_of(rejected)
        losses = LOSSES[args.loss_type](margin, args.beta, args.label_smoothing, args.simpo_gamma)
        nll = -chosen.mean_logp.detach().sum() if args.cpo_alpha else 0.0  # which is not in the loss
        self.metrics.add_sum("nll_loss", nll, len(losses))
        return losses - args.cpo_alpha * chosen.mean_logp

    def compared_logp(self, side: Completions) -> torch.Tensor:
        """(B,) log-probability of a completion, per token if the loss needs that."""
        return side.mean_logp if self.args.loss_type in OF_THE_MEAN else side.logp

    def score_of(self, side: Completions) -> torch.Tensor:
        r"""(B,) what is compared, transformed if ``alpha`` is set.

        AlphaPO, Gupta et al. 2025, https://arxiv.org/abs/2501.03884, eq. 8: :math:`(1 - p^{-\alpha}) / \alpha`.
        """
        logp = self.compared_logp(side)
        return alpha_score(logp, 1 - self.args.alpha) if self.args.alpha else logp

    def rewards(self, side: Completions) -> torch.Tensor:
        """(B,) beta times what the loss compares."""
        return self.args.beta * self.score_of(side)
