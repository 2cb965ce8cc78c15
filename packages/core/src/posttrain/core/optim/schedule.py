"""The learning-rate schedule of a run, as its arguments ask for it: over optimizer steps, or over input tokens.

Where ``max_duration`` or ``warmup_steps`` counts tokens, the curves of `posttrain.core.optim.lr_scheduler` are
functions of the input tokens before a step, over all processes. The number of steps need not be known, as of a stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from posttrain.core.fields import durations
from posttrain.core.optim import lr_scheduler


def counts_tokens(args: Any) -> bool:
    """Whether the schedule follows tokens."""
    return math.isfinite(args.max_tokens) or isinstance(args.warmup_steps, str)


def problems(args: Any) -> Iterator[str]:
    """Why the lengths of the schedule cannot be compared, as sentences."""
    name, warmup = lr_scheduler.plain(args.lr_scheduler_type), args.warmup_steps
    if math.isfinite(args.max_tokens) and not isinstance(warmup, str) and warmup >= 1:
        yield (
            f"warmup_steps={warmup:g} counts optimizer steps, but max_duration={args.max_duration!r} lets the schedule "
            "follow tokens: write such as warmup_steps='1Mtok', or a share of the run below 1"
        )
    if isinstance(warmup, str) and not math.isfinite(args.max_tokens) and name not in lr_scheduler.ENDLESS:
        yield (
            f"warmup_steps={warmup!r} counts tokens, and lr_scheduler_type={name!r} needs the length of the run in "
            "tokens too: set max_duration, such as '100Mtok', or lr_scheduler_type='constant_with_warmup'"
        )
    options = args.lr_scheduler_kwargs if isinstance(args.lr_scheduler_kwargs, dict) else {}
    counting = [key for key, number in lr_scheduler.in_tokens(options).items() if options[key] is not number]
    if counting and not counts_tokens(args):
        yield f"lr_scheduler_kwargs: {counting[0]} counts tokens, and the schedule follows steps; set max_duration too"


def make(args: Any, optimizer: Optimizer, num_training_steps: int) -> LRScheduler:
    """The schedule of a run of `num_training_steps` optimizer steps, or of ``args.max_tokens`` input tokens."""
    name, options = args.lr_scheduler_type, dict(args.lr_scheduler_kwargs or {})
    if name in lr_scheduler.FOLLOW_A_METRIC and args.greater_is_better:
        options.setdefault("mode", "max")
    if not counts_tokens(args):
        warmup = lr_scheduler.warmup_steps(args, num_training_steps)
        return lr_scheduler.build(name, optimizer, warmup, num_training_steps, **options)
    length = int(args.max_tokens) if math.isfinite(args.max_tokens) else 0  # 0: of a curve that needs none
    options = lr_scheduler.in_tokens(options)
    given = args.warmup_steps
    warmup = int(durations.parse(given).value) if isinstance(given, str) else math.ceil(length * given)
    return lr_scheduler.build(name, optimizer, warmup, length, scheduler_class=lr_scheduler.TokenLR, **options)
