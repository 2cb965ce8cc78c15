"""Silences messages that other libraries print on ordinary runs, and of which a user can change nothing."""

from __future__ import annotations

import logging
import warnings

#: {logger: beginning of a message}.
MESSAGES = {"bitsandbytes": "Failed to load CPU gemm_4bit_forward"}  # an optional kernel, named when peft is imported
#: Beginnings of warnings, as regular expressions.
WARNINGS = (
    "`is_gradient_checkpointing` is deprecated",
    "`past_key_values` is deprecated",
)  # transformers, asked by peft


class _Silence(logging.Filter):
    def __init__(self, beginning: str) -> None:
        super().__init__()
        self.beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self.beginning)


def quiet() -> None:
    """Leave the messages of `MESSAGES` and `WARNINGS` out from now on. Imports none of their libraries."""
    for text in WARNINGS:
        warnings.filterwarnings("ignore", message=text)
    for name, beginning in MESSAGES.items():
        # A filter of a logger does not see what its children log, and libraries log in modules.
        for logger in (logging.getLogger(name), logging.getLogger(f"{name}.backends.cpu.ops")):
            if not any(isinstance(known, _Silence) for known in logger.filters):
                logger.addFilter(_Silence(beginning))
