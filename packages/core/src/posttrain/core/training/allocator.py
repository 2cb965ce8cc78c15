"""Keeps freed CPU memory for the next step."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass

from posttrain.core.config import opt

logger = logging.getLogger(__name__)

# Parameters of mallopt(3), from malloc.h of glibc.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4
_KEEP = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: 64 * 2**20}
# glibc's own settings in a program that frees tensors: the defaults, with the dynamic thresholds at their limits,
# because they are fixed once anything is set. The previous settings cannot be read.
_GIVE_BACK = {M_MMAP_MAX: 65536, M_MMAP_THRESHOLD: 32 * 2**20, M_TRIM_THRESHOLD: 64 * 2**20, M_TOP_PAD: 128 * 2**10}
_keeping = 0


@dataclass
class AllocatorArguments:
    """What becomes of memory that a step on the CPU has freed."""

    keep_freed_memory: bool = opt(
        True,
        "On the CPU with glibc, keep freed memory for the next step instead of giving it back to the system: up to "
        "1.5 times as fast. It holds until train() ends.",
    )


@contextlib.contextmanager
def freed_memory_kept(on: bool = True) -> Iterator[None]:
    """Within this context the process keeps freed memory and returns it to the system at the end.

    By default glibc maps each large tensor again and unmaps it when it is freed, so every step pays a page fault for
    each 4 KiB. Nothing is changed for other C libraries, or if the environment tunes glibc.
    """
    global _keeping
    if not on or not _can_be_set():
        yield
        return
    _keeping += 1
    if _keeping == 1:
        _set(_KEEP)
        logger.debug("Freed memory is kept for the next step (mallopt) until training ends.")
    try:
        yield
    finally:
        _keeping -= 1
        if _keeping == 0:
            _set(_GIVE_BACK)
            ctypes.CDLL(None).malloc_trim(0)


def _can_be_set() -> bool:
    tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    return platform.libc_ver()[0] == "glibc" and not tuned and not any(n.startswith("MALLOC_") for n in os.environ)


def _set(settings: dict[int, int]) -> None:
    mallopt = ctypes.CDLL(None).mallopt
    for name, value in settings.items():
        mallopt(name, value)
