"""How the loss of a trainer is scaled: what its `compute_loss` returns, and what its gradients allow."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from posttrain.core.losses import normalization, scale_check
from posttrain.core.models.wrapping import local_part
from posttrain.core.training import override_checks

if TYPE_CHECKING:
    from posttrain.core.trainer import Trainer

logger = logging.getLogger(__name__)


class Scaling:
    """What `training_step` knows of a trainer's loss. Made when the trainer takes a model, and again when training
    begins, since a script may have replaced methods in between.
    """

    def __init__(self, owner: Trainer) -> None:
        self.owner, mixed = owner, owner.loss_is_scaled_for_ga == "mixed"
        self.objective = normalization.Objective(owner.compute_loss, mixed or declared_mean(owner), own_count=mixed)
        # No method or function of the user takes the place of our loss, or the model's.
        self.is_own_loss = override_checks.is_ours(owner, "compute_loss") and owner.compute_loss_func is None
        # A loss is multiplied with it, since processes average their gradients.
        self.factor = owner.dist.world_size if owner.args.average_tokens_across_devices else 1
        self.steps_in_backward = bool(getattr(owner.optimizer, "steps_in_backward", False))

    def find_out(self, model: nn.Module, inputs: Any, num_items: torch.Tensor, items: Any) -> None:
        """Find out whether `compute_loss` returns a mean: all processes together, also those without a label."""
        owner, own, name = self.owner, self.is_own_loss, self.owner.__class__.__name__
        ratio = scale_check.loss_ratio(owner.compute_loss, model, inputs, num_items, owner, moves=not own)
        ratios = owner.dist.gather_object(ratio if items else None)
        if self.objective.settle(scale_check.kind_of(ratios, own), for_good=own):
            owner.run.progress.own_count = True
            logger.warning(
                f"From step {owner.state.global_step + 1} on, {name}.compute_loss divides only a part of its loss by "
                "num_items_in_batch. It is given the items of each micro-batch, and weighted by their share of the "
                "step, so every part is a mean over the step's items. To say so from the beginning, set "
                f"{name}.loss_is_scaled_for_ga = 'mixed'; to sum the losses of micro-batches instead, set it to True."
            )

    def may_go_backward(self, loss: torch.Tensor, items: torch.Tensor | int | None) -> bool:
        """False where the backward pass itself would put a loss that is not finite into the weights, and of a mean over
        nothing, whose gradient may be 0 / 0, where that is known without a wait and no other process waits for it.
        """
        owner, known = self.owner, items is not None and (not isinstance(items, torch.Tensor) or items.is_cpu)
        if known and not items and owner.dist.num_processes == 1 and not owner.dist.uses_deepspeed:
            return False
        if not self.steps_in_backward or owner.args.on_nonfinite == "warn":
            return True
        return bool(torch.isfinite(loss))

    def divided(
        self, losses: list[torch.Tensor], counts: torch.Tensor, num_items: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """(the shares of a window's loss, the items that they are a mean over), where losses came as (sum, count): they
        and the gradients are divided by the sum of the `counts` over all processes instead of by `num_items`.
        """
        args, dist, why_not = self.owner.args, self.owner.dist, None
        if num_items is None:  # the only micro-batch, which was divided by its count
            return losses, counts
        if dist.world_size > 1 and not args.average_tokens_across_devices:
            why_not = "average_tokens_across_devices=False averages over processes, whatever they counted."
        elif dist.uses_deepspeed or self.steps_in_backward:
            why_not = "the weights are changed, or gradients taken over, during the backward pass."
        if why_not is not None:
            raise ValueError(f"compute_loss returned (sum, count), and {why_not} Return sum / num_items_in_batch.")
        counts = dist.sum(counts)
        factor = torch.where(counts > 0, num_items.clamp(min=1) / counts, 0.0)
        for parameter in self.owner.run.parameters:
            if parameter.grad is not None:
                local_part(parameter.grad).mul_(factor)
        return [loss * factor for loss in losses], counts


def declared_mean(owner: Trainer) -> bool | None:
    """Whether `compute_loss` is declared to return a mean; None: not declared. What our trainers know of their own
    losses does not hold for a method that replaced them.
    """
    scaled = owner.loss_is_scaled_for_ga
    if scaled is None and override_checks.is_ours(owner, "compute_loss"):
        scaled = owner.loss_is_scaled()
    return None if scaled is None else not scaled
