"""Lengths with a unit: ``500st`` (optimizer steps), ``2ep`` (epochs), ``10Mtok`` (input tokens), ``90min``."""

from __future__ import annotations

import re
from typing import NamedTuple

SECONDS = {"s": 1, "sec": 1, "min": 60, "h": 3600, "d": 86400}
UNITS = {"st": "steps", "ba": "steps", "ep": "epochs", "tok": "tokens"} | dict.fromkeys(SECONDS, "seconds")
THOUSANDS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "G": 10**9}
_TEXT = re.compile(rf"\s*(\d+(?:\.\d+)?)\s*([kMBG]?)({'|'.join(UNITS)})\s*")


class Duration(NamedTuple):
    """A number of `unit`: steps, epochs, tokens or seconds."""

    value: float
    unit: str


def parse(text: str) -> Duration:
    """``"10Mtok"`` -> 10,000,000 tokens; ``"90min"`` -> 5,400 seconds. Only tokens take k, M, B or G.

    Raises:
        ValueError: the text has no unit, another one, or is not more than nothing.
    """
    match = _TEXT.fullmatch(text)
    number, thousands, unit = match.groups() if match else ("0", "", "")
    if float(number) == 0 or (thousands and unit != "tok") or (UNITS[unit] == "steps" and not number.isdigit()):
        raise ValueError(f"{text!r} must be a number above 0 with a unit, such as 500st, 2ep, 10Mtok, 90min or 2h")
    return Duration(float(number) * THOUSANDS[thousands] * SECONDS.get(unit, 1), UNITS[unit])
