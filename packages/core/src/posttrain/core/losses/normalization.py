"""Scales the loss of a micro-batch: the contract between the loop and `compute_loss`.

A window is the micro-batches of one optimizer step, on all processes. Its items (predicted tokens, or rows where
nothing is labelled) are counted before the first forward. A `compute_loss` either returns ``sum / num_items_in_batch``,
or a mean over its own micro-batch, which is then weighted by the micro-batch's share of the items. Both give the
gradient of the mean over the whole window, however it is split. It may also return ``(sum, count)``: then the
gradients of the window are divided by the sum of these counts over all micro-batches and processes, once they exist.
An evaluation divides the sum of its sums by the sum of its counts in the same way.

A loss without that argument returns a mean, ``loss_is_scaled_for_ga`` declares it, and the trainers' own losses are
known. Otherwise `posttrain.core.losses.scale_check` measures it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import nn

from posttrain.core.data.batch_limits import explain_failure
from posttrain.core.errors import warn
from posttrain.core.losses import cross_entropy
from posttrain.core.models.embeddings import id_limits
from posttrain.core.models.wrapping import base_model, config_of, is_encoder_decoder, replaced, setting

Value = TypeVar("Value")

CONTAINERS = (Mapping, list, tuple)
#: Types that can hold sums.
WIDE = (torch.float32, torch.float64, torch.int64)

#: Values that the loop itself puts into each log record.
IN_EVERY_RECORD = ("loss", "grad_norm", "learning_rate", "epoch", "step")


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether `function` can be called with the keyword `name`."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


class Objective:
    """Calls a `compute_loss` with any signature and stores whether it returns a mean.

    Args:
        compute_loss: ``(model, inputs, return_outputs=False[, num_items_in_batch=None])``; only its signature is
            inspected.
        returns_mean: True or False where it is known; None if it must be measured
            (`posttrain.core.losses.scale_check`).
        own_count: give each micro-batch its own count.
    """

    def __init__(
        self, compute_loss: Callable[..., Any], returns_mean: bool | None = None, own_count: bool = False
    ) -> None:
        #: The other values of the last dict loss, shape () each, in their original scale.
        self.terms: dict[str, torch.Tensor] | None = None
        self._of_window: dict[str, torch.Tensor] = {}
        # Of losses that came as (sum, count): the last count, in training and in evaluation.
        self._count: torch.Tensor | None = None
        self._evaluated: torch.Tensor | None = None
        #: And the sum of those of the window.
        self.counts: torch.Tensor | None = None
        self.takes_count = accepts(compute_loss, "num_items_in_batch")
        self.returns_mean = returns_mean if self.takes_count else True
        #: Whether each micro-batch is given its own count, because only a part of its loss is divided by it.
        self.own_count = own_count
        #: What `compute_loss` multiplies its loss with for the processes, as transformers' does; None: to be measured.
        self.times: int | None = 1
        #: Whether it is given the count of an evaluation batch too.
        self.counts_evaluation = True
        #: Whether what was measured may change, because a term of the loss was 0.
        self.may_change = False
        #: Whether the kind of loss is to be measured, because it is unknown or may have changed.
        self.is_open = self.returns_mean is None

    def begin_step(self, step: int) -> None:
        """What was measured, and `may_change`, is measured again at steps 2, 4, 8, ..."""
        self.is_open = (self.times is None and self.returns_mean is not True) or step.bit_count() == 1

    def settle(self, kind: str | None, for_good: bool) -> bool:
        """Take in what was measured, ``"sum"``, ``"mean"`` or ``"mixed"``; True where that is new and mixed."""
        if kind is None:
            return False
        self.returns_mean, self.own_count = kind != "sum", kind == "mixed"
        self.is_open = self.times is None and kind != "mean"
        self.may_change = not (for_good or self.own_count)
        return self.own_count

    def frozen(self) -> contextlib.AbstractContextManager[None]:
        """Within this context nothing is measured, because processes out of step cannot agree."""
        return replaced(self, "is_open", False)

    def __call__(
        self,
        compute_loss: Callable[..., Any],
        model: nn.Module,
        inputs: Any,
        num_items: torch.Tensor | None,
        items: torch.Tensor | int | None = None,
    ) -> tuple[torch.Tensor, bool]:
        """(loss, whether it is a mean over this micro-batch alone); `num_items` are the window's, `items` its own."""
        given = num_items
        if self.own_count and num_items is not None and items is not None:
            given = scalar(items, num_items.device).clamp(min=1)
        loss = compute_loss(model, inputs, **({"num_items_in_batch": given} if self.takes_count else {}))
        if isinstance(loss, torch.Tensor):
            loss = one_number(loss)
        elif (pair := as_pair(loss)) is not None:
            total, self._count = pair
            self.terms = {}
            return (mean_of(*pair) if num_items is None else total / num_items.clamp(min=1)), False
        else:
            loss, terms = split_terms(loss)
            self.terms = terms or None
        if given is not None and self.times is not None and self.times != 1:
            loss = loss / self.times
        return loss, num_items is None or self.returns_mean is not False

    def keep_terms(self, weight: torch.Tensor | None, scale: float) -> None:
        """Add the terms of the last loss to those of the accumulation window.

        Args:
            weight: that of the micro-batch, shape (), where the loss was a mean.
            scale: what its loss was multiplied with.
        """
        terms, self.terms = self.terms, None
        if self._count is not None:
            count, self._count = self._count * bool(scale), None
            self.counts = count if self.counts is None else self.counts + count
        for name, value in (terms or {}).items():
            value = (value if weight is None else value * weight) * scale
            self._of_window[name] = self._of_window[name] + value if name in self._of_window else value

    def take_terms(self) -> dict[str, torch.Tensor]:
        """The terms of the accumulation window by name, shape () each, in the scale of its loss; then forget them."""
        terms, self._of_window, self.counts = self._of_window, {}, None
        return terms

    def in_evaluation(
        self, compute_loss: Callable[..., Any], num_items: torch.Tensor | int, log: Callable[[str, Any, Any], None]
    ) -> Callable[..., Any]:
        """`compute_loss` for one evaluation batch: with its count of items, if it takes it, and a tensor instead of a
        dict or a pair. `take_weight` says how many items that is a mean over. `log` is called with (name, mean over the
        batch, items) for each term of a dict.
        """
        call = compute_loss
        if self.counts_evaluation and accepts(compute_loss, "num_items_in_batch"):
            call = functools.partial(compute_loss, num_items_in_batch=torch.as_tensor(num_items))

        def compute(model: nn.Module, inputs: Any, **options: Any) -> Any:
            result = call(model, inputs, **options)
            loss, outputs = result if options.get("return_outputs") else (result, None)
            if (pair := as_pair(loss)) is not None:
                self._evaluated = pair[1]
            if (isinstance(loss, Mapping) and "loss" in loss) or pair is not None:
                loss, terms = split_terms(loss)
                for name, value in terms.items():
                    log(name, value if num_items else 0.0, num_items)
            return (loss, outputs) if options.get("return_outputs") else loss

        return compute

    def take_weight(self, items: torch.Tensor | int) -> torch.Tensor | int:
        """The weight of the last evaluation batch: its own count, where its loss came as (sum, count), else `items`."""
        count, self._evaluated = self._evaluated, None
        return items if count is None else count


def weighted(
    loss: torch.Tensor, items: torch.Tensor | int, num_items: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the share of a mean `loss` over `items` in the mean over `num_items`, its weight), shape () each.

    A micro-batch without items has no mean: its loss, usually NaN, is left out, with its gradient. If the whole window
    has none, the share is NaN.
    """
    items = scalar(items, loss.device)
    weight = items / num_items
    return torch.where(items == 0, weight.to(loss), loss * weight), weight


def scalar(value: torch.Tensor | float, device: torch.device | str) -> torch.Tensor:
    """`value` as a tensor of shape () on `device`, written there: a copy of ordinary host memory waits for the
    device.
    """
    if isinstance(value, torch.Tensor) and not value.is_cpu:
        return value.to(device)
    if isinstance(value, torch.Tensor):
        is_there = torch.device(device).type == "cpu"  # accelerate names it cpu:0
        return value if is_there else torch.full((), value.item(), dtype=value.dtype, device=device)
    return torch.full((), value, dtype=torch.long if isinstance(value, int) else None, device=device)


def as_pair(loss: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(sum, count), shape () each, where `loss` is such a pair; the count is detached."""
    if not isinstance(loss, tuple) or len(loss) != 2 or not isinstance(loss[0], torch.Tensor):
        return None
    count = torch.as_tensor(loss[1]).detach() if isinstance(loss[1], (torch.Tensor, int, float)) else None
    if count is None or count.numel() != 1 or loss[0].numel() != 1:
        return None
    return loss[0].reshape(()), scalar(summable(count).reshape(()), loss[0].device)


def summable(value: Value) -> Value:
    """A tensor `value` in a type that holds sums of many such: one of bfloat16 stops growing at 256, one of booleans
    at 1. Anything else as it is.
    """
    if not isinstance(value, torch.Tensor) or value.dtype in WIDE:
        return value
    return cast(Value, value.float() if value.is_floating_point() else value.long())


def mean_of(total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """``total / count``, shape (); 0 where nothing was counted."""
    return total / torch.where(count > 0, count, torch.inf)


def one_number(loss: torch.Tensor, by: str = "compute_loss") -> torch.Tensor:
    """`loss` of shape (), which the function named `by` returned. A loss for each row or token is refused: its mean
    would count what is padding or masked. Raises a `ValueError` where `loss` holds more than one number.
    """
    if loss.numel() != 1:
        raise ValueError(
            f"{by} returned a loss of shape {tuple(loss.shape)}; it must be one number. Return its mean over "
            "what is trained on (loss.mean() where nothing is padding or masked), or the pair (sum, count), with which "
            "accumulation and processes weigh each item the same."
        )
    return loss.reshape(())


def name_taken(what: str, name: str) -> ValueError:
    """The error about `what`, whose `name` is in `IN_EVERY_RECORD`: it would not be logged, or averaged with that."""
    return ValueError(f"{what} {name!r}, a name that every record of the log holds already. Use another name.")


def of_step(loss: Any, device: torch.device) -> torch.Tensor:
    """What a `training_step` returned, as a tensor that can be added up. Raises a TypeError where it is no number."""
    if not isinstance(loss, (torch.Tensor, int, float)):
        raise TypeError(
            f"training_step returned {type(loss).__name__}; it must return the detached loss of the micro-batch, a "
            "tensor of shape ()."
        )
    return summable(scalar(loss, device))


def split_terms(loss: Any, by: str = "compute_loss") -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(the loss, its terms by name) of what the function named `by` returned: a tensor, a dict that has it under
    ``"loss"``, or (sum, count), whose quotient it is.

    The terms are detached, shape () each. Raises a `TypeError` where it is neither, and a `ValueError` where the loss
    is more than one number, or a term has the name of what every record holds.
    """
    if isinstance(loss, torch.Tensor):
        return one_number(loss, by), {}
    if (pair := as_pair(loss)) is not None:
        return mean_of(*pair), {}
    if not isinstance(loss, Mapping) or not isinstance(loss.get("loss"), torch.Tensor):
        what = f"a dict of {', '.join(map(str, loss))}" if isinstance(loss, Mapping) else type(loss).__name__
        raise TypeError(
            f"{by} returned {what}; it must return a tensor of shape (), a pair (sum, count), or a dict with "
            "that tensor under 'loss' and terms of it to be logged under other names"
            f"{'; when called with return_outputs=True, (either of them, outputs)' if by == 'compute_loss' else ''}."
        )
    terms = {}
    for name, value in loss.items():
        value = torch.as_tensor(value).detach() if isinstance(value, (torch.Tensor, int, float)) else value
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shown = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise TypeError(
                f"{by} returned a dict whose {name!r} is {shown}; each term must be one number, a tensor of "
                "shape (). To return outputs, return (loss, outputs)."
            )
        terms[str(name)] = summable(value).reshape(())
    del terms["loss"]
    for name in terms:
        if name in IN_EVERY_RECORD:
            raise name_taken(f"{by} returned a term", name)
    return loss["loss"].reshape(()), terms


def count_items(inputs: Mapping[str, Any], shifted: bool) -> torch.Tensor | int:
    """Items over which the loss of one micro-batch is averaged: labels that are not -100, or rows without labels.
    Numbers are labels whatever their value: only integers have an ignore index.

    Args:
        inputs: the micro-batch.
        shifted: the model predicts token t+1 at position t, so the first label of each row is not predicted.
    """
    if "shift_labels" in inputs:
        return inputs["shift_labels"].ne(-100).sum()
    labels = inputs["labels"] if "labels" in inputs else None
    if not isinstance(labels, torch.Tensor) or labels.ndim == 0:
        return count_rows(inputs)
    labels = labels[..., 1:] if shifted and labels.ndim > 1 else labels
    return labels.numel() if labels.is_floating_point() else labels.ne(-100).sum()


def count_tokens(
    inputs: Mapping[str, Any], main_input: str, pad_token_id: int | None = None
) -> tuple[torch.Tensor | int, int]:
    """(tokens that are not padding, all tokens) of a micro-batch; (0, 0) if its main input is no tensor.

    Padding follows from the attention mask, or in packed rows from ``seq_lengths``, the tokens of each document, or
    else from `pad_token_id`, or else there is none.
    """
    slots = count_slots(inputs, main_input)
    if not slots:
        return 0, 0
    ids = inputs[main_input]
    mask = inputs["attention_mask"] if "attention_mask" in inputs else None
    if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
        return mask.sum(), slots
    if "seq_lengths" in inputs:
        return inputs["seq_lengths"].sum(), slots
    return slots if pad_token_id is None else ids.ne(pad_token_id).sum(), slots


def count_slots(inputs: Mapping[str, Any], main_input: str) -> int:
    """All tokens of a micro-batch, padding too; 0 where its main input is no tensor."""
    ids = inputs[main_input] if main_input in inputs else None
    return ids.numel() if isinstance(ids, torch.Tensor) else 0


def flops_parameters(model: nn.Module) -> int:
    """Parameters that a token is multiplied with: those outside the embeddings; 0 if unknown."""
    count = getattr(model, "num_parameters", None)
    return count(exclude_embeddings=True) if callable(count) else 0


def count_rows(inputs: Any) -> int:
    """Rows of a micro-batch: the length of its first tensor; without tensors of its first list, of texts perhaps."""
    if isinstance(inputs, list) and inputs and isinstance(first := inputs[0], (Mapping, str)):
        if isinstance(first, str) or not _tensors_in(first):
            return len(inputs)
    return _length_of_first(inputs, torch.Tensor) or _length_of_first(inputs, list) or 1


def _length_of_first(inputs: Any, kind: Any) -> int:
    """The length of the first value of `kind` in `inputs`, or else in the containers therein; 0 where there is none."""
    values: Any = inputs if isinstance(inputs, (list, tuple)) else [inputs]
    values = inputs.values() if isinstance(inputs, Mapping) else values
    for value in values:
        if isinstance(value, kind) and (kind is not torch.Tensor or value.ndim):
            return len(value)
    return next((n for value in values if isinstance(value, CONTAINERS) and (n := _length_of_first(value, kind))), 0)


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model's own loss compares the logits at position t with the label at t+1."""
    if is_encoder_decoder(model):
        return False
    loss_type = getattr(model, "loss_type", None)  # a PEFT model forwards it to its base
    if loss_type is not None:
        return loss_type in ("ForCausalLM", "ForConditionalGeneration")
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def accepts_loss_kwargs(model: nn.Module) -> bool:
    """Whether the model's forward takes ``num_items_in_batch``, by its own word or by its signature."""
    inner: Any = model
    while hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    declared = getattr(inner, "accepts_loss_kwargs", None)
    return accepts(inner.forward, "num_items_in_batch") if declared is None else bool(declared)


def label_names(model: nn.Module) -> list[str]:
    """Parameters of the model's forward that are labels."""
    names = inspect.signature(model.forward).parameters
    if "QuestionAnswering" in type(model).__name__:
        return [name for name in names if "label" in name or name in ("start_positions", "end_positions")]
    return [name for name in names if "label" in name]


def can_return_loss(model: nn.Module) -> bool:
    """Whether the model computes a loss without labels, by default (such as CLIP)."""
    parameter = inspect.signature(model.forward).parameters.get("return_loss")
    return parameter is not None and parameter.default is True


@dataclass(frozen=True)
class LabelSmoother:
    """The label-smoothed loss of a model's outputs, for scripts that call it in their own `compute_loss`."""

    epsilon: float = 0.1

    def __call__(
        self, outputs: Any, labels: torch.Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        return cross_entropy(logits, labels, num_items_in_batch, shift=shift_labels, label_smoothing=self.epsilon)


def label_smoother(model: nn.Module, factor: float) -> LabelSmoother | None:
    """What smooths the labels of `model`; None where nothing does."""
    if factor and setting(config_of(model), "problem_type") == "multi_label_classification":
        warn(
            f"label_smoothing_factor={factor} is left out: Label smoothing is not compatible with multi-label "
            "classification, whose classes are no alternatives.",
        )
        return None
    return LabelSmoother(factor) if factor else None


def _tensors_in(inputs: Mapping[str, Any]) -> bool:
    for value in inputs.values():  # a generator for `any` would cost more than the look itself
        if isinstance(value, torch.Tensor):
            return True
    return False


def model_loss(
    model: nn.Module,
    inputs: Mapping[str, Any],
    num_items: torch.Tensor | None = None,
    *,
    pass_count: bool,
    loss_func: Callable[..., torch.Tensor] | None = None,
    label_smoothing: float = 0.0,
    shifted: bool = False,
) -> tuple[torch.Tensor, Any]:
    """(loss, outputs) of a model that computes its own loss, or whose loss is `loss_func` or label-smoothed.

    Args:
        pass_count: hand ``num_items_in_batch`` to the model's forward.
        loss_func: ``(outputs, labels, num_items_in_batch) -> loss``; the labels are then kept from the model.
        label_smoothing: share of the target spread over the vocabulary; above 0, the labels are kept from the model.
        shifted: see `count_items`; used with label smoothing.
    """
    if (type(inputs) is not dict and not isinstance(inputs, Mapping)) or not _tensors_in(inputs):
        raise TypeError(
            f"The data_collator gave a {type(inputs).__name__} without tensors; it must give a dict of tensors for "
            "the model's forward."
        )
    labels = None
    if (loss_func is not None or label_smoothing) and "labels" in inputs:
        labels = inputs["labels"]
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
    if pass_count and num_items is not None:
        inputs = {**inputs, "num_items_in_batch": num_items}
    try:
        outputs = model(**inputs)
    except (IndexError, RuntimeError, ValueError):
        explain_failure(inputs, base_model(model), id_limits(model))
        raise
    if loss_func is not None:
        loss = loss_func(outputs, labels, num_items_in_batch=num_items)
        split_terms(loss, "compute_loss_func")
        return loss, outputs
    if labels is not None:
        return LabelSmoother(label_smoothing)(outputs, labels, shifted, num_items), outputs
    if isinstance(outputs, dict) and "loss" not in outputs:
        raise ValueError(
            f"The model returned no loss, only {', '.join(outputs)}, from the inputs {', '.join(inputs)}. Give it "
            "labels (a column of texts, or one that is null in a batch's first row, is left out), pass "
            "compute_loss_func, or override compute_loss."
        )
    if isinstance(outputs, torch.Tensor) and outputs.ndim == 0:
        return outputs, {"loss": outputs}
    if not hasattr(outputs, "__getitem__"):
        raise TypeError(
            f"The model returned {type(outputs).__name__}; it must return a loss, a tuple that begins with the loss, "
            "or a dict or transformers' ModelOutput with 'loss'."
        )
    return (outputs["loss"] if isinstance(outputs, dict) else outputs[0]), outputs
