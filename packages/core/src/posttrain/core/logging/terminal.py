"""Prints text on a terminal above progress bars, and silences what other libraries print there on ordinary runs."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from posttrain.core.files import means_disk_full

if TYPE_CHECKING:
    from posttrain.core.state import TrainerState

logger = logging.getLogger(__name__)

#: How many numbers of a record a line shows.
SHOWN = 8
#: What the guides say to watch.
_WATCHED = ("rewards/accuracies", "rewards/margins", "frac_reward_zero_std")
_MACHINE = ("perf/", "total_flos", "step_time")
_MACHINE_ENDS = ("_runtime", "_per_second", "_preparation_time", "_alloc_delta", "_peaked_delta")
#: {logger: beginning of a message}.
MESSAGES = {"bitsandbytes": "Failed to load CPU gemm_4bit_forward"}  # an optional kernel, named when peft is imported
#: Beginnings of warnings, as regular expressions.
WARNINGS = (
    "`is_gradient_checkpointing` is deprecated",
    "`past_key_values` is deprecated",  # transformers, asked by peft
    r"Detected call of `lr_scheduler.step\(\)` before",  # the first step had nothing to learn, as a warning says
)


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


def draws_bars() -> bool:
    """Whether progress bars are of use: on a terminal and in a notebook, not in a file."""
    return "ipykernel" in sys.modules or is_terminal(sys.stderr)


def is_terminal(stream: Any) -> bool:
    """Whether `stream` is shown on a terminal. It may be None, closed, or of a class that only writes."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def open_streams() -> None:
    """Open those of the standard streams that this process was started without. The next file that is opened would get
    their number, and what a library writes in C to stdout or stderr would go into it: a checkpoint, or the log.
    """
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            if vars(sys)[name] is None:
                setattr(sys, name, open(number, mode, closefd=False))


def quiet() -> None:
    """Leave the messages of `MESSAGES` and `WARNINGS` out from now on: other libraries print them on ordinary runs, and
    a user can change nothing of them. Imports none of those libraries.
    """
    for text in WARNINGS:
        warnings.filterwarnings("ignore", message=text)
    for name in MESSAGES:
        # A filter of a logger does not see what its children log, and libraries log in modules.
        for logger in (name, f"{name}.backends.cpu.ops"):
            logging.getLogger(logger).addFilter(_is_news)  # once, however often this is called


def _is_news(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(tuple(MESSAGES.values()))


class _Output(io.FileIO):
    """The standard output; nothing any more once its disk is full: what a command does is worth more than its lines."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not means_disk_full(error):
                raise
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            logger.warning(
                f"The standard output cannot be written: {error.strerror}. Nothing more is printed there, and the "
                "command goes on. Free some space."
            )
            return len(data)


def outlive_full_disk() -> None:
    """Let a full disk under the standard output, where that is a file, not end this process."""
    own = sys.__stdout__
    if own is not None and sys.stdout is own and not is_terminal(own):
        own.flush()
        raw = io.BufferedWriter(_Output(own.fileno(), "w", closefd=False))
        sys.stdout = io.TextIOWrapper(raw, own.encoding, own.errors, line_buffering=own.line_buffering)


class Repeats:
    """Counts warnings; those that differ in their numbers alone are one."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def count(self, record: logging.LogRecord) -> int:
        """How many times the message of `record` has come, this time included."""
        self.counts[self._text(record.getMessage())] += 1
        return self.times(record.getMessage())

    def times(self, message: str) -> int:
        return self.counts[self._text(message)]

    def _text(self, message: str) -> str:
        return re.sub(r"\d[\d.,]*(e[+-]?\d+)?", "0", message)


class Handler(logging.StreamHandler):
    """Writes log messages to stderr, above the bars. A warning that repeats is written once, and counted when it has
    come 10, 100, 1000, ... times.
    """

    def __init__(self) -> None:
        super().__init__()
        self.repeats = Repeats()

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING and (times := self.repeats.count(record)) > 1:
            if not re.fullmatch("10+", str(times)):
                return
            text = f"{record.getMessage()} (the {times:,}th time)"
            record = logging.makeLogRecord(record.__dict__ | {"msg": text, "args": None})
        with bars_aside():
            super().emit(record)


def line(record: dict[str, Any], max_length: int = 100) -> str:
    """The main values of a log record in one line; ``log.jsonl`` and ``log_history`` have all.

    Speed metrics are left out. If there are more than `SHOWN` numbers, or more than fit on a line, losses and the epoch
    have priority, then names without a group and what the guides say to watch, then rewards.
    """
    names = [name for name in record if not name.startswith(_MACHINE) and not name.endswith(_MACHINE_ENDS)]
    names = names or list(record)
    texts = {name: f"{v:.4g}" if isinstance(v := record[name], float) else str(v) for name in names}
    texts = {name: f"{name} {v if len(v) <= max_length else v[:max_length] + '...'}" for name, v in texts.items()}
    chosen: list[str] = []
    columns = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else 10_000  # unlimited for a file
    room = columns - len("(99 more in log.jsonl)")
    for name in sorted(names, key=_distance)[:SHOWN]:
        room -= len(texts[name]) + 2
        if room < 0 and chosen:
            break
        chosen.append(name)
    parts = [texts[name] for name in names if name in chosen]
    return "  ".join(parts + [f"({len(names) - len(parts)} more in log.jsonl)"] * (len(names) > len(parts)))


def with_speed(logs: dict[str, Any], state: TrainerState) -> str:
    """The line of a log record behind the step that it is of, with the speed at its end."""
    total = "" if state.known_steps is None else f"/{state.known_steps}"
    step = f"step {state.global_step}{total}  " if state.max_steps else ""  # outside of training there is none
    progress = f"  ({summary(logs).partition(', ')[2]})" if "perf/tokens_per_second" in logs else ""
    return step + line(logs) + progress


def summary(logs: dict[str, Any]) -> str:
    """Loss, tokens a second and time left of a log record that has a loss."""
    parts = [f"loss {logs['loss']:.4g}"]
    if "perf/tokens_per_second" in logs:
        parts.append(f"{logs['perf/tokens_per_second']:,.0f} tok/s")
    if "perf/real_token_share" in logs:
        parts.append(f"{logs['perf/real_token_share']:.0%} real")
    if "perf/time_left_seconds" in logs:
        minutes, seconds = divmod(int(logs["perf/time_left_seconds"]), 60)
        parts.append(f"{minutes}:{seconds:02d} left")
    return ", ".join(parts)


def _distance(name: str) -> int:
    """How far a number is from what the run is for."""
    if name.endswith(("loss", "epoch")):
        return 0
    if name.endswith(_WATCHED):
        return 1
    if any(part in name for part in ("entropy", "std", "num_")):
        return 3
    return 1 if "/" not in name else 2 if "rewards/" in name else 4


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A line for each of the `rows`, of which there is at least one, with their cells below one another."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
