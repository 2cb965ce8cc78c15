"""The non-finite guard: keeps NaN and infinite gradients from the weights and finds their source.

`FiniteGuard` decides for each step. `first_nonfinite` repeats a batch and names the first module with a non-finite
output; `watched` checks every module at every step, for debugging.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from posttrain.core.config import opt
from posttrain.core.data import accelerator
from posttrain.core.errors import NonFiniteError
from posttrain.core.optim.lr_scheduler import plain

logger = logging.getLogger(__name__)

# On an accelerator a step is checked this many steps later, when the device has finished it, so nothing waits.
LAG = 4


@dataclass
class HealthArguments:
    """What happens when numbers are no longer finite."""

    on_nonfinite: str = opt(
        "stop",
        "If a loss or gradient is NaN or infinite: stop the run, skip that optimizer step, or warn and apply it.",
        choices=("stop", "skip", "warn"),
        old_flags=("logging_nan_inf_filter", "no_logging_nan_inf_filter"),
    )
    max_nonfinite_steps: int = opt(
        5, "The run stops after this many such steps in a row, for any `on_nonfinite`.", min=1
    )
    debug: str | list[str] = opt(
        "", "underflow_overflow: check the output of every module at every step, and name the first that overflows."
    )

    def _normalize(self) -> None:
        given: Any = self.debug or ""
        self.debug = [plain(one) for one in (given.split() if isinstance(given, str) else given)]

    def _problems(self) -> Iterator[str]:
        for name in self.debug:
            if name == "tpu_metrics_debug":
                yield "debug='tpu_metrics_debug': TPUs are not supported; leave it out"
            elif name != "underflow_overflow":
                yield f"debug holds {name!r}; it may hold 'underflow_overflow'"


@dataclass(slots=True)
class Update:
    """An optimizer step that is not yet known to be finite."""

    step: int  # optimizer steps before it
    epoch: int
    first_batch: int  # the number of earlier micro-batches of the epoch
    window: list[Any]  # its micro-batches
    losses: list[torch.Tensor]  # their shares of the loss, shape () each
    loss: torch.Tensor  # shape ()
    grad_norm: torch.Tensor  # shape ()
    num_items: torch.Tensor | None = None  # in the window, shape (), if counted
    origins: list[int] | None = None  # the index of the loader's batch that each is a part of; None: its own

    @property
    def lacks_labels(self) -> bool:
        return self.num_items is not None and not int(self.num_items)

    def origin(self, number: int) -> int:
        return number if self.origins is None else self.origins[number]

    def bad_batches(self) -> list[int]:
        """The micro-batches whose loss is not finite; all of the window if only the gradient is not finite."""
        bad = [number for number, loss in enumerate(self.losses) if not math.isfinite(float(loss))]
        return bad or list(range(len(self.losses)))


@dataclass
class Counts:
    """What a checkpoint holds of the steps that were not finite: how many came one after another, since the last
    record, and in all; and whether a step had labels.
    """

    in_a_row: int = 0
    since_log: int = 0
    count: int = 0
    seen_labels: bool = False


class FiniteGuard:
    """Keeps non-finite optimizer steps from the weights, without waiting for the device if possible.

    On the CPU, and for optimizers that cannot skip a step by themselves, the numbers are checked before each step. A
    fused optimizer on another device gets a flag that its kernel reads: it then leaves weights and moments unchanged,
    and the flag is read `lag` steps later.

    The `policy` is ``"stop"``, ``"skip"`` or ``"warn"`` (`HealthArguments`); after `limit` such steps in a row the run
    stops in any case. ``report(update, stops, steps since, is first)`` gives the message about a step, on all processes
    together; `total` is the sum of a number or a tensor over all processes.
    """

    def __init__(
        self,
        policy: str = "stop",
        limit: int = 5,
        report: Callable[[Update, bool, int, bool], str] | None = None,
        total: Callable[[Any], Any] | None = None,
        lag: int = LAG,
    ) -> None:
        self.policy, self.limit, self.lag = policy, limit, lag
        self._report = report or (lambda update, stops, late, is_first: describe(update, policy, late))
        self._total = total
        self._pending: deque[tuple[OnItsWay, Update]] = deque()
        self._flagged: Any = None  # the optimizer that a scaler's attributes were set on
        self.counts = Counts()
        self._without_labels = ""  # the message about the last step without a label

    def may_step(
        self, optimizer: torch.optim.Optimizer, update: Update, loss_scale: Callable[[], float] | None = None
    ) -> bool:
        """Whether `optimizer` may apply `update` now. An active loss scaler, whose scale `loss_scale` returns, skips
        steps with overflowing gradients and lowers the scale, which is no error while the scale can be lowered. Raises
        a `NonFiniteError` where this step or an earlier one is not finite, and the run must stop.
        """
        reads_flag = not update.grad_norm.is_cpu and getattr(optimizer, "_step_supports_amp_scaling", False)
        if reads_flag and loss_scale is None:
            self.flag(optimizer, update)
            return True
        with accelerator.waiting():
            bad, overflows = (not math.isfinite(number.item()) for number in (update.loss, update.grad_norm))
            bad = bad or (overflows and (loss_scale is None or loss_scale() <= 1))
        if self._total is not None:
            bad = bool(self._total(int(bad)))
        return self._judge(bad, update, 0)

    def flag(self, optimizer: torch.optim.Optimizer, update: Update) -> None:
        """Let a fused `optimizer` skip its next step if `update` is not finite, without waiting. Raises a
        `NonFiniteError` where the step `lag` steps ago was not finite, and the run must stop.
        """
        bad = (~(torch.isfinite(update.loss) & torch.isfinite(update.grad_norm))).float()
        if self._total is not None:
            bad = self._total(bad).clamp_(max=1)
        if self.policy != "warn":
            self._flagged = optimizer
            self._flagged.found_inf, self._flagged.grad_scale = bad, None
        self._pending.append((OnItsWay.of(bad), update))
        if len(self._pending) > self.lag:
            self._judge_oldest()

    def settle(self) -> None:
        """Check every pending flag: before a log record, an evaluation or a checkpoint. Raises a `NonFiniteError` where
        one was not finite, and the run must stop.
        """
        try:
            while self._pending:
                self._judge_oldest()
        finally:
            self._pending.clear()
            if self._flagged is not None:  # or a step made by hand would be skipped too
                self._flagged.found_inf = self._flagged = None

    def _judge_oldest(self) -> None:
        flag, update = self._pending.popleft()
        self._judge(bool(flag.read()), update, len(self._pending))

    def _judge(self, bad: bool, update: Update, late: int) -> bool:
        counts = self.counts
        if not bad:
            counts.in_a_row, counts.seen_labels = 0, True
            return True
        lacks_labels = update.lacks_labels
        if self._total is not None:  # on any process
            lacks_labels = not self._total(int(not lacks_labels))
        counts.in_a_row += 1
        if not lacks_labels:
            counts.since_log, counts.count, counts.seen_labels = counts.since_log + 1, counts.count + 1, True
        is_due = self.policy == "stop" and not lacks_labels  # labels may be drawn at random: many in a row are wrong
        stops = is_due or counts.in_a_row >= self.limit
        text = self._report(update, stops, late, counts.count == 1 and not lacks_labels)
        if stops:
            if not is_due:
                text += f" The run stops: max_nonfinite_steps={self.limit} of them came in a row."
            raise NonFiniteError(text)
        logger.log(logging.INFO if lacks_labels and self._without_labels else logging.WARNING, "%s", text)
        if lacks_labels:
            self._without_labels = text
        return self.policy == "warn" and not lacks_labels

    def finish(self) -> None:
        """Check pending flags at the end of a run. Raises a `NonFiniteError` where a step was not finite and the run
        must stop, or where no step had a label.
        """
        self.settle()
        if self._without_labels and not self.counts.seen_labels:
            raise NonFiniteError(
                f"{self._without_labels} This was true for every optimizer step of the run: nothing was learned."
            )

    def logged(self) -> dict[str, int]:
        """``{"nonfinite_steps": how many}`` since the last call, where there were any."""
        count, self.counts.since_log = self.counts.since_log, 0
        return {"nonfinite_steps": count} if count else {}


class OnItsWay(NamedTuple):
    """A number on its way from the device to the host."""

    value: torch.Tensor
    event: Any = None

    @classmethod
    def of(cls, value: torch.Tensor) -> OnItsWay:
        if value.is_cpu:
            return cls(value)
        host = torch.empty((), dtype=value.dtype, pin_memory=True)
        host.copy_(value, non_blocking=True)
        event = torch.Event(device=value.device)
        event.record()
        return cls(host, event)

    def read(self) -> float:
        if self.event is not None:
            with accelerator.waiting():
                self.event.synchronize()
        return float(self.value)


# --------------------------------------------------------------------------------------------------- what is said of it


def describe(update: Update, policy: str = "stop", late: int = 0) -> str:
    """The message about `update`, `late` optimizer steps after it, and whether it was applied, without the place."""
    if policy == "warn" and not update.lacks_labels:
        fate = "The step was applied nevertheless, as on_nonfinite='warn' sets."
    elif late:
        fate = "The step was not applied; later ones were."
    else:
        fate = f"The step was not applied: the weights are those of step {update.step}."
    if update.lacks_labels:
        return (
            f"Step {update.step + 1}: all labels of its rows are -100, so there is no loss. {fate} If labels are "
            "drawn at random, use larger batches; else remove such rows from the dataset, or check how their labels "
            "are masked."
        )
    loss, norm = float(update.loss), float(update.grad_norm)
    return f"Step {update.step + 1}: the loss is {loss:.4g} and the gradient norm {norm:.4g}. {fate}"


# ------------------------------------------------------------------------------------------------------ float16 weights


def has_float16(model: nn.Module) -> bool:
    """Whether weights that are trained are in float16."""
    return any(parameter.requires_grad and parameter.dtype == torch.float16 for parameter in model.parameters())


def check_float16(model: nn.Module, precision: str, has_engine: bool) -> None:
    """Warn about weights in float16, unless an engine keeps float32 copies of them and scales the loss by itself
    (DeepSpeed). Raises a `ValueError` where products have the `precision` "fp16" too, whose loss scaler needs gradients
    in float32.
    """
    if has_engine or not has_float16(model):
        return
    what = f"The weights of this {type(model).__name__} that are trained are in float16"
    remedy = "Load the model in float32 (dtype=torch.float32), with fp16=True for products in float16, or in bfloat16."
    if precision == "fp16":
        raise ValueError(
            f"{what}, and fp16=True scales the loss, for which gradients must be in float32. {remedy} An adapter on a "
            "float16 model is fine, if it is in float32 itself."
        )
    logger.warning(
        f"{what}, which holds no number above 65,504 and rounds small ones to 0, AdamW's epsilon among them: losses "
        "overflow, and Adam divides by 0. Non-finite steps are skipped, as a loss scaler would; after "
        f"max_nonfinite_steps in a row the run stops. {remedy}"
    )


# ----------------------------------------------------------------------------------------------------- where it started


def _tensors(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and not value.is_meta:
            yield value
    elif depth and isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item, depth - 1)


def _fault(tensors: Iterator[torch.Tensor]) -> str | None:
    """``"NaN"``, ``"inf"`` or ``"-inf"``, the first found; the last only if there is nothing else: masks hold it."""
    lowest = None
    for tensor in tensors:
        values = tensor.detach()
        if bool(torch.isfinite(values).all()):
            continue
        if bool(values.isnan().any()):
            return "NaN"
        if bool(values.isposinf().any()):
            return "inf"
        lowest = "-inf"
    return lowest


@dataclass
class _Trace:
    """What the hooks of `first_nonfinite` have seen; the first of each kind stays."""

    forward: str | None = None
    lowest: str | None = None
    backward: str | None = None

    def saw_output(self, name: str, module: nn.Module, *given_and_output: Any) -> None:
        *given, output = given_and_output
        where = f"{name} ({type(module).__name__})" if name else type(module).__name__
        fault = _fault(_tensors(output))
        if fault == "-inf":
            self.lowest = self.lowest or f"the output of {where} is the first to hold -inf"
        elif fault is not None and self.forward is None:
            before = _fault(_tensors(given))
            if before in ("NaN", "inf"):
                self.forward = f"what reaches {where} holds {before} already, from outside of any module"
            else:
                self.forward = f"the output of {where} is the first with {fault}"
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: self.saw_gradient(grad, f"the gradient at the output of {where}"))

    def saw_gradient(self, gradient: torch.Tensor, what: str) -> None:
        if self.backward is None and (fault := _fault(iter([gradient]))) is not None:
            self.backward = f"{what} is the first in the backward pass with {fault}"


def first_nonfinite(model: nn.Module, batches: list[Any], run: Callable[[Any], Any]) -> str | None:
    """The first non-finite value when `run` is called with each of `batches`; None if all are finite.

    Checks parameters and batches first, then the output of each module in the order of the forward pass, then the
    result of `run` (the loss), then the gradients in the order of the backward pass, if there is one. Each check waits
    for the device.
    """
    for name, parameter in model.named_parameters():
        if (fault := _fault(_tensors(parameter))) in ("NaN", "inf"):
            return f"the parameter {name} holds {fault} already"
    for batch in batches:
        for name, value in batch.items() if isinstance(batch, Mapping) else [("", batch)]:
            if (fault := _fault(_tensors(value))) in ("NaN", "inf"):
                return f"the batch itself holds {fault}{f', in {name}' if name else ''}"
    trace = _Trace()
    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            saw = functools.partial(trace.saw_output, name)
            hooks.enter_context(module.register_forward_hook(saw, with_kwargs=True))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                what = f"the gradient of {name}"
                hooks.enter_context(parameter.register_hook(lambda g, what=what: trace.saw_gradient(g, what)))
        loss = _fault(_tensors([run(batch) for batch in batches]))
    itself = (
        loss and f"the loss itself is {loss}, but every module's output is finite: check how it is computed from them"
    )
    return trace.forward or (trace.lowest if loss else None) or itself or trace.backward or trace.lowest


@contextlib.contextmanager
def watched(model: nn.Module, frames: int = 21) -> Iterator[None]:
    """Check the output of every module on each forward pass in this context; slow, to find overflows. Raises a
    `NonFiniteError` at the first one that holds NaN or an infinity. It lists so many modules before with the smallest
    and largest magnitudes of their weights and outputs (`frames`): the smallest show where fp16 underflows.
    """
    seen: deque[str] = deque(maxlen=frames)

    def saw(where: str, module: nn.Module, given: Any, output: Any) -> None:
        weights = "".join(f", {n} {_range(p)}" for n, p in module.named_parameters(recurse=False))
        outputs = ", ".join(_range(tensor) for tensor in _tensors(output))
        seen.append(f"  {where} ({type(module).__name__}): output {outputs or 'no tensor'}{weights}")
        if (fault := _fault(_tensors(output))) in ("NaN", "inf"):
            listing = "\n".join(seen)
            raise NonFiniteError(
                f"debug='underflow_overflow': the output of {where} ({type(module).__name__}) holds {fault}. The last "
                f"modules, with the smallest and largest magnitude of their numbers:\n{listing}"
            )

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(functools.partial(saw, name or "the model")))
        yield


def _range(tensor: torch.Tensor) -> str:
    if not tensor.numel():
        return "empty"
    magnitude = tensor.detach().float().abs()
    return f"{float(magnitude.min()):.2e} to {float(magnitude.max()):.2e}"
