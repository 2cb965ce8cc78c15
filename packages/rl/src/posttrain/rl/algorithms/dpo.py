r"""Direct Preference Optimization, Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, and variants.

With :math:`r = \log\pi(y|x) - \log\pi_{ref}(y|x)` of the chosen (w) and the rejected (l) completion, eq. 7 is

.. math:: -\log\sigma(\beta (r_w - r_l))

Every loss in the dict `LOSSES` is a function of `Pairs` that returns one number for each pair.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from posttrain.compat.trainer_names import reads_from_arguments
from posttrain.core import opt
from posttrain.core.errors import did_you_mean
from posttrain.core.fields.old_names import Removed
from posttrain.rl.policy.logprobs import CompletionScores
from posttrain.rl.policy.reference import ReferenceArguments
from posttrain.rl.preference.arguments import WITH_REFERENCE, PreferenceConfig
from posttrain.rl.preference.trainer import Completions, PreferenceTrainer

# ------------------------------------------------------------------------------------------------------------- losses


@dataclass(frozen=True)
class Pairs:
    """The inputs of a loss for B pairs; all (B,).

    chosen_ratio, rejected_ratio: log pi(y|x) - log pi_ref(y|x). chosen_score, rejected_score: the same after the
    derivative of the f-divergence, equal to the ratios for reverse KL. chosen_length, rejected_length: tokens.
    chosen_logp, rejected_logp: under the policy. chosen_nll: -log-probability of the chosen completion, summed over
    tokens.
    """

    chosen_ratio: torch.Tensor
    rejected_ratio: torch.Tensor
    chosen_score: torch.Tensor
    rejected_score: torch.Tensor
    chosen_length: torch.Tensor
    rejected_length: torch.Tensor
    chosen_logp: torch.Tensor
    rejected_logp: torch.Tensor
    chosen_nll: torch.Tensor

    @property
    def margin(self) -> torch.Tensor:
        return self.chosen_score - self.rejected_score

    @property
    def mean_margin(self) -> torch.Tensor:
        """The margin with each side divided by its length."""
        chosen, rejected = self.chosen_length.clamp_min(1), self.rejected_length.clamp_min(1)
        return self.chosen_score / chosen - self.rejected_score / rejected


def logistic(d: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    r""":math:`-(1-\epsilon)\log\sigma(d) - \epsilon\log\sigma(-d)`: Mitchell 2023, https://ericmitchell.ai/cdpo.pdf.
    `label_smoothing` is the share of mislabelled pairs.
    """
    if not label_smoothing:
        return -F.logsigmoid(d)
    return -(1 - label_smoothing) * F.logsigmoid(d) - label_smoothing * F.logsigmoid(-d)


def sigmoid(pairs: Pairs, beta: float, label_smoothing: float = 0.0, **_: Any) -> torch.Tensor:
    """DPO, eq. 7; with smoothing conservative DPO, see `logistic`."""
    return logistic(beta * pairs.margin, label_smoothing)


def sigmoid_norm(pairs: Pairs, beta: float, **_: Any) -> torch.Tensor:
    """DPO with each side's ratio divided by its length (Tulu 3, https://arxiv.org/abs/2411.15124, eq. 6)."""
    return -F.logsigmoid(beta * pairs.mean_margin)


def hinge(pairs: Pairs, beta: float, **_: Any) -> torch.Tensor:
    r"""SLiC, Zhao et al. 2023, https://arxiv.org/abs/2305.10425: :math:`\max(0, 1 - \beta(r_w - r_l))`."""
    return torch.relu(1 - beta * pairs.margin)


def ipo(pairs: Pairs, beta: float, **_: Any) -> torch.Tensor:
    r"""Azar et al. 2023, https://arxiv.org/abs/2310.12036, eq. 17, on ratios per token: :math:`(d - 1/2\beta)^2`."""
    return (pairs.mean_margin - 1 / (2 * beta)) ** 2


def exo_pair(pairs: Pairs, beta: float, label_smoothing: float, **_: Any) -> torch.Tensor:
    r"""EXO, Ji et al. 2024, https://arxiv.org/abs/2402.00856, eq. 16: KL of the policy's preference from the smoothed
    label.

    .. math:: p\log\frac{p}{1-\epsilon} + (1-p)\log\frac{1-p}{\epsilon}, \quad p = \sigma(\beta(r_w - r_l))
    """
    d = beta * pairs.margin
    chosen = torch.sigmoid(d) * (F.logsigmoid(d) - math.log1p(-label_smoothing))
    return chosen + torch.sigmoid(-d) * (F.logsigmoid(-d) - math.log(label_smoothing))


def nca_pair(pairs: Pairs, beta: float, **_: Any) -> torch.Tensor:
    r"""NCA, Chen et al. 2024, https://arxiv.org/abs/2402.05369:
    :math:`-\log\sigma(r_w) - \frac12\sum_i\log\sigma(-r_i)`.
    """
    chosen, rejected = beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def robust(pairs: Pairs, beta: float, label_smoothing: float = 0.0, **_: Any) -> torch.Tensor:
    r"""Robust DPO, Chowdhury et al. 2024, https://arxiv.org/abs/2403.00409, eq. 12: unbiased under flipped labels.

    .. math:: \frac{-(1-\epsilon)\log\sigma(d) + \epsilon\log\sigma(-d)}{1 - 2\epsilon}
    """
    d = beta * pairs.margin
    return (label_smoothing * F.logsigmoid(-d) - (1 - label_smoothing) * F.logsigmoid(d)) / (1 - 2 * label_smoothing)


def bco_pair(pairs: Pairs, beta: float, **_: Any) -> torch.Tensor:
    """BCO, Jung et al. 2024, https://arxiv.org/abs/2404.04656, without its moving shift."""
    return -F.logsigmoid(beta * pairs.chosen_ratio) - F.logsigmoid(-beta * pairs.rejected_ratio)


def sppo_hard(pairs: Pairs, beta: float, **_: Any) -> torch.Tensor:
    r"""SPPO, Wu et al. 2024, https://arxiv.org/abs/2405.00675, eq. 4.7 with wins of 1 and 0: ratios to
    :math:`\pm 1/2\beta`.
    """
    return (pairs.chosen_ratio - 0.5 / beta) ** 2 + (pairs.rejected_ratio + 0.5 / beta) ** 2


def aot(pairs: Pairs, beta: float, label_smoothing: float = 0.0, **_: Any) -> torch.Tensor:
    """AOT, Melnyk et al. 2024, https://arxiv.org/abs/2406.05882: compares sorted margins of policy and reference.

    Pairs are sorted within a micro-batch, so the loss depends on how a window is cut.
    """
    policy = pairs.chosen_logp - pairs.rejected_logp
    reference = policy - pairs.chosen_ratio + pairs.rejected_ratio
    return _sorted_loss(policy, reference, beta, label_smoothing)


def aot_unpaired(pairs: Pairs, beta: float, label_smoothing: float = 0.0, **_: Any) -> torch.Tensor:
    """AOT on the sorted ratios of chosen and rejected completions, which need not be pairs."""
    return _sorted_loss(pairs.chosen_ratio, pairs.rejected_ratio, beta, label_smoothing)


def _sorted_loss(higher: torch.Tensor, lower: torch.Tensor, beta: float, label_smoothing: float) -> torch.Tensor:
    return logistic(beta * (higher.sort().values - lower.sort().values), label_smoothing)


def apo_zero(pairs: Pairs, beta: float, **_: Any) -> torch.Tensor:
    r"""APO, D'Oosterlinck et al. 2024, https://arxiv.org/abs/2408.06266, eq. 7: :math:`1 - \sigma(r_w) + \sigma(r_l)`.

    For chosen completions that are better than the model's own.
    """
    return 1 - torch.sigmoid(beta * pairs.chosen_ratio) + torch.sigmoid(beta * pairs.rejected_ratio)


def apo_down(pairs: Pairs, beta: float, **_: Any) -> torch.Tensor:
    r"""APO, eq. 8: :math:`\sigma(r_w) + 1 - \sigma(r_w - r_l)`; for a model better than the chosen completions."""
    ratio = pairs.chosen_ratio
    return torch.sigmoid(beta * ratio) + 1 - torch.sigmoid(beta * (ratio - pairs.rejected_ratio))


def discopop(pairs: Pairs, beta: float, discopop_tau: float = 0.05, **_: Any) -> torch.Tensor:
    r"""DiscoPOP, Lu et al. 2024, https://arxiv.org/abs/2406.08414, eq. 5: logistic and exponential loss, mixed by the
    margin.

    .. math:: (1 - m)(-\log\sigma(d)) + m e^{-d}, \quad m = \sigma(d / \tau)
    """
    d = beta * pairs.margin
    mix = torch.sigmoid(d / discopop_tau)
    return -F.logsigmoid(d) * (1 - mix) + torch.exp(-d) * mix


def sft(pairs: Pairs, pairs_per_token: torch.Tensor, **_: Any) -> torch.Tensor:
    """Cross-entropy of chosen completions, weighted so that the mean over pairs equals the mean over tokens."""
    return pairs.chosen_nll * pairs_per_token


_ALL = sigmoid, hinge, ipo, exo_pair, nca_pair, robust, bco_pair, sppo_hard, aot, aot_unpaired, apo_zero, apo_down
LOSSES: dict[str, Callable[..., torch.Tensor]] = {f.__name__: f for f in (*_ALL, discopop, sft, sigmoid_norm)}
#: Losses that `label_smoothing` changes.
SMOOTHED = [name for name, loss in LOSSES.items() if "label_smoothing" in inspect.signature(loss).parameters]
#: Losses of the margin alone, so the normaliser of any f-divergence cancels.
OF_THE_MARGIN = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")
SORTING = ("aot", "aot_unpaired")


def alpha_score(log_ratio: torch.Tensor, alpha: float) -> torch.Tensor:
    r""":math:`\frac{u^{\alpha-1} - 1}{\alpha - 1}` of :math:`u = e^{r}`; r itself at alpha = 1."""
    if abs(alpha - 1) < 1e-6:
        return log_ratio
    exponent = ((alpha - 1) * log_ratio).clamp(max=80.0)  # e^80 is still a float32
    return torch.expm1(exponent) / (alpha - 1)


#: The derivative f'(u) of each divergence at u = e^r: Wang et al. 2023, https://arxiv.org/abs/2309.16240, table 1.
DIVERGENCES: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "reverse_kl": lambda log_ratio, alpha: log_ratio,
    "forward_kl": lambda log_ratio, alpha: 1 - torch.exp(-log_ratio),
    "js_divergence": lambda log_ratio, alpha: math.log(2) + F.logsigmoid(log_ratio),
    "alpha_divergence": alpha_score,
}


def length_desensitized(scores: CompletionScores, alpha: float) -> torch.Tensor:
    """(2B,) log-probabilities; tokens beyond the length of a pair's shorter completion have the weight `alpha`.

    LD-DPO, Liu et al. 2024, https://arxiv.org/abs/2409.06411, eq. 9.

    Args:
        scores: (2B, T), the chosen completions and then the rejected.
    """
    number = scores.mask.cumsum(1)
    shorter = torch.minimum(*scores.lengths.chunk(2)).repeat(2).unsqueeze(1)
    return (scores.logps * torch.where(number <= shorter, 1.0, alpha)).sum(1)


@torch.no_grad()
def pair_weights(chosen: CompletionScores, rejected: CompletionScores) -> torch.Tensor:
    r"""(B,) how likely the policy would generate both completions itself; 1 if each token is certain.

    WPO, Zhou et al. 2024, https://arxiv.org/abs/2406.11827, eq. 2 with sampled alignment: the product over both sides
    of the geometric mean over their tokens of :math:`\pi(y_t) / \sum_v \pi(v)^2`.
    """
    first, second = (
        (side.logps - side.stats["log_collision"]).sum(1) / side.lengths.clamp_min(1) for side in (chosen, rejected)
    )
    return torch.exp(first + second)


# ------------------------------------------------------------------------------------------------------------- trainer


@dataclass
class DPOConfig(ReferenceArguments, PreferenceConfig):
    """Arguments of `DPOTrainer`."""

    beta: float = opt(0.1, "Strength of the pull towards the reference. Larger stays closer; tau of ipo.", above=0)
    loss_type: list[str] = opt(
        ["sigmoid"], "Losses in `posttrain.rl.algorithms.dpo.LOSSES`, one or several, added up.", choices=tuple(LOSSES)
    )
    loss_weights: list[float] | None = opt(None, "What each of several losses is multiplied by; None: all by 1.")
    label_smoothing: float = opt(
        0.0,
        "Assumed share of mislabelled pairs, for sigmoid, robust, aot and exo_pair.",
        min=0,
        below=0.5,
    )
    f_divergence_type: str = opt(
        "reverse_kl", "Divergence from the reference that is held small.", choices=tuple(DIVERGENCES)
    )
    f_alpha_divergence_coef: float = opt(
        0.5, "The alpha of alpha_divergence; near 1 it is reverse_kl.", needs="f_divergence_type=alpha_divergence"
    )
    ld_alpha: float | None = opt(
        None, "Weight of the tokens beyond the shorter completion of a pair (LD-DPO); None: 1.", min=0, max=1
    )
    use_weighting: bool = opt(False, "Weigh each pair by how probable the policy finds its completions (WPO).")
    discopop_tau: float = opt(
        0.05, "Width of the change from one loss to the other in discopop.", above=0, needs="loss_type=discopop"
    )

    OLD_NAMES = WITH_REFERENCE | {
        "reference_free": Removed("losses without a reference are those of CPOTrainer.", harmless=(None, False)),
        "use_logits_to_keep": Removed("only completion tokens reach the head, always.", harmless=None),
        "use_num_logits_to_keep": Removed("only completion tokens reach the head, always.", harmless=None),
        "tools": Removed("give rows a column tools."),
    }

    @classmethod
    def accept_old_names(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        """``loss_type="sigmoid"``; ``rpo_alpha=1.0``, which is the sft loss with that weight."""
        kwargs = dict(super().accept_old_names(kwargs))
        if isinstance(kwargs.get("loss_type"), str):
            kwargs["loss_type"] = [part.strip() for part in kwargs["loss_type"].split(",")]
        if (alpha := kwargs.pop("rpo_alpha", None)) is not None:
            losses = list(kwargs.get("loss_type") or ["sigmoid"])
            kwargs["loss_weights"] = [*(kwargs.get("loss_weights") or [1.0] * len(losses)), alpha]
            kwargs["loss_type"] = [*losses, "sft"]
        return kwargs

    def _problems(self) -> Iterator[str]:
        # The field's own checks cover the rest.
        losses = [name for name in self.loss_type or [] if isinstance(name, str)]
        for name in losses:
            if name not in LOSSES:
                yield f"loss_type={name!r} is not one of {', '.join(LOSSES)}{did_you_mean(name, LOSSES)}"
        if self.loss_weights is not None and len(self.loss_weights) != len(losses):
            yield (
                f"loss_weights={self.loss_weights} has {len(self.loss_weights)} numbers for {len(losses)} losses "
                f"({', '.join(losses)})"
            )
        if not losses:
            yield f"loss_type=[] names no loss; name one of {', '.join(LOSSES)}"
        if "exo_pair" in losses and not self.label_smoothing:
            yield "loss_type exo_pair needs label_smoothing > 0; its paper takes 1e-3"
        if self.label_smoothing and {*losses} & {*LOSSES} and not {*losses} & {*SMOOTHED}:
            yield (
                f"label_smoothing={self.label_smoothing} has no meaning for {', '.join(losses)}; set it to 0, or a "
                f"loss_type among {', '.join(SMOOTHED)}"
            )
        others = [name for name in losses if name not in OF_THE_MARGIN]
        if self.f_divergence_type != "reverse_kl" and others:
            yield (
                f"f_divergence_type={self.f_divergence_type!r} has no meaning for {', '.join(others)}, which are not "
                "of the margin alone; set reverse_kl"
            )
        if self.use_weighting and (sorting := [name for name in losses if name in SORTING]):
            yield f"use_weighting=True weighs pairs, which {', '.join(sorting)} takes apart; set it to False"


@reads_from_arguments(
    *"beta f_alpha_divergence_coef f_divergence_type label_smoothing ld_alpha loss_weights".split(),
    "padding_free",
    "use_weighting",
    loss_types="loss_type",
    precompute_ref_logps="precompute_ref_log_probs",
)
class DPOTrainer(PreferenceTrainer):
    """Trains a policy to prefer the chosen completion of each pair, relative to a reference: its initial weights.

    Args:
        model: a causal language model, or the name or folder of one to load.
        ref_model: the reference model; by default the initial weights of `model`.
        args: a `DPOConfig`; plain `TrainingArguments` are converted, with the defaults of `DPOConfig` for the rest.
        data_collator: makes a batch of prepared rows; by default `PreferenceCollator`.
        train_dataset: rows with `prompt`, `chosen` and `rejected` as text or messages, without `prompt` where both
            begin with it, or `prompt_ids`, `chosen_ids` and `rejected_ids`; unpaired rows are paired by prompt.
        eval_dataset: such rows, or a dict of several sets by name.
        processing_class: the tokenizer; by default the one that belongs to the model.
        compute_metrics: of the rewards (N, 2) of chosen and rejected completions; the labels are zeros.
        quantization_config: loads a model given by name in 4 or 8 bits.
        peft_config: train adapters (LoRA and others); the reference is then the model without them.

    The other arguments are those of `posttrain.core.Trainer`. An overridden `compute_loss` gets a batch with
    ``input_ids``, ``attention_mask`` and ``completion_mask``, each (2B, T), the chosen completions before the rejected.
    """

    config_class = DPOConfig
    args: DPOConfig
    tag_names = ("posttrain", "dpo")

    def preference_loss(self, chosen: Completions, rejected: Completions, inputs: dict[str, Any]) -> torch.Tensor:
        """The weighted sum of the losses named by ``loss_type``, (B,)."""
        args, pairs = self.args, self.pairs(chosen, rejected)
        options = {"beta": args.beta, "label_smoothing": args.label_smoothing, "discopop_tau": args.discopop_tau}
        per_token = self._pairs_per_token
        per_token = len(chosen.logp) / chosen.lengths.sum().clamp_min(1) if per_token is None else per_token
        weights = zip(args.loss_type, args.loss_weights or [1.0] * len(args.loss_type), strict=True)
        each = [weight * LOSSES[name](pairs, **options, pairs_per_token=per_token) for name, weight in weights]
        losses = reduce(torch.add, each)
        return losses * pair_weights(chosen.tokens, rejected.tokens) if args.use_weighting else losses

    @property
    def token_stats(self) -> tuple[str, ...]:
        return (*super().token_stats, "log_collision") if self.args.use_weighting else super().token_stats

    def pairs(self, chosen: Completions, rejected: Completions) -> Pairs:
        """What the losses read."""
        score, alpha = DIVERGENCES[self.args.f_divergence_type], self.args.f_alpha_divergence_coef
        ratios = chosen.log_ratio, rejected.log_ratio
        scores = score(ratios[0], alpha), score(ratios[1], alpha)
        sides = chosen.lengths, rejected.lengths, chosen.logp, rejected.logp
        return Pairs(*ratios, *scores, *sides, -chosen.tokens.logps.sum(1))

    def completion_logp(self, scores: CompletionScores) -> torch.Tensor:
        """(2B,) the sum over the tokens, with those beyond the shorter completion weighed by ``ld_alpha``."""
        alpha = self.args.ld_alpha
        return super().completion_logp(scores) if alpha is None else length_desensitized(scores, alpha)

    _pairs_per_token: torch.Tensor | None = None

    def train_on_window(self, model: nn.Module, window: list[Any], num_items: torch.Tensor | None = None) -> None:
        """As the core's. The sft loss is a mean over the chosen tokens of the window, which are counted first."""
        if "sft" in self.args.loss_type:
            self._pairs_per_token = self._weight_of_tokens(window, 0)
        super().train_on_window(model, window, num_items)
        self._pairs_per_token = None
