"""How the loss of a trainer is scaled: what its `compute_loss` returns, and what its gradients allow."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from posttrain.core.distributed import environment
from posttrain.core.losses import normalization, scale_check
from posttrain.core.models.wrapping import local_part, replaced
from posttrain.core.training import override_checks

if TYPE_CHECKING:
    from posttrain.core.trainer import Trainer

logger = logging.getLogger(__name__)


class Scaling:
    """What `training_step` knows of a trainer's loss. Made when the trainer takes a model, and again when training
    begins, since a script may have replaced methods in between.
    """

    def __init__(self, owner: Trainer) -> None:
        self.owner, self.declared = owner, declared_kind(owner)
        means = None if self.declared is None else self.declared != "sum"
        self.objective = normalization.Objective(owner.compute_loss, means, own_count=self.declared == "mixed")
        # No method or function of the user takes the place of our loss, or the model's.
        self.is_own_loss = override_checks.is_ours(owner, "compute_loss") and owner.compute_loss_func is None
        # A loss is multiplied with it, since processes average their gradients.
        self.factor = owner.dist.world_size if owner.args.average_tokens_across_devices else 1
        stock = "windows get_batch_samples count_items prepare_inputs complete_inputs".split()
        counts = all(override_checks.is_ours(owner, name) and override_checks.is_stock(owner, name) for name in stock)
        #: A script's own `_prepare_inputs` may take a part of the rows, of which the window has counted all.
        self.has_own_inputs = not override_checks.is_ours(owner, "_prepare_inputs")
        counts &= not self.has_own_inputs
        #: A micro-batch that is the whole window has all its items: then every kind of loss is the same number, and a
        #: script's, which may write somewhere, is not called to measure it.
        self.may_be_whole = not self.is_own_loss and owner.dist.world_size == 1 and counts
        self.steps_in_backward = bool(getattr(owner.optimizer, "steps_in_backward", False))
        self.has_own_step = self.factor > 1 and not override_checks.is_ours(owner, "training_step")
        #: `compute_loss` of the trainer, where another stands in its place.
        self.covered: Callable[..., Any] | None = None
        theirs = self.factor > 1 and self.objective.takes_count and not override_checks.is_ours(owner, "compute_loss")
        read = self.read_by_loss() if theirs else set()
        #: Trials of whether a loss is multiplied with the processes, by what it reads.
        self.trials = [trial for names, trial in _TRIALS.items() if not read.isdisjoint(names)]
        if self.trials:
            self.objective.times, self.objective.is_open = None, True
            # And does so only where there is a count, which transformers gives in training alone.
            self.objective.counts_evaluation = False

    def read_by_loss(self) -> set[str]:
        """The names that a loss or model of the user's reads, as the trainer is now; with one process none."""
        return override_checks.read_by_loss(self.owner) if self.owner.dist.world_size > 1 else set()

    @contextlib.contextmanager
    def as_of_transformers(self, model: nn.Module, inputs: Any, num_items: torch.Tensor | None) -> Iterator[None]:
        """Around a `training_step` of the user's. What `compute_loss` returns within it goes backward as it is: so a
        sum, divided by the items of all processes, is multiplied with their number, as transformers' is.
        """
        owner, objective = self.owner, self.objective
        unknown = num_items if objective.is_open else None
        if unknown is not None and not self.has_own_inputs:
            tried = owner.prepare_inputs(copy.copy(inputs))
            with owner.compute_loss_context_manager():
                self.find_out(model, tried, unknown, owner.count_items(tried))
            unknown = None
        if unknown is None and not self._is_shared:
            yield
            return
        covered: Callable[..., Any] = owner.compute_loss

        def compute_loss(model: nn.Module, inputs: Any, *args: Any, **options: Any) -> Any:
            nonlocal unknown
            if unknown is not None:  # a script's own `_prepare_inputs` may sample and count: what it made is measured
                self.find_out(model, inputs, unknown, owner.count_items(inputs))
                unknown = None
            result = covered(model, inputs, *args, **options)
            given = {**dict(zip(("return_outputs", "num_items_in_batch"), args, strict=False)), **options}
            if given.get("num_items_in_batch") is None or not self._is_shared:
                return result
            share = self.factor / (objective.times or 1)
            if given.get("return_outputs"):
                return result[0] * share, *result[1:]
            return {**result, "loss": result["loss"] * share} if isinstance(result, Mapping) else result * share

        with replaced(owner, "compute_loss", compute_loss), replaced(self, "covered", covered):
            yield
        if unknown is not None:  # no loss was computed here, and the other processes wait
            self.find_out(model, None, unknown, None)

    @property
    def _is_shared(self) -> bool:
        """Whether what `compute_loss` returns is this process' part of a sum over all."""
        return self.objective.returns_mean is False and self.objective.takes_count

    def find_out(self, model: nn.Module, inputs: Any, num_items: torch.Tensor, items: Any) -> None:
        """Find out whether `compute_loss` returns a mean: all processes together, also those without a label, and those
        whose `inputs` are None.
        """
        owner, own, name = self.owner, self.is_own_loss, self.owner.__class__.__name__
        if self.may_be_whole and owner.run.window_size == 1:
            return
        kind = self.declared
        if kind is None:
            ratio = self._ratio(model, inputs, num_items, moves=not own)
            kind = scale_check.kind_of(owner.dist.gather_object(ratio if items else None), own)
        if self.objective.times is None and kind != "mean":  # a mean is averaged over processes with what it is times
            self._count_processes(model, inputs, num_items, items)
        if self.objective.settle(kind, for_good=own or self.declared is not None) and self.declared is None:
            owner.run.progress.own_count = True
            logger.warning(
                f"From step {owner.state.global_step + 1} on, {name}.compute_loss divides only a part of its loss by "
                "num_items_in_batch. It is given the items of each micro-batch, and weighted by their share of the "
                "step, so every part is a mean over the step's items. To say so from the beginning, set "
                f"{name}.loss_is_scaled_for_ga = 'mixed'; to sum the losses of micro-batches instead, set it to True."
            )

    def _ratio(self, model: nn.Module, inputs: Any, num_items: torch.Tensor, **how: Any) -> tuple[float, float] | None:
        """`scale_check.loss_ratio` of the `compute_loss` of the trainer; None without inputs."""
        loss = self.covered or self.owner.compute_loss
        return None if inputs is None else scale_check.loss_ratio(loss, model, inputs, num_items, self.owner, **how)

    def _count_processes(self, model: nn.Module, inputs: Any, num_items: torch.Tensor, items: Any) -> None:
        """Find out whether `compute_loss` multiplies its loss with the number of processes, over which gradients are
        averaged. Raises ValueError where it multiplies a part of it.
        """
        owner = self.owner
        for trial in self.trials:
            try:
                ratio = self._ratio(model, inputs, num_items, otherwise=functools.partial(trial, owner))
            except Exception as error:  # it may cut by their number what it has gathered
                ratio = 1.0, 0.0
                logger.warning(
                    f"{owner.__class__.__name__}.compute_loss fails with twice as many processes ({error!r}). So it is "
                    "not known whether it multiplies its loss with their number, and taken that it does not."
                )
            shown = [one for one in owner.dist.gather_object(ratio if items else None) if one is not None]
            if not shown:
                return
            self.objective.times = self.objective.times or 1
            if all(abs(ratio - 2) <= 2 * exact for ratio, exact in shown):
                self.objective.times = self.factor
            elif not all(abs(ratio - 1) <= exact for ratio, exact in shown):
                raise ValueError(
                    f"{owner.__class__.__name__}.compute_loss multiplies a part of its loss with the number of "
                    "processes, and another part not. Leave the multiplication out: the trainer sums over processes "
                    "itself. Or set average_tokens_across_devices=False, to average the losses of processes."
                )

    def may_go_backward(self, loss: torch.Tensor, items: torch.Tensor | int | None) -> bool:
        """False where the backward pass itself would put a loss that is not finite into the weights, and of a mean over
        nothing, whose gradient may be 0 / 0, where that is known without a wait and no other process waits for it.
        """
        owner, known = self.owner, items is not None and (not isinstance(items, torch.Tensor) or items.is_cpu)
        if known and not items and owner.dist.num_processes == 1 and not owner.dist.uses_deepspeed:
            return False
        return not self.steps_in_backward or owner.args.on_nonfinite == "warn" or bool(torch.isfinite(loss))

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


@contextlib.contextmanager
def _doubled(owner: Trainer) -> Iterator[None]:
    """Within this context scripts read twice as many processes; what accelerate's functions read stays."""
    accelerator, world = owner.accelerator, 2 * owner.args.world_size
    processes, kept = 2 * accelerator.num_processes, vars(owner).keys() & {"num_processes", "world_size"}
    changes: list[tuple[Any, str, Any]] = [
        (type(accelerator), "num_processes", property(lambda _: processes)),
        (accelerator.state, "num_processes", processes),  # until someone makes an `AcceleratorState`
        (environment, "world_size", lambda: world),
        *((owner, name, 2 * vars(owner)[name]) for name in kept),  # by a script
    ]
    with contextlib.ExitStack() as stack:
        for change in changes:
            stack.enter_context(replaced(*change))
        yield


@contextlib.contextmanager
def _doubled_in_torch(owner: Trainer) -> Iterator[None]:
    """Within this context `torch.distributed.get_world_size()` gives twice as many processes; of a group it does not,
    and a loss that gathers by it may fail.
    """
    c10d = torch.distributed.distributed_c10d
    size = c10d._get_group_size
    with replaced(c10d, "_get_group_size", lambda group: size(group) * (2 if group is None else 1)):
        yield


#: By the names of which a loss reads one.
_TRIALS = {("num_processes", "world_size"): _doubled, ("get_world_size",): _doubled_in_torch}


def declared_kind(owner: Trainer) -> str | None:
    """What `compute_loss` is declared to return, ``"sum"``, ``"mean"`` or ``"mixed"``; None: not declared. What our
    trainers know of their own losses does not hold for a method that replaced them.
    """
    scaled, function = owner.loss_is_scaled_for_ga, owner.compute_loss_func
    if scaled is None and function is not None and not callable(function):
        scaled = True  # a text, with which trl's GRPO of 2025 tells transformers so of a `compute_loss` of its own
    if scaled is None and override_checks.is_ours(owner, "compute_loss"):
        scaled = owner.loss_is_scaled()
    return scaled if scaled is None or scaled == "mixed" else "sum" if scaled else "mean"
