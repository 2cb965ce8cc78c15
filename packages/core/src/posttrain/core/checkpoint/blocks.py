"""Large files in blocks: filled, hashed and written at the same time, past the system's page cache where that can be.

Writing through the cache costs the processor about as much as copying the file, and what waits there for the disk has to
be waited for later. Directly written, a file costs the processor its checksums alone, and is on the disk when the last
block is.
"""

from __future__ import annotations

import contextlib
import contextvars
import errno
import hashlib
import mmap
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from posttrain.core.checkpoint.disk import free_bytes

# Checksums are of blocks of this many bytes, so that all cores share a large file.
BLOCK = 32 * 2**20
# A file of fewer bytes is written by one call: beginning threads for it takes longer.
SMALL = 2**20
_PAGE = 4096
_IN_FLIGHT = 3  # blocks being written or hashed while the next is filled


@dataclass(frozen=True)
class Digest:
    """Checksums of one block: SHA-256, and CRC-32, which is read four times as fast."""

    sha256: str
    crc32: str


def digest(block: memoryview) -> Digest:
    """The checksums of `block`."""
    return Digest(hashlib.sha256(block).hexdigest(), f"{zlib.crc32(block):08x}")


class Source:
    """The bytes of a file that is to be: a header, then tensors one after another.

    Args:
        header: what comes first.
        tensors: dense, of any device; they need not be contiguous.
    """

    def __init__(self, header: bytes, tensors: list[torch.Tensor]) -> None:
        self.tensors = [torch.frombuffer(bytearray(header), dtype=torch.uint8), *tensors]
        self.sizes = [tensor.numel() * tensor.element_size() for tensor in self.tensors]
        self.size = sum(self.sizes)
        self.devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}

    def read(self, block_size: int, buffer: Callable[[int], torch.Tensor]) -> Iterator[torch.Tensor]:
        """Blocks of `block_size` bytes, the last shorter, each copied into what `buffer` gives for its offset."""
        offset, filled, block = 0, 0, buffer(0)
        for tensor, size in zip(self.tensors, self.sizes, strict=True):
            flat, done = (bytes_of(tensor), 0) if size else (tensor, 0)
            while done < size:
                count = min(size - done, block_size - filled)
                block[filled : filled + count].copy_(flat[done : done + count], non_blocking=True)
                filled, done, offset = filled + count, done + count, offset + count
                if filled == block_size and offset < self.size:
                    self._wait()
                    yield block
                    filled, block = 0, buffer(offset)
        self._wait()
        yield block[:filled]

    def _wait(self) -> None:
        for device in self.devices:  # copies into pinned memory are asynchronous
            torch.cuda.synchronize(device)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of `tensor` in row-major order as flat uint8, on its device. Copies only if it must."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


class Memory:
    """Host memory for the images of files, kept from one checkpoint to the next: fresh pages cost more than the copy."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def take(self, name: str, size: int, pinned: bool = False) -> torch.Tensor:
        """`size` bytes, aligned to pages; those that `name` had the last time, if they suffice."""
        size, kept = size + -size % _PAGE, self._kept.get(name)
        if kept is None or len(kept) < size or kept.is_pinned() != pinned:
            self._kept[name] = kept = allocate(size, pinned)
        return kept

    @property
    def bytes(self) -> int:
        """How much is kept."""
        return sum(map(len, self._kept.values()))


def allocate(size: int, pinned: bool = False) -> torch.Tensor:
    """`size` bytes of page-aligned host memory, in huge pages where the system has them."""
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    region = mmap.mmap(-1, max(size, _PAGE))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=torch.uint8)[:size]


class Part:
    """What one process writes of one checkpoint: the digests of its large files, and the images still to be written.

    Args:
        directory: files below it are written by this part.
        memory: lends the memory for blocks and images.
        later: keep an image of each file, for `finish` to write; else files are written at once.
    """

    def __init__(self, directory: Path, memory: Memory, later: bool = False) -> None:
        self.directory, self.memory, self.later = directory, memory, later
        self.digests: dict[str, list[Digest]] = {}  # relative name -> of each block
        self._images: list[tuple[Path, torch.Tensor]] = []

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """In here, `write_file` goes through this part."""
        token = _part.set(self)
        try:
            yield
        finally:
            _part.reset(token)

    def write(self, path: Path, source: Source) -> None:
        """Write `source` to `path`; or copy it into memory, so that it may change before it is written."""
        name = path.relative_to(self.directory).as_posix()
        if self.later and source.size >= SMALL:
            image = self.memory.take(name, source.size, pinned=bool(source.devices))
            for _ in source.read(source.size, lambda offset: image):
                pass
            self._images.append((path, image[: source.size]))
        else:
            self.digests[name] = write_blocks(path, source, self.memory)

    def finish(self) -> None:
        """Write the images."""
        while self._images:
            path, image = self._images.pop(0)
            self.digests[path.relative_to(self.directory).as_posix()] = write_blocks(path, image, self.memory)


_part: contextvars.ContextVar[Part | None] = contextvars.ContextVar("part", default=None)


def write_file(path: Path, source: Source) -> None:
    """Write `source` to `path`: as the `Part` that is being written wants it, else at once and without checksums."""
    part = _part.get()
    if part is not None and path.is_relative_to(part.directory):
        part.write(path, source)
        return
    with open(path, "wb") as file:
        for tensor in source.tensors:
            file.write(bytes_of(tensor).cpu().numpy().data)


def write_blocks(path: Path, source: Source | torch.Tensor, memory: Memory) -> list[Digest]:
    """Write a file so that it survives a loss of power; returns the checksums of its blocks.

    Args:
        source: the file's bytes, to be copied block by block; or a page-aligned image of it.
        memory: lends the memory for the blocks.

    Raises:
        OSError: ENOSPC before anything is written, where the file system can tell that there is no room.
    """
    size = source.size if isinstance(source, Source) else len(source)
    if size < SMALL:
        (whole,) = source.read(SMALL, lambda offset: torch.empty(size, dtype=torch.uint8))
        with open(path, "wb") as file:
            file.write(whole.numpy().data)
            file.flush()
            os.fsync(file.fileno())
        return [digest(whole.numpy().data)]
    if free_bytes(path.parent) < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    written: list[Future[None]] = []
    digests: list[Future[Digest]] = []

    def buffer(offset: int) -> torch.Tensor:
        number = offset // BLOCK
        if number >= _IN_FLIGHT:  # the block that this memory held must be done with
            written[number - _IN_FLIGHT].result()
            digests[number - _IN_FLIGHT].result()
        return memory.take(f"block {number % _IN_FLIGHT}", BLOCK, pinned=bool(source.devices))[:BLOCK]

    blocks = source.read(BLOCK, buffer) if isinstance(source, Source) else source.split(BLOCK)
    # One thread writes, for a file grows at one place at a time, and one hashes: neither holds the interpreter's lock.
    with (
        _opened(path) as file,
        ThreadPoolExecutor(1, "checkpoint-disk") as disk,
        ThreadPoolExecutor(1, "checkpoint-hash") as hashing,
    ):
        try:
            for number, block in enumerate(blocks):
                view = block.numpy().data
                digests.append(hashing.submit(digest, view))
                written.append(disk.submit(file.write, view, number * BLOCK))
            for future in written:
                future.result()
            file.sync()
        except BaseException:
            disk.shutdown(cancel_futures=True)  # before the file is closed
            raise
        return [future.result() for future in digests]


class _opened:
    """A file written at offsets, past the page cache if its file system can."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
        self._direct = hasattr(os, "O_DIRECT")
        try:
            self._file = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct, self._file = False, os.open(path, flags, 0o666)

    def __enter__(self) -> _opened:
        return self

    def __exit__(self, *_: object) -> None:
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
                count = _write_at(self._file, block, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._through_cache()  # a file system that opens a file so, and then wants other alignments
                continue
            block, offset = block[count:], offset + count

    def _through_cache(self) -> None:
        if self._direct:
            import fcntl

            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            self._direct = False

    def sync(self) -> None:
        """Return once what was written would survive a loss of power."""
        os.fsync(self._file)


def _write_at(file: int, block: memoryview, offset: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(file, block, offset)
    os.lseek(file, offset, os.SEEK_SET)
    return os.write(file, block)
