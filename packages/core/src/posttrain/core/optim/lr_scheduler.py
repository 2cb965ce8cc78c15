"""The registry of learning-rate schedules.

Each curve is a function of the number s of completed optimizer steps and is multiplied with the peak learning rate. W
is the number of warm-up steps and N the length of the run. By default the warm-up is s / W. In
`posttrain.core.optim.schedule` all three may count input tokens instead.
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

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from posttrain.core.config import Resolved, opt
from posttrain.core.errors import ConfigError, did_you_mean
from posttrain.core.fields import durations

#: Schedules that are stepped by the metric of an evaluation.
FOLLOW_A_METRIC = ("reduce_lr_on_plateau", "greedy")
#: Schedules for which the length of the run need not be known.
ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt", *FOLLOW_A_METRIC)

Curve = Callable[[int], float]
WSD_SHAPES: dict[str, Callable[[float], float]] = {  # how far a phase has gone, 0 to 1 -> height, 0 to 1
    "linear": lambda progress: progress,
    "cosine": lambda progress: 0.5 * (1.0 - math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1.0 - math.sqrt(1.0 - progress),
}


# --------------------------------------------------------------------------------------------------------------- curves


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
    return cosine_with_min_lr(num_warmup_steps, num_training_steps, lr=1.0, num_cycles=num_cycles, min_lr_rate=0.0)


def cosine_with_restarts(num_warmup_steps: int, num_training_steps: int, num_cycles: int = 1) -> Curve:
    r"""SGDR, Loshchilov & Hutter 2017, https://arxiv.org/abs/1608.03983, with periods of equal length.

    .. math:: \tfrac12 (1 + \cos(\pi (c\, p \bmod 1))), \quad p = (s - W) / (N - W)

    Args:
        num_cycles: c, descents from the peak to 0; each but the first begins with a jump.
    """
    decay_steps = max(1, num_training_steps - num_warmup_steps)

    def decay(step: int) -> float:
        progress = (step - num_warmup_steps) / decay_steps
        return 0.0 if progress >= 1 else 0.5 * (1.0 + math.cos(math.pi * (num_cycles * progress % 1.0)))

    return _after_warmup(num_warmup_steps, decay)


def polynomial(
    num_warmup_steps: int, num_training_steps: int, *, lr: float, lr_end: float = 1e-7, power: float = 1.0
) -> Curve:
    r"""From the peak down to `lr_end` along a polynomial, where it stays.

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


def inverse_sqrt(num_warmup_steps: int, num_training_steps: int, timescale: int | None = None) -> Curve:
    r"""Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, Sec. 5.3, with the timescale of big_vision.

    .. math:: \sqrt{t / (s - W + t)}

    Args:
        timescale: t, steps after the warm-up in which the square of the rate halves; None: W, or 10,000 without one.
    """
    scale = timescale or num_warmup_steps or 10_000
    return _after_warmup(num_warmup_steps, lambda step: 1.0 / math.sqrt((step - num_warmup_steps + scale) / scale))


def cosine_with_min_lr(
    num_warmup_steps: int,
    num_training_steps: int,
    *,
    lr: float,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> Curve:
    r"""The cosine, squeezed so that it ends at a floor m instead of 0.

    .. math:: \tfrac12 (1 + \cos(2 \pi c\, p)) (1 - m) + m, \quad p = (s - W) / (N - W)

    Args:
        lr: the peak learning rate; filled in by `build`.
        num_cycles: c, waves over the run.
        min_lr, min_lr_rate: the floor, as a learning rate or as a share m of the peak. One of them is needed.
    """
    floor = _floor(lr, min_lr, min_lr_rate)
    decay_steps = max(1, num_training_steps - num_warmup_steps)

    def decay(step: int) -> float:
        return _cosine_above(floor, num_cycles * (step - num_warmup_steps) / decay_steps)

    return _after_warmup(num_warmup_steps, decay)


def cosine_warmup_with_min_lr(
    num_warmup_steps: int,
    num_training_steps: int,
    *,
    lr: float,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> Curve:
    """`cosine_with_min_lr` shifted by one step: the first step has a rate above 0, and the last one the minimum.

    Args:
        lr: the peak learning rate; filled in by `build`.
        num_cycles: waves over the run.
        min_lr, min_lr_rate: the floor, as a learning rate or as a share of the peak. One of them is needed.
        warmup_lr_rate: share of the peak that the warm-up starts from; it then ends at the peak. None: 1 / W.
    """
    floor = _floor(lr, min_lr, min_lr_rate)
    decay_steps = max(1, num_training_steps - num_warmup_steps)

    def curve(step: int) -> float:
        if step >= num_warmup_steps:
            return _cosine_above(floor, num_cycles * (step - num_warmup_steps + 1) / decay_steps)
        if warmup_lr_rate is None:
            return (step + 1) / max(1, num_warmup_steps)
        return warmup_lr_rate + (1.0 - warmup_lr_rate) * step / max(1, num_warmup_steps - 1)

    return curve


def warmup_stable_decay(
    num_warmup_steps: int,
    num_training_steps: int,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> Curve:
    """Up, level, down: WSD, Hu et al. 2024, https://arxiv.org/abs/2404.06395, Sec. 4.2; 1-sqrt: Hägele et al. 2024,
    https://arxiv.org/abs/2405.18392.

    Args:
        num_decay_steps: steps of the last phase.
        num_stable_steps: steps at the peak; None: the rest of the run.
        warmup_type, decay_type: ``"linear"``, ``"cosine"`` or ``"1-sqrt"``.
        min_lr_ratio: share of the peak that the warm-up starts from and the decay ends at, where it stays.
        num_cycles: waves of a cosine decay; a half descends once.
    """
    for name, shape in (("warmup_type", warmup_type), ("decay_type", decay_type)):
        if shape not in WSD_SHAPES:
            raise ValueError(f"{name}={shape!r} is not one of {', '.join(WSD_SHAPES)}{did_you_mean(shape, WSD_SHAPES)}")
    if num_stable_steps is None:
        num_stable_steps = num_training_steps - num_warmup_steps - num_decay_steps
    decay_starts = num_warmup_steps + num_stable_steps

    def curve(step: int) -> float:
        if step < num_warmup_steps:
            height = WSD_SHAPES[warmup_type](step / max(1, num_warmup_steps))
        elif step < decay_starts:
            return 1.0
        elif step < decay_starts + num_decay_steps:
            progress = (step - decay_starts) / max(1, num_decay_steps)
            if decay_type == "cosine":
                height = _cosine_above(0.0, num_cycles * progress)
            else:
                height = WSD_SHAPES[decay_type](1.0 - progress)
        else:
            return min_lr_ratio
        return max(0.0, height * (1.0 - min_lr_ratio) + min_lr_ratio)

    return curve


def _after_warmup(num_warmup_steps: int, decay: Curve) -> Curve:
    return lambda step: step / max(1, num_warmup_steps) if step < num_warmup_steps else decay(step)


def _cosine_above(floor: float, waves: float) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(2.0 * math.pi * waves)) * (1.0 - floor) + floor)


def _floor(lr: float, min_lr: float | None, min_lr_rate: float | None) -> float:
    """The floor as a share of the peak."""
    if min_lr is not None and min_lr_rate is None:
        return min_lr / lr
    if min_lr_rate is not None and min_lr is None:
        return min_lr_rate
    given = "neither is" if min_lr is None else "both are"
    raise ValueError(f"give either min_lr, a learning rate, or min_lr_rate, a share of the peak; {given} given")


# ------------------------------------------------------------------------------------------------------------- by name


def greedy() -> Any:
    """A class that lowers the rate while a metric does not improve, else raises it: https://arxiv.org/abs/2512.14527."""
    from transformers.optimization import GreedyLR  # takes seconds to import: the curves above are not from there

    return GreedyLR


#: Curves, and classes of schedulers, by name; `greedy` gives its class when it is asked for.
SCHEDULES: dict[str, Callable[..., Any]] = {
    "linear": linear,
    "cosine": cosine,
    "cosine_with_restarts": cosine_with_restarts,
    "polynomial": polynomial,
    "constant": constant,
    "constant_with_warmup": constant_with_warmup,
    "inverse_sqrt": inverse_sqrt,
    "reduce_lr_on_plateau": ReduceLROnPlateau,
    "cosine_with_min_lr": cosine_with_min_lr,
    "cosine_warmup_with_min_lr": cosine_warmup_with_min_lr,
    "warmup_stable_decay": warmup_stable_decay,
    "greedy": greedy,
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
            self.lr_scheduler_kwargs = {key: _number(value) for key, value in self.lr_scheduler_kwargs.items()}
        self.warmup_steps = _number(self.warmup_steps)
        with contextlib.suppress(ValueError):  # which `_problems` reports
            if isinstance(self.warmup_steps, str) and (given := durations.parse(self.warmup_steps)).unit == "steps":
                self.warmup_steps = int(given.value)

    def _problems(self) -> Iterator[str]:
        name, options = plain(self.lr_scheduler_type), self.lr_scheduler_kwargs or {}
        if not isinstance(options, dict):
            yield f"""lr_scheduler_kwargs={options!r} is not a JSON object; write it like '{{"min_lr_rate": 0.1}}'"""
        elif name in SCHEDULES:
            yield from problems(name, in_tokens(options), lr=getattr(self, "learning_rate", 1.0))
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
        ScheduleArguments.__dataclass_fields__["lr_scheduler_type"].metadata["help"].bounds["choices"] = tuple(
            SCHEDULES
        )
        return schedule

    return add


def warmup_steps(args: Any, num_training_steps: int) -> int:
    """Warm-up steps in a run of `num_training_steps`: ``args.warmup_steps``, or that share of them, rounded up.

    Raises:
        ValueError: it counts tokens.
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


def problems(name: str, options: dict[str, Any], lr: float) -> Iterator[str]:
    """Problems with the options of a schedule, as sentences.

    Args:
        lr: the peak learning rate.
    """
    schedule = _schedule(name)
    known = _options(schedule)
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
            curve = schedule(10, 1000, **_peak(schedule, lr), **options)
            [curve(step) for step in (0, 10, 1000)]
        except (TypeError, ValueError, ArithmeticError) as error:
            yield f"lr_scheduler_kwargs of {name!r}: {error}"


class TokenLR(LambdaLR):
    """A curve over the tokens that a run has read; its ``last_epoch`` is their number, and saved as such."""


def step(scheduler: Any, tokens: int) -> None:
    """Move `scheduler` on after an optimizer step, with which `tokens` input tokens were read since the beginning."""
    if isinstance(scheduler, TokenLR):
        scheduler.last_epoch = tokens - 1
        scheduler.step()
    elif not follows_a_metric(scheduler):
        scheduler.step()


def follows_a_metric(scheduler: Any) -> bool:
    """Whether `scheduler` is stepped with the metric of an evaluation, which its ``step`` then needs."""
    return _needs_metrics(scheduler.__class__)  # cached, because each step asks for it


@cache
def _needs_metrics(kind: Any) -> bool:
    metrics = inspect.signature(kind.step).parameters.get("metrics")
    return issubclass(kind, ReduceLROnPlateau) or (metrics is not None and metrics.default is metrics.empty)


def build(
    name: str,
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    *,
    scheduler_class: type[LambdaLR] = LambdaLR,
    **options: Any,
) -> LRScheduler:
    """The scheduler called `name`. Step it after each optimizer step, or with the metric after each evaluation.

    Args:
        name: a key of `SCHEDULES`.
        num_warmup_steps, num_training_steps: steps of the warm-up and of the whole run, which includes it.
        scheduler_class: steps a curve.
        options: of the schedule, by name.

    Raises:
        ConfigError: no such schedule, or options that it does not take.
    """
    name = plain(name)
    if name not in SCHEDULES:
        known = f"{', '.join(SCHEDULES)}{did_you_mean(name, SCHEDULES)}"
        raise ConfigError("schedules", [f"lr_scheduler_type={name!r} is not one of {known}"])
    schedule, lr = _schedule(name), optimizer.defaults["lr"]
    if wrong := list(problems(name, options, lr)):
        raise ConfigError("schedules", wrong)
    if isinstance(schedule, type):
        return schedule(optimizer, **options)
    return scheduler_class(optimizer, schedule(num_warmup_steps, num_training_steps, **_peak(schedule, lr), **options))


def _schedule(name: str) -> Any:
    return greedy() if SCHEDULES[name] is greedy else SCHEDULES[name]


def _options(schedule: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a schedule that a user sets."""
    given = ("self", "optimizer", "num_warmup_steps", "num_training_steps", "lr")
    return {name: option for name, option in inspect.signature(schedule).parameters.items() if name not in given}


def _peak(schedule: Callable[..., Curve], lr: float) -> dict[str, float]:
    return {"lr": lr} if "lr" in inspect.signature(schedule).parameters else {}


def plain(name: str) -> str:
    """`name` as a plain string, of an enum of strings too, which hashes by its own name."""
    return str(name.value if isinstance(name, enum.Enum) else name)


def _number(value: Any) -> Any:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
