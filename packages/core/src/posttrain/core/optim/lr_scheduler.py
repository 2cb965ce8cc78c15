"""Learning-rate schedules by name, and the schedule of a run, as its arguments ask for it.

Each curve is a function of the number s of completed optimizer steps and is multiplied with the peak learning rate. W
is the number of warm-up steps, over which the curve is s / W, and N the length of the run. Where ``max_duration`` or
``warmup_steps`` counts tokens, all three are input tokens over all processes, s those before a step. The number of
steps need not be known then, as of a stream.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from posttrain.core.config import Resolved, number, opt
from posttrain.core.errors import ConfigError, did_you_mean, warn
from posttrain.core.fields import durations
from posttrain.core.registry import load

#: Schedules that are stepped by the metric of an evaluation.
FOLLOW_A_METRIC = ("reduce_lr_on_plateau", "greedy")
#: Schedules for which the length of the run need not be known.
ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt", *FOLLOW_A_METRIC)

Curve = Callable[[int], float]


def constant(num_warmup_steps: int, num_training_steps: int) -> Curve:
    """Constantly 1, without warm-up."""
    return lambda step: 1.0


def constant_with_warmup(num_warmup_steps: int, num_training_steps: int) -> Curve:
    """1 after the warm-up."""
    return _after_warmup(num_warmup_steps, lambda step: 1.0)


def linear(num_warmup_steps: int, num_training_steps: int) -> Curve:
    """(N - s) / (N - W) after the warm-up, and 0 after N."""
    decay_steps = max(1, num_training_steps - num_warmup_steps)
    return _after_warmup(num_warmup_steps, lambda step: max(0.0, (num_training_steps - step) / decay_steps))


def cosine(num_warmup_steps: int, num_training_steps: int, num_cycles: float = 0.5) -> Curve:
    r"""SGDR without restarts, Loshchilov & Hutter 2017, https://arxiv.org/abs/1608.03983, Eq. 5.

    .. math:: \tfrac12 (1 + \cos(2 \pi c\, p)), \quad p = (s - W) / (N - W)

    Args:
        num_cycles: c, waves over the run; a half descends from the peak to 0 once.
    """
    decay_steps = max(1, num_training_steps - num_warmup_steps)

    def decay(step: int) -> float:
        return 0.5 * (1.0 + math.cos(2.0 * math.pi * (num_cycles * (step - num_warmup_steps) / decay_steps)))

    return _after_warmup(num_warmup_steps, decay)


def polynomial(
    num_warmup_steps: int, num_training_steps: int, *, lr: float, lr_end: float = 1e-7, power: float = 1.0
) -> Curve:
    r"""From the peak down to `lr_end` along a polynomial, where it stays; that of transformers fails where W = N.

    .. math:: (1 - e)(1 - p)^k + e, \quad p = (s - W) / (N - W), \quad e = \text{lr\_end} / \text{lr}

    Args:
        lr: the peak learning rate; filled in by `build`.
        lr_end: the learning rate after N steps.
        power: k; 1 descends linearly, 2 faster at first.
    """
    if not lr > lr_end:
        raise ValueError(f"lr_end={lr_end} must be below the learning rate, {lr}; the curve descends")
    decay_steps, end = max(1, num_training_steps - num_warmup_steps), lr_end / lr

    def decay(step: int) -> float:
        if step > num_training_steps:
            return end
        return (1.0 - end) * (1.0 - (step - num_warmup_steps) / decay_steps) ** power + end

    return _after_warmup(num_warmup_steps, decay)


def _after_warmup(num_warmup_steps: int, decay: Curve) -> Curve:
    return lambda step: step / max(1, num_warmup_steps) if step < num_warmup_steps else decay(step)


#: By name: curves like those above, classes of schedulers, or what transformers.optimization calls either. Its import
#: takes seconds, so the usual ones are not from there.
SCHEDULES: dict[str, Any] = {
    "linear": linear,
    "cosine": cosine,
    "cosine_with_restarts": "get_cosine_with_hard_restarts_schedule_with_warmup",
    "polynomial": polynomial,
    "constant": constant,
    "constant_with_warmup": constant_with_warmup,
    "inverse_sqrt": "get_inverse_sqrt_schedule",
    "reduce_lr_on_plateau": ReduceLROnPlateau,
    "cosine_with_min_lr": "get_cosine_with_min_lr_schedule_with_warmup",
    "cosine_warmup_with_min_lr": "get_cosine_with_min_lr_schedule_with_warmup_lr_rate",
    "warmup_stable_decay": "get_wsd_schedule",  # Hu et al. 2024, https://arxiv.org/abs/2404.06395, Sec. 4.2
    "greedy": "GreedyLR",  # https://arxiv.org/abs/2512.14527
}


@dataclass
class ScheduleArguments:
    """How the learning rate changes over a run."""

    lr_scheduler_type: str = opt(
        "linear", "Curve that the learning rate follows over the run, after the warm-up.", choices=SCHEDULES
    )
    lr_scheduler_kwargs: Resolved[dict | str | None, dict[str, Any] | None] = opt(
        None,
        "Options of that curve, as a dict or a JSON object, such as a `min_lr_rate` or `num_decay_steps`, which may be "
        "a text such as 10Mtok (input tokens) where the schedule follows tokens.",
    )
    warmup_steps: float | str = opt(
        0,
        "Optimizer steps over which the learning rate rises to its peak; below 1, a share of the run; or such as "
        "10Mtok (input tokens), where max_duration counts tokens or the curve needs no end.",
        min=0,
        old_flags=("warmup_ratio",),
    )

    def _normalize(self) -> None:
        if isinstance(self.lr_scheduler_kwargs, dict):
            # YAML 1.1 reads 1e-6, without a point, as a string.
            self.lr_scheduler_kwargs = {key: number(value, (float,)) for key, value in self.lr_scheduler_kwargs.items()}
        self.warmup_steps = number(self.warmup_steps, (float,))
        with contextlib.suppress(ValueError):  # which `_problems` reports
            if isinstance(self.warmup_steps, str) and (given := durations.parse(self.warmup_steps)).unit == "steps":
                self.warmup_steps = int(given.value)

    def _problems(self) -> Iterator[str]:
        name, options = plain(self.lr_scheduler_type), self.lr_scheduler_kwargs or {}
        if not isinstance(options, dict):
            yield f"""lr_scheduler_kwargs={options!r} is not a JSON object; write it like '{{"min_lr_rate": 0.1}}'"""
        elif name in SCHEDULES:
            problems = option_problems(name, in_tokens(options), lr=vars(self).get("learning_rate", 1.0))
            if type(self).__module__.startswith("posttrain."):
                yield from problems
            else:  # the trainer of a script's config may make the schedule itself, and read options of its own
                for problem in problems:
                    warn(f"{type(self).__name__}: {problem}.")
        if isinstance(self.warmup_steps, str):
            yield from _problems_of_length("warmup_steps", self.warmup_steps)
        elif self.warmup_steps > 1 and not float(self.warmup_steps).is_integer():
            yield (
                f"warmup_steps={self.warmup_steps} must be whole above 1; below 1 it is a share of all optimizer steps"
            )


def register(name: str) -> Callable[[Any], Any]:
    """Decorator: add a curve like those above, or an `LRScheduler` class, as ``lr_scheduler_type=name``."""

    def add(schedule: Any) -> Any:
        SCHEDULES[name] = schedule
        return schedule

    return add


def warmup_steps(args: Any, num_training_steps: int) -> int:
    """Warm-up steps in a run of `num_training_steps`: ``args.warmup_steps``, or that share of them, rounded up. Raises
    a `ValueError` where it counts tokens.
    """
    given = args.warmup_steps
    if isinstance(given, str):
        raise ValueError(f"warmup_steps={given!r} counts tokens, and a number of steps is needed here. Give one.")
    return int(given) if given >= 1 else math.ceil(num_training_steps * given)


def in_tokens(options: dict[str, Any]) -> dict[str, Any]:
    """`options` with their texts such as ``10Mtok`` as numbers of tokens."""
    found = dict(options)
    for name, value in options.items():
        if isinstance(value, str) and not list(_problems_of_length(name, value)):
            found[name] = int(durations.parse(value).value)
    return found


def _problems_of_length(name: str, text: str) -> Iterator[str]:
    try:
        unit = durations.parse(text).unit
    except ValueError as problem:
        yield f"{name}={problem}"
    else:
        if unit != "tokens":
            yield f"{name}={text!r} counts {unit}; give a number of optimizer steps, or of tokens such as 10Mtok"


def option_problems(name: str, options: dict[str, Any], lr: float) -> Iterator[str]:
    """Problems with the options of a schedule, as sentences. `lr`: the peak learning rate."""
    schedule = _schedule(name)
    taken = inspect.signature(schedule).parameters
    known = {key: option for key, option in taken.items() if key not in ("self", "optimizer", "last_epoch", *GIVEN)}
    open_ended = any(option.kind is option.VAR_KEYWORD for option in known.values())
    unknown = [] if open_ended else [key for key in options if key not in known]
    missing = [key for key, option in known.items() if option.default is option.empty and key not in options]
    for key in unknown:
        takes = f"which takes {', '.join(known)}" if known else "which takes none"
        yield f"lr_scheduler_kwargs: {key!r} is not an option of {name!r}, {takes}{did_you_mean(key, known)}"
    for key in () if open_ended else missing:
        yield f"lr_scheduler_type={name!r} needs {key}; set lr_scheduler_kwargs={{{key!r}: ...}}"
    if not unknown and not missing and not isinstance(schedule, type):
        try:
            curve = _curve(schedule, lr, 10, 1000, options)
            [curve(step) for step in (0, 10, 1000)]
        except (TypeError, ValueError, ArithmeticError) as error:
            yield f"lr_scheduler_kwargs of {name!r}: {error}"


def length_problems(args: Any) -> Iterator[str]:
    """Why the lengths of the schedule cannot be compared, as sentences."""
    name, warmup = plain(args.lr_scheduler_type), args.warmup_steps
    if math.isfinite(args.max_tokens) and not isinstance(warmup, str) and warmup >= 1:
        yield (
            f"warmup_steps={warmup:g} counts optimizer steps, but max_duration={args.max_duration!r} lets the schedule "
            "follow tokens: write such as warmup_steps='1Mtok', or a share of the run below 1"
        )
    if isinstance(warmup, str) and not math.isfinite(args.max_tokens) and name not in ENDLESS:
        yield (
            f"warmup_steps={warmup!r} counts tokens, and lr_scheduler_type={name!r} needs the length of the run in "
            "tokens too: set max_duration, such as '100Mtok', or lr_scheduler_type='constant_with_warmup'"
        )
    options = args.lr_scheduler_kwargs if isinstance(args.lr_scheduler_kwargs, dict) else {}
    counting = [key for key, number in in_tokens(options).items() if options[key] is not number]
    if counting and not counts_tokens(args):
        yield f"lr_scheduler_kwargs: {counting[0]} counts tokens, and the schedule follows steps; set max_duration too"


def counts_tokens(args: Any) -> bool:
    """Whether the schedule follows tokens."""
    return math.isfinite(args.max_tokens) or isinstance(args.warmup_steps, str)


class TokenLR(LambdaLR):
    """A curve over the tokens that a run has read; its ``last_epoch`` is their number, and saved as such."""


def step(scheduler: Any, tokens: int) -> None:
    """Move `scheduler` on after an optimizer step, with which `tokens` input tokens were read since the beginning."""
    if isinstance(scheduler, TokenLR):
        scheduler.last_epoch = tokens - 1
        scheduler.step()
    elif not _needs_metrics(scheduler.__class__):  # cached, because each step asks for it
        scheduler.step()


def follows_a_metric(scheduler: Any) -> bool:
    """Whether `scheduler` is stepped with the metric of an evaluation, which its ``step`` then needs."""
    return _needs_metrics(scheduler.__class__)


@cache
def _needs_metrics(kind: Any) -> bool:
    metrics = inspect.signature(kind.step).parameters.get("metrics")
    return issubclass(kind, ReduceLROnPlateau) or (metrics is not None and metrics.default is metrics.empty)


def make(args: Any, optimizer: Optimizer, num_training_steps: int) -> LRScheduler:
    """The schedule of a run of `num_training_steps` optimizer steps, or of ``args.max_tokens`` input tokens."""
    name, options = args.lr_scheduler_type, dict(args.lr_scheduler_kwargs or {})
    if name in FOLLOW_A_METRIC and args.greater_is_better:
        options.setdefault("mode", "max")
    if not counts_tokens(args):
        return build(name, optimizer, warmup_steps(args, num_training_steps), num_training_steps, **options)
    length = int(args.max_tokens) if math.isfinite(args.max_tokens) else 0  # 0: of a curve that needs none
    given = args.warmup_steps
    warmup = int(durations.parse(given).value) if isinstance(given, str) else math.ceil(length * given)
    return build(name, optimizer, warmup, length, scheduler_class=TokenLR, **in_tokens(options))


def build(
    name: str,
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    *,
    scheduler_class: type[LambdaLR] = LambdaLR,
    **options: Any,
) -> LRScheduler:
    """The scheduler called `name`. Step it after each optimizer step, or with the metric after each evaluation. Raises
    a `ConfigError` where there is no such schedule, or it does not take these options.

    Args:
        name: a key of `SCHEDULES`.
        num_warmup_steps, num_training_steps: steps of the warm-up and of the whole run, which includes it.
        scheduler_class: steps a curve.
        options: of the schedule, by name.
    """
    name = plain(name)
    if name not in SCHEDULES:
        known = f"{', '.join(SCHEDULES)}{did_you_mean(name, SCHEDULES)}"
        raise ConfigError("schedules", [f"lr_scheduler_type={name!r} is not one of {known}"])
    schedule, lr = _schedule(name), optimizer.defaults["lr"]
    if wrong := list(option_problems(name, options, lr)):
        raise ConfigError("schedules", wrong)
    if isinstance(schedule, type):
        return schedule(optimizer, **options)
    return scheduler_class(optimizer, _curve(schedule, lr, num_warmup_steps, num_training_steps, options))


def _schedule(name: str) -> Any:
    schedule = SCHEDULES[name]
    return load(f"transformers.optimization:{schedule}") if isinstance(schedule, str) else schedule


#: What a curve is given beside its options.
GIVEN = ("num_warmup_steps", "num_training_steps", "lr")


def _curve(schedule: Any, lr: float, num_warmup_steps: int, num_training_steps: int, options: dict[str, Any]) -> Any:
    given = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps, "lr": lr}
    if options.get("num_stable_steps") is not None:
        del given["num_training_steps"]  # transformers warns where it is given both
    taken = inspect.signature(schedule).parameters
    arguments = {name: value for name, value in given.items() if name in taken} | options
    if "optimizer" not in taken:
        return schedule(**arguments)
    # A function of transformers reads the peak of an optimizer, and returns its curve within a scheduler.
    return schedule(torch.optim.SGD([torch.zeros(1)], lr=lr), **arguments).lr_lambdas[0]


def plain(name: str) -> str:
    """`name` as a plain string, of an enum of strings too, which hashes by its own name."""
    return str(name.value if isinstance(name, enum.Enum) else name)
