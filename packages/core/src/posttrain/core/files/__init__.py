"""Durable writes, free-space checks and the errors of failed writes, which name their file."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from posttrain.core.errors import CheckpointError

logger = logging.getLogger(__name__)


class DiskFullError(CheckpointError):
    """A checkpoint was not written because the disk, or the user's quota, is full."""


def means_disk_full(error: BaseException) -> bool:
    """Whether `error` is how the system, or a library, says that a disk or a quota is full."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    # safetensors and torch report the system's error only as text.
    return "No space left on device" in str(error) or "Disk quota exceeded" in str(error)


def name_file(error: BaseException, path: str | os.PathLike[str]) -> None:
    """Let `error` name `path`, where it is of a failed write, which does not know its file; leave any other alone."""
    if isinstance(error, OSError) and error.errno and not error.filename:
        error.filename = str(path)


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Around the code that writes `path`: the error of a failed write names it (`name_file`)."""
    try:
        yield
    except OSError as error:
        name_file(error, path)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write `text` in UTF-8 to `path`, which every `OSError` names."""
    with naming(path):
        Path(path).write_text(text, encoding="utf-8")


def lfs_pointer(path: str | os.PathLike[str]) -> str:
    """A sentence where git put a pointer of Git LFS in the place of the file `path`; empty where it did not."""
    start = b"version https://git-lfs."
    if os.path.isfile(path):
        with open(path, "rb") as file:
            if file.read(len(start)) == start:
                return f"{path} is a pointer of Git LFS, not the file itself. Run: git lfs pull"
    return ""


def sync_file(path: str | Path) -> None:
    """Return once the content of `path` would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: str | Path) -> None:
    """Return once the names in the directory `path` would survive a loss of power."""
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):  # network file systems without such a call
            raise


def remove(path: str | Path) -> None:
    """Delete a file, a link or a directory with all that is in it, as far as possible."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


def directory_bytes(directory: str | Path) -> int:
    """Bytes of all files below `directory`; links are not followed."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def free_bytes(directory: str | Path) -> int:
    """Bytes that may still be written into `directory`, which need not exist yet."""
    directory = Path(directory).absolute()
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return shutil.disk_usage(directory).free


def folder_problem(path: str | Path) -> str | None:
    """Why the folder `path`, which need not exist, is not writable, as the rest of a sentence; None if it is.

    Tests it by creating and removing an empty folder, because permissions do not show a read-only disk.
    """
    try:
        directory = Path(path).absolute()
    except FileNotFoundError:
        return "is relative to the working directory, which has been deleted: change into another one"
    while not os.path.lexists(directory) and directory != directory.parent:
        directory = directory.parent
    if not directory.is_dir():
        return "is a file" if directory == Path(path).absolute() else f"lies below {directory}, which is a file"
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".posttrain-", dir=directory))
    except OSError as error:
        return f"cannot be written to: {error.strerror or error} ({directory})"
    return None


def check_space(directory: str | Path, needed_bytes: int, checkpoints: int = 1, least: int = 0) -> str | None:
    """A sentence if the disk of `directory` has less than `needed_bytes` free, as `checkpoints` take that exist at the
    same time, else None. Raises a `DiskFullError` where not even the `least` bytes of one of them are free.
    """
    free = free_bytes(directory)
    if free >= needed_bytes:
        return None
    what = "a checkpoint" if checkpoints == 1 else f"{checkpoints} checkpoints"
    sentence = (
        f"The disk of {directory} has {_size(free)} free and about {_size(needed_bytes)} are needed for {what}. Free "
        "some space, set save_total_limit, or choose another output_dir."
    )
    if free < least:
        raise DiskFullError(f"{sentence} The weights of one checkpoint alone have {_size(least)}.")
    return sentence


def disk_full(directory: str | Path, needed: int) -> DiskFullError:
    """The error to raise where the disk was full while `directory`, of `needed` bytes in all, was being written."""
    written = directory_bytes(directory)
    of_needed = f" of about {_size(needed)} needed" if needed > written else ""
    return DiskFullError(
        f"The disk is full: {_size(written)}{of_needed} were written into {directory} and "
        f"{_size(free_bytes(directory))} are free. Free some space or lower save_total_limit."
    )


@contextlib.contextmanager
def run_goes_on(record: str) -> Iterator[None]:
    """Around the code that writes `record`, which is not worth the run: a full disk is a warning."""
    try:
        yield
    except OSError as error:
        if not means_disk_full(error):
            raise
        logger.warning("%s was not written (%s). Training goes on; free some space.", record, error)


def _size(count: int) -> str:
    return f"{count / 1e9:.3f} GB" if count >= 1e6 else f"{count:,} bytes"
