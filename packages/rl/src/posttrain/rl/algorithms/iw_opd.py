r"""Importance-weighted on-policy distillation, https://arxiv.org/abs/2606.22600.

The policy gradient of KL(student || teacher) on the student's own completions, where tokens behind a beginning that the
two disagree on count less:

.. math::
    A_t = \log p_T(y_t) - \log p_S(y_t), \quad w_t = 1 + \gamma \Big(1 - \frac{\sum_{k<t} |A_k|}{\sum_k |A_k|}\Big),
    \quad L = -\frac{1}{T} \sum_t w_t A_t \log p_S(y_t)

with a gradient of the last factor alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.core.config import opt, other_default
from posttrain.core.errors import ConfigError
from posttrain.core.fields.old_names import Removed, Renamed
from posttrain.rl.algorithms.distillation import DistillationConfig, DistillationTrainer
from posttrain.rl.policy.logprobs import CompletionLogps


@dataclass
class IWOPDConfig(DistillationConfig):
    """Arguments of `IWOPDTrainer`."""

    loss_type: str = opt(
        "policy_gradient",
        "The weighted policy gradient of the reverse divergence, or a divergence of whole distributions.",
        choices=("policy_gradient", "divergence"),
    )
    top_p: float = other_default(DistillationConfig, "top_p", 0.95)
    disable_dropout: bool = other_default(DistillationConfig, "disable_dropout", True)
    iw_opd_gamma: float = opt(0.5, "How much more than the last token the first one counts; 0: all alike.", min=0)
    iw_opd_epsilon: float = opt(1e-8, "Lower bound of the sum that the weights divide by.", above=0)

    OLD_NAMES = {
        "distillation_objective": Renamed(
            "loss_type",
            lambda old: {"iw_opd": "policy_gradient", "jsd": "divergence"}.get(old, old),
            back=lambda new: {"policy_gradient": "iw_opd", "divergence": "jsd"}[new],
        ),
        "use_teacher_server": Removed("teacher_model_server_url alone says so.", harmless=None),
    }

    @classmethod
    def accept_old_names(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Refuses `use_teacher_server` without the address of one."""
        if kwargs.get("use_teacher_server") and not {"teacher_model_server_url", "teacher_server_urls"} & {*kwargs}:
            problem = "use_teacher_server=True names no server; set teacher_model_server_url, such as http://host:8000"
            raise ConfigError(cls.__name__, [problem])
        return super().accept_old_names(kwargs)

    def _problems(self) -> Iterator[str]:
        if self.loss_type == "policy_gradient" and self.gradient_accumulation_steps % (
            self.steps_per_generation * self.num_iterations
        ):
            yield (
                f"steps_per_generation={self.steps_per_generation} and num_iterations={self.num_iterations} learn in "
                "several optimizer steps from what one policy sampled, and the loss has no ratio to it; leave both out"
            )


class IWOPDTrainer(DistillationTrainer):
    """Trains a student on its own completions, tokens after a disagreement with its teacher less. Arguments: see
    `DistillationTrainer`.
    """

    config_class: type[IWOPDConfig] = IWOPDConfig
    args: IWOPDConfig
    tag_names = ("posttrain", "iw-opd")

    def policy_loss(self, policy: CompletionLogps, inputs: dict[str, Any]) -> torch.Tensor:
        """-w A log p of each token, (N, C)."""
        args, logps, mask = self.args, policy.logps, inputs["loss_mask"]
        advantages = (inputs["ref_logps"] - inputs.get("old_logps", logps.detach())) * mask
        sizes = advantages.abs()
        before = sizes.cumsum(1) - sizes
        weights = 1 + args.iw_opd_gamma * (1 - before / sizes.sum(1, keepdim=True).clamp(min=args.iw_opd_epsilon))
        self.metrics.add_sum("divergence", -advantages.sum(), mask.sum())
        self.metrics.add_sum("iw_opd/mean_abs_advantage", sizes.sum(), mask.sum())
        self.metrics.add_sum("iw_opd/mean_advantage", (weights * advantages).sum(), mask.sum())
        self.metrics.add_sum("iw_opd/mean_weight", (weights * mask).sum(), mask.sum())
        loss: torch.Tensor = -logps * weights * advantages
        return loss
