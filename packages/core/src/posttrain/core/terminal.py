"""Text on a terminal where progress bars stand: the bars are taken away for it and drawn again below."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

#: How many numbers of a record a line shows.
SHOWN = 8
_MACHINE = ("perf/", "total_flos")
_MACHINE_ENDS = ("_runtime", "_per_second", "_preparation_time", "_alloc_delta", "_peaked_delta")


@contextlib.contextmanager
def bars_aside() -> Iterator[None]:
    """Within, the terminal is free of tqdm's bars."""
    if "tqdm" not in sys.modules:  # then there is no bar
        yield
        return
    from tqdm import tqdm

    with tqdm.external_write_mode():
        yield


def write(text: str) -> None:
    """Print `text` above the bars."""
    with bars_aside():
        print(text, flush=True)


class Handler(logging.StreamHandler):
    """Writes log messages to stderr, above the bars."""

    def emit(self, record: logging.LogRecord) -> None:
        with bars_aside():
            super().emit(record)


def line(record: dict[str, Any], max_length: int = 100) -> str:
    """What a reader wants of a log record in one line; ``log.jsonl`` and ``log_history`` hold all of it.

    How fast the machine was is left out. Of more than `SHOWN` numbers the nearest to the result stay: losses first, then
    names without a group, then rewards.
    """
    names = [name for name in record if not name.startswith(_MACHINE) and not name.endswith(_MACHINE_ENDS)]
    names = names or list(record)
    chosen = set(sorted(names, key=_distance)[:SHOWN])
    texts = {name: f"{v:.4g}" if isinstance(v := record[name], float) else str(v) for name in names if name in chosen}
    parts = [f"{name} {text if len(text) <= max_length else text[:max_length] + '...'}" for name, text in texts.items()]
    if len(names) > len(parts):
        parts.append(f"({len(names) - len(parts)} more in log.jsonl)")
    return "  ".join(parts)


def _distance(name: str) -> int:
    """How far a number is from what the run is for."""
    tests = name.endswith("loss"), "/" not in name, "rewards/" in name
    return next((place for place, holds in enumerate(tests) if holds), len(tests))
