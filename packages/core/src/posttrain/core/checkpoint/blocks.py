"""Fills, hashes and writes the blocks of large files concurrently, with direct I/O where possible.

Writing through the page cache costs the processor an extra copy, and the flush has to be awaited later. With direct I/O
the processor computes checksums only, and the file is on disk with its last block.
"""

from __future__ import annotations

import bisect
import contextlib
import contextvars
import errno
import functools
import hashlib
import itertools
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xxhash

from posttrain.core.files import free_bytes

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

# A file of fewer bytes is written by one call: beginning threads for it takes longer.
SMALL = 2**20
_PAGE = 4096
_IN_FLIGHT = 4  # blocks of memory: being filled, written or hashed
_HASHING = 2  # threads: SHA-256 of one is no faster than a good disk
_COPYING = 4  # maximum threads: more do not increase memory bandwidth


class Source:
    """The bytes of a future file: a header, then dense tensors of any device, which need not be contiguous."""

    def __init__(self, header: bytes, tensors: list[torch.Tensor]) -> None:
        self.tensors = [torch.frombuffer(bytearray(header), dtype=torch.uint8), *tensors]
        self.sizes = [tensor.numel() * tensor.element_size() for tensor in self.tensors]
        self.ends = list(itertools.accumulate(self.sizes))
        self.size = self.ends[-1]
        self.devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        self._flat: tuple[int, torch.Tensor] = (-1, torch.empty(0))

    def copy(self, start: int, place: torch.Tensor) -> None:
        """Copy the bytes from `start` on into all of `place`. Threads may do so at the same time."""
        number, done = bisect.bisect_right(self.ends, start), 0
        while done < len(place):
            begin = start + done - (self.ends[number] - self.sizes[number])
            count = min(self.sizes[number] - begin, len(place) - done)
            if count:
                kept, flat = self._flat  # of one that is not contiguous all is copied, and wanted block by block
                if kept != number:
                    flat = bytes_of(self.tensors[number])
                    self._flat = number, flat
                place[done : done + count].copy_(flat[begin : begin + count], non_blocking=True)
            number, done = number + 1, done + count
        if self.devices:
            self._synchronize()  # copies into pinned memory are asynchronous

    def fill(self, image: torch.Tensor) -> None:
        """Copy everything into `image`, on several threads because one reaches half of the memory bandwidth."""
        self._synchronize()  # other threads copy in streams of their own
        with ThreadPoolExecutor(min(cores(), _COPYING), "checkpoint-copy") as pool:
            for _ in pool.map(self.copy, range(0, self.size, BLOCK), image.split(BLOCK)):
                pass

    def _synchronize(self) -> None:
        for device in self.devices:
            accelerator = torch.accelerator.current_accelerator()
            if accelerator is not None and accelerator.type == device.type:  # CUDA, ROCm, XPU, MPS
                torch.accelerator.synchronize(device)
            else:
                torch.get_device_module(device).synchronize()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of `tensor` in row-major order as flat uint8, on its device. Copies only if it must."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


class Memory:
    """Host memory for the images of files, kept from one checkpoint to the next: fresh pages cost more than the
    copy.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def take(self, name: str, size: int, pinned: bool = False) -> torch.Tensor:
        """`size` bytes, aligned to pages; those that `name` had the last time, if they suffice."""
        size, kept = size + -size % _PAGE, self._kept.get(name)
        if kept is None or len(kept) < size or kept.is_pinned() != pinned:
            if pinned:
                kept = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            else:  # not in huge pages, which are filled no faster and may take seconds to be found
                kept = torch.frombuffer(mmap.mmap(-1, max(size, _PAGE)), dtype=torch.uint8)[:size]
            self._kept[name] = kept
        return kept

    @property
    def bytes(self) -> int:
        """How much is kept."""
        return sum(map(len, self._kept.values()))


class Part:
    """What one process writes below `directory` of one checkpoint: the digests of its large files, and the images still
    to be written, for which `memory` lends the memory. Files are written at once, or an image of each is kept for
    `finish` to write (`later`).
    """

    def __init__(self, directory: Path, memory: Memory, later: bool = False) -> None:
        self.directory, self.memory, self.later = directory, memory, later
        self.digests: dict[str, list[Digest]] = {}  # relative name -> of each block
        self.images: list[tuple[Path, torch.Tensor]] = []

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """In here, `write_file` goes through this part."""
        token = _part.set(self)
        try:
            yield
        finally:
            _part.reset(token)

    def finish(self) -> None:
        """Write the images."""
        while self.images:
            path, image = self.images.pop(0)
            self.digests[path.relative_to(self.directory).as_posix()] = write_blocks(path, image, self.memory)


_part: contextvars.ContextVar[Part | None] = contextvars.ContextVar("part", default=None)


def write_file(path: Path, source: Source) -> None:
    """Write `source` to `path`: through the active `Part`, or else immediately and without checksums."""
    part = _part.get()
    if part is None or not path.is_relative_to(part.directory):
        with open(path, "wb") as file:
            for tensor in source.tensors:
                file.write(bytes_of(tensor).cpu().numpy().data)
        return
    name = path.relative_to(part.directory).as_posix()
    if part.later and source.size >= SMALL:  # in memory it may change before it is written
        image = part.memory.take(name, source.size, pinned=bool(source.devices))[: source.size]
        source.fill(image)
        part.images.append((path, image))
    else:
        part.digests[name] = write_blocks(path, source, part.memory)


def write_blocks(path: Path, source: Source | torch.Tensor, memory: Memory) -> list[Digest]:
    """Write the bytes of `source`, or a page-aligned image of them, so that they survive a loss of power; returns the
    checksums of the blocks. Raises an `OSError` (ENOSPC) before anything is written, if the file system says that it is
    full.
    """
    size = source.size if isinstance(source, Source) else len(source)
    if isinstance(source, Source) and size < SMALL:
        whole = torch.empty(size, dtype=torch.uint8, pin_memory=bool(source.devices))
        source.copy(0, whole)  # which waits once for each device
        with open(path, "wb") as file:
            file.write(whole.numpy().data)
            file.flush()
            os.fsync(file.fileno())
        return [digest(whole.numpy().data)]
    if free_bytes(path.parent) < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    written: list[Future[None]] = []
    digests: list[Future[Digest]] = []

    def block_at(start: int) -> torch.Tensor:
        if not isinstance(source, Source):
            return source[start : start + BLOCK]
        number = start // BLOCK
        if number >= _IN_FLIGHT:  # the block that this memory held must be done with
            written[number - _IN_FLIGHT].result()
            digests[number - _IN_FLIGHT].result()
        block = memory.take(f"block {number % _IN_FLIGHT}", BLOCK, pinned=bool(source.devices))
        block = block[: min(BLOCK, size - start)]
        source.copy(start, block)
        return block

    # One thread writes, for a file grows at one place at a time. None of them holds the interpreter's lock.
    with (
        contextlib.closing(_Opened(path)) as out,
        ThreadPoolExecutor(1, "checkpoint-disk") as disk,
        ThreadPoolExecutor(_HASHING, "checkpoint-hash") as hashing,
    ):
        try:
            for start in range(0, size, BLOCK):
                view = block_at(start).numpy().data
                digests.append(hashing.submit(digest, view))
                written.append(disk.submit(out.write, view, start))
            for future in written:
                future.result()
            out.sync()
        except BaseException:
            disk.shutdown(cancel_futures=True)  # before the file is closed
            raise
        return [future.result() for future in digests]


class _Opened:
    """A file written at offsets, past the page cache if its file system can."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        past_cache = getattr(os, "O_DIRECT", 0)
        self._direct = bool(past_cache)
        try:
            self._file = os.open(path, flags | past_cache, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct, self._file = False, os.open(path, flags, 0o666)

    def close(self) -> None:
        os.close(self._file)

    def write(self, block: memoryview, offset: int) -> None:
        """Write all of `block` at `offset`, which is a multiple of `BLOCK`."""
        whole = len(block) - len(block) % _PAGE
        self._write(block[:whole], offset)
        if whole < len(block):  # the end of the file
            self._through_cache()
            self._write(block[whole:], offset + whole)

    def _write(self, block: memoryview, offset: int) -> None:
        while len(block):
            try:
                count = os.pwrite(self._file, block, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._through_cache()  # a file system that requires other alignments
                continue
            block, offset = block[count:], offset + count

    def _through_cache(self) -> None:
        if self._direct:
            import fcntl

            fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_DIRECT)
            self._direct = False

    def sync(self) -> None:
        """Return once what was written would survive a loss of power."""
        os.fsync(self._file)


# ------------------------------------------------------------------------------------------------------------ checksums


def digest(block: memoryview) -> Digest:
    """The checksums of `block`, one of each kind."""
    return {kind: made(block).hexdigest() for kind, made in KINDS.items()}


def digests_of_files(
    directory: Path, sizes: dict[str, int], block: int, kinds: Iterable[str] = tuple(KINDS)
) -> dict[str, list[Digest]]:
    """``{name: checksums of each block}`` of the files `sizes`, ``{name below directory: bytes}``, on all cores. Raises
    an `OSError` where a file cannot be read; it names the file.
    """
    blocks = [(name, start) for name, size in sizes.items() for start in range(0, max(size, 1), block)]
    digests: dict[str, list[Digest]] = {name: [] for name in sizes}
    # At least four: without the page cache, concurrent reads of several blocks are eight times as fast.
    with ThreadPoolExecutor(max_workers=min(max(cores(), 4), 16), thread_name_prefix="checksum") as pool:
        hashed = pool.map(lambda item: _digest_of_block(directory / item[0], item[1], block, kinds), blocks)
        for (name, _), found in zip(blocks, hashed, strict=True):
            digests[name].append(found)
    return digests


@functools.cache
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
