r"""Triple Preference Optimization, Saeidi et al. 2024, https://arxiv.org/abs/2405.16681.

Of each prompt there are a chosen (w), a rejected (l) and a reference completion (g), the best that is known. Eq. 8:

.. math:: -\log\sigma\left(\beta(\log\pi(y_w|x) - \log\pi(y_l|x))\right) - \alpha \log\pi(y_g|x)

with the last term a mean over the tokens of a window, in evaluations over those of a row. In TPO-L, log-probabilities
are those of a token on average, and the margin is to exceed :math:`\gamma / \beta`. There is no reference model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from posttrain.compat.trainer_names import reads_from_arguments
from posttrain.core import opt
from posttrain.rl.algorithms import cpo
from posttrain.rl.preference.arguments import WITHOUT_REFERENCE, PreferenceConfig
from posttrain.rl.preference.batches import PreferenceCollator
from posttrain.rl.preference.reference_free import ReferenceFreeTrainer
from posttrain.rl.preference.rows import COMPLETIONS
from posttrain.rl.preference.trainer import Completions

#: ``(margin (B,), beta, label_smoothing, gamma) -> (B,)``. TPO-L is the loss of SimPO.
LOSSES = {"sigmoid": cpo.sigmoid, "hinge": cpo.hinge, "ipo": cpo.ipo, "tpo-l": cpo.simpo}
OF_THE_MEAN = ("ipo", "tpo-l")


@dataclass
class TPOConfig(PreferenceConfig):
    """Arguments of `TPOTrainer`."""

    learning_rate: float = opt(5e-7, "Peak learning rate. With LoRA ten times as much is usual.", min=0)
    beta: float = opt(0.01, "Steepness of the loss over the margin.", above=0)
    loss_type: str = opt("sigmoid", "A loss in `posttrain.rl.algorithms.tpo.LOSSES`.", choices=tuple(LOSSES))
    label_smoothing: float = opt(0.0, "Assumed share of mislabelled pairs.", min=0, below=0.5)
    tpo_alpha: float = opt(1.0, "Weight of the likelihood of the reference completion; 0 leaves it out.", min=0)
    tpo_l_gamma: float = opt(0.5, "Target margin of tpo-l.", min=0, needs="loss_type=tpo-l")

    OLD_NAMES = WITHOUT_REFERENCE

    def _problems(self) -> Iterator[str]:
        if self.label_smoothing and self.loss_type in ("hinge", "ipo"):
            yield f"label_smoothing={self.label_smoothing} has no meaning for loss_type={self.loss_type!r}; set it to 0"


@reads_from_arguments("beta", "label_smoothing", "loss_type", "tpo_alpha", "tpo_l_gamma")
class TPOTrainer(ReferenceFreeTrainer):
    """Trains on the reference completion of each row, and to prefer the chosen completion to the rejected.

    Rows have `prompt`, `chosen`, `rejected` and `reference`. The arguments are those of `posttrain.rl.CPOTrainer`.
    """

    config_class = TPOConfig
    args: TPOConfig
    tag_names = ("posttrain", "tpo")
    data_kind = "triple_preference"
    signature_columns = ("prompt_ids", "chosen_ids", "rejected_ids", "reference_ids")

    @property
    def completions_per_row(self) -> int:
        """3, or 2 where the reference completion has no weight."""
        return 3 if self.args.tpo_alpha else 2

    def make_collator(self, tokenizer: Any, args: Any) -> Callable[[list[Any]], Any]:
        """As the base's, with the reference completion."""
        collator = super().make_collator(tokenizer, args)
        if args.tpo_alpha and isinstance(collator, PreferenceCollator):
            collator.names = COMPLETIONS[self.data_kind]
        return collator

    def preference_loss(self, chosen: Completions, rejected: Completions, inputs: dict[str, Any]) -> torch.Tensor:
        """Eq. 8 of each row, (B,)."""
        args, margin = self.args, self.compared_logp(chosen) - self.compared_logp(rejected)
        losses = LOSSES[args.loss_type](margin, args.beta, args.label_smoothing, args.tpo_l_gamma)
        if not args.tpo_alpha:
            return losses
        (gold,) = inputs.pop("more_completions")
        own = gold.tokens.logps.sum(1)
        self.metrics.add_sum("nll_loss", -own.detach().sum(), gold.lengths.sum())
        if self._rows_per_token is None:  # an evaluation: what a row costs does not depend on its batch
            return losses - args.tpo_alpha * gold.mean_logp
        return losses - args.tpo_alpha * own * self._rows_per_token  # whose mean over rows is one over tokens

    def compared_logp(self, side: Completions) -> torch.Tensor:
        """(B,) log-probability of a completion, per token if the loss needs that."""
        return side.mean_logp if self.args.loss_type in OF_THE_MEAN else side.logp

    _rows_per_token: torch.Tensor | None = None

    def train_on_window(self, model: nn.Module, window: list[Any], num_items: torch.Tensor | None = None) -> None:
        """As the core's. The reference completions' tokens in the window are counted first."""
        if self.args.tpo_alpha:
            self._rows_per_token = self._weight_of_tokens(window, 2)
        super().train_on_window(model, window, num_items)
        self._rows_per_token = None
