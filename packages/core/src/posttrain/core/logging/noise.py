"""Silences messages that other libraries print on ordinary runs, and of which a user can change nothing."""

from __future__ import annotations

import logging
import warnings

#: {logger: beginning of a message}.
MESSAGES = {"bitsandbytes": "Failed to load CPU gemm_4bit_forward"}  # an optional kernel, named when peft is imported
#: Beginnings of warnings, as regular expressions.
WARNINGS = (
    "`is_gradient_checkpointing` is deprecated",
    "`past_key_values` is deprecated",  # transformers, asked by peft
    r"Detected call of `lr_scheduler.step\(\)` before",  # the first step had nothing to learn, as a warning says
)


def _is_news(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(tuple(MESSAGES.values()))


def quiet() -> None:
    """Leave the messages of `MESSAGES` and `WARNINGS` out from now on. Imports none of their libraries."""
    for text in WARNINGS:
        warnings.filterwarnings("ignore", message=text)
    for name in MESSAGES:
        # A filter of a logger does not see what its children log, and libraries log in modules.
        for logger in (name, f"{name}.backends.cpu.ops"):
            logging.getLogger(logger).addFilter(_is_news)
