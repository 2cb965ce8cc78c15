"""Lengths with a unit: ``500st`` (optimizer steps), ``2ep`` (epochs), ``10Mtok`` (input tokens), ``90min``.

A run may end after one (``max_duration``), and save, evaluate and log once for each (``save_steps``, ``eval_steps``,
``logging_steps``). The learning rate follows tokens where ``max_duration`` or ``warmup_steps`` counts them.
"""

from __future__ import annotations

import math
import re
import time
from typing import Any, NamedTuple

SECONDS = {"s": 1, "sec": 1, "min": 60, "h": 3600, "d": 86400}
UNITS = {"st": "steps", "ba": "steps", "ep": "epochs", "tok": "tokens"} | dict.fromkeys(SECONDS, "seconds")
THOUSANDS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "G": 10**9}
#: The suffix of each unit but steps.
SUFFIXES = {"epochs": "ep", "tokens": "tok", "seconds": "s"}
#: Optimizer steps that no run has: what ``save_steps=0`` means, whose only checkpoint is that of the last step.
NEVER = 2**31
_TEXT = re.compile(rf"\s*(\d+(?:\.\d+)?)\s*([kMBG]?)({'|'.join(UNITS)})\s*")


class Duration(NamedTuple):
    """A number of `unit`: steps, epochs, tokens or seconds."""

    value: float
    unit: str


def parse(text: str) -> Duration:
    """``"10Mtok"`` -> 10,000,000 tokens; ``"90min"`` -> 5,400 seconds. Only tokens take k, M, B or G. Raises a
    `ValueError` where the text has no unit, another one, or its number is 0.
    """
    match = _TEXT.fullmatch(text)
    number, thousands, unit = match.groups() if match else ("0", "", "")
    if float(number) == 0 or (thousands and unit != "tok") or (UNITS[unit] == "steps" and not number.isdigit()):
        raise ValueError(f"{text!r} must be a number above 0 with a unit, such as 500st, 2ep, 10Mtok, 90min or 2h")
    return Duration(float(number) * THOUSANDS[thousands] * SECONDS.get(unit, 1), UNITS[unit])


def measured(interval: float | str) -> tuple[float, str]:
    """(size, unit) of an interval such as that of ``save_steps``."""
    if isinstance(interval, str):
        return parse(interval)
    return interval, "a share of all steps" if interval < 1 else "a number of steps"


def if_tokens(text: str | None) -> str | None:
    """`text` if it counts tokens, else None."""
    return text if text is not None and parse(text).unit == "tokens" else None


class Passing:
    """Notices when another interval of epochs, tokens or time has passed.

    Counts from the beginning of the run, so that a resumed run continues with the same multiples; time counts from the
    beginning of each `train`.
    """

    def __init__(self, state: Any) -> None:
        """Start to count at `state`, of a run that begins or resumes."""
        self._began = time.monotonic()
        self._before = self._now(state)

    def step(self, state: Any, *intervals: Any) -> list[bool]:
        """For each of `intervals`, whether a multiple of it was reached or passed since the last call. Numbers, which
        are counted in steps, are not.
        """
        before, self._before = self._before, self._now(state)
        return [isinstance(each, str) and _passed(parse(each), before, self._before) for each in intervals]

    def _now(self, state: Any) -> dict[str, float]:
        since = time.monotonic() - self._began
        return {"epochs": state.epoch or 0.0, "tokens": state.num_input_tokens_seen, "seconds": since}


def _passed(every: Duration, before: dict[str, float], now: dict[str, float]) -> bool:
    # An epoch is a sum of fractions: 0.3 / 0.1 is 2.9999999999999996.
    first, last = (math.floor(at[every.unit] / every.value + 1e-9) for at in (before, now))
    return last > first


def as_steps(interval: float | str, max_steps: int) -> int:
    """An interval in optimizer steps: below 1 it is a share of the whole run, rounded up; `NEVER` for a text such as
    ``1ep``, for which `Passing` looks.
    """
    if isinstance(interval, str):
        return NEVER
    return max(math.ceil(interval * max_steps), 1) if interval < 1 else int(interval)
