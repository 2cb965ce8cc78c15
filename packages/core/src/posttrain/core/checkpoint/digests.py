"""Computes checksums of checkpoint files in blocks on all cores."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

BLOCK = 32 * 2**20
"""Bytes that one checksum is of."""

KINDS: dict[str, Callable[..., Any]] = {"sha256": hashlib.sha256, "xxh128": xxhash.xxh3_128}
"""The hash functions. SHA-256 is cryptographic. XXH128 (https://xxhash.com) is ten times as fast and misses random
damage with a probability of 2**-128.
"""

SHOWN = {"sha256": "SHA-256", "xxh128": "XXH128"}

_READ = 2**20  # bytes that stay in the cache of the processor between reading and hashing

Digest = dict[str, str]
"""``{kind: hexadecimal}`` of one block."""


def digest(block: memoryview) -> Digest:
    """The checksums of `block`, one of each kind."""
    return {kind: made(block).hexdigest() for kind, made in KINDS.items()}


def digests_of_files(
    directory: Path, sizes: dict[str, int], block: int, kinds: Iterable[str] = tuple(KINDS)
) -> dict[str, list[Digest]]:
    """``{name: checksums of each block}`` of the files `sizes`, ``{name below directory: bytes}``, on all cores.

    Raises:
        OSError: a file cannot be read; it names the file.
    """
    blocks = [(name, start) for name, size in sizes.items() for start in range(0, max(size, 1), block)]
    digests: dict[str, list[Digest]] = {name: [] for name in sizes}
    # At least four: without the page cache, concurrent reads of several blocks are eight times as fast.
    with ThreadPoolExecutor(max_workers=min(max(cores(), 4), 16), thread_name_prefix="checksum") as pool:
        hashed = pool.map(lambda item: _digest_of_block(directory / item[0], item[1], block, kinds), blocks)
        for (name, _), found in zip(blocks, hashed, strict=True):
            digests[name].append(found)
    return digests


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _digest_of_block(path: Path, start: int, block: int, kinds: Iterable[str]) -> Digest:
    states, buffer, left = {kind: KINDS[kind]() for kind in kinds}, memoryview(bytearray(_READ)), block
    try:
        with open(path, "rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), start, block, os.POSIX_FADV_WILLNEED)
            file.seek(start)
            while left and (count := file.readinto(buffer[:left])):
                for state in states.values():
                    state.update(buffer[:count])
                left -= count
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # a failed read does not know its file
    return {kind: state.hexdigest() for kind, state in states.items()}
