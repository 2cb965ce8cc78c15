"""``manifest.json``: name, size, SHA-256 and CRC-32 of every file of a checkpoint. It is written last and read first.

The CRC-32 is what a resume compares: it finds any damage by chance as surely, and is read four times as fast. The SHA-256
is compared where a checkpoint came over a network.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from posttrain.core.checkpoint.blocks import BLOCK, Digest
from posttrain.core.checkpoint.codec import read_json
from posttrain.core.checkpoint.disk import sync_directory, sync_file
from posttrain.core.errors import CheckpointError

MANIFEST, FORMAT, VERSION = "manifest.json", "posttrain-checkpoint", 2


def write_manifest(
    directory: Path, step: int, extra: dict[str, Any], known: dict[str, list[Digest]] | None = None
) -> None:
    """Fsync everything in `directory` and write the manifest of all files that are there.

    Args:
        known: the digests of files that were hashed as they were written, and are on the disk already.

    Raises:
        CheckpointError: there is something else than files and directories.
    """
    files, directories = _contents(directory)
    files.pop(MANIFEST, None)
    digests = {name: found for name, found in (known or {}).items() if name in files}
    others = {name: size for name, size in files.items() if name not in digests}
    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="fsync") as pool:
        synced = [pool.submit(sync_file, directory / name) for name in others]  # waits for the disk while we hash
        digests |= _hash(directory, others, BLOCK)
        for file in synced:
            file.result()
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "written": round(time.time(), 6),
        "block": BLOCK,
        "files": {
            name: {"size": size, "sha256": [d.sha256 for d in digests[name]], "crc32": [d.crc32 for d in digests[name]]}
            for name, size in sorted(files.items())
        },
        "extra": extra,
    }
    manifest = json.loads(json.dumps(manifest, allow_nan=False))  # as it will be read back: the seal is of that
    text = json.dumps(manifest | {"sha256": _seal(manifest)}, indent=1, allow_nan=False)
    (directory / MANIFEST).write_text(text + "\n", encoding="ascii")
    sync_file(directory / MANIFEST)
    for name in directories:
        sync_directory(directory / name)
    sync_directory(directory)


def read_manifest(checkpoint: str | Path) -> dict[str, Any]:
    """The manifest of a checkpoint, itself checked, its files not.

    Returns:
        ``{"step", "written": seconds since 1970, "block": bytes, "extra",
        "files": {name: {"size": bytes, "sha256": [one for each block], "crc32": [likewise]}}}``

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = Path(checkpoint) / MANIFEST
    if not path.is_file():
        if (path.parent / "trainer_state.json").is_file():
            raise CheckpointError(
                f"{path.parent} has no {MANIFEST}: it was written by another trainer, such as transformers' or trl's, "
                "or has lost that file. What it holds cannot be checked, so no run goes on from it; its weights can "
                "still be loaded as a model."
            )
        raise CheckpointError(f"{path.parent} has no {MANIFEST}, so it is not a checkpoint, or not a whole one.")
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is damaged: it does not hold the format {FORMAT!r}.")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {manifest.get('version')!r} of its format, and this posttrain reads version {VERSION}."
        )
    if manifest.pop("sha256", None) != _seal(manifest) or not _well_formed(manifest):
        raise CheckpointError(f"{path} is damaged: its content and its own SHA-256 do not agree.")
    return manifest


def damages(checkpoint: str | Path, deep: bool = True, kind: str = "crc32") -> list[str]:
    """What is wrong with the checkpoint, a sentence for each damaged file; an empty list: it is whole.

    Args:
        deep: read every file and compare its checksum; else only check that it is there and has its size.
        kind: of the checksum: ``"crc32"`` or ``"sha256"``.
    """
    directory = Path(checkpoint)
    try:
        manifest = read_manifest(directory)
        files = manifest["files"]
        problems = {
            name: _misplaced(directory, name) or _missized(directory, name, files[name]["size"]) for name in files
        }
        if deep:
            present = {name: files[name]["size"] for name, problem in problems.items() if not problem}
            for name, digests in _hash(directory, present, manifest["block"], (kind,)).items():
                if [getattr(digest, kind) for digest in digests] != files[name][kind]:
                    shown = {"crc32": "CRC-32", "sha256": "SHA-256"}[kind]
                    problems[name] = f"{directory / name} is damaged: its {shown} is not the one in {MANIFEST}."
    except CheckpointError as error:
        return [str(error)]
    except OSError as error:
        return [f"{error.filename or directory} cannot be read: {error.strerror}."]
    return [problem for problem in problems.values() if problem]


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _well_formed(manifest: dict[str, Any]) -> bool:
    files, block = manifest.get("files"), manifest.get("block")
    return (
        isinstance(block, int)
        and block >= 2**20
        and isinstance(manifest.get("written"), (int, float))
        and isinstance(files, dict)
        and all(isinstance(entry, dict) and isinstance(entry.get("size"), int) for entry in files.values())
        and all(isinstance(entry.get(kind), list) for entry in files.values() for kind in ("sha256", "crc32"))
    )


def _contents(directory: Path) -> tuple[dict[str, int], list[str]]:
    """``{relative name: bytes}`` of the files below `directory`, and its directories, the deepest first."""
    files: dict[str, int] = {}
    directories: list[str] = []
    for parent, folders, names in os.walk(directory, topdown=False):
        for path in (Path(parent, name) for name in (*folders, *names)):
            relative = path.relative_to(directory).as_posix()
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise CheckpointError(f"{path} is neither a file nor a directory; a checkpoint holds nothing else.")
            if path.is_dir():
                directories.append(relative)
            else:
                files[relative] = path.stat().st_size
    return files, directories


def _hash(
    directory: Path, sizes: dict[str, int], block: int, kinds: tuple[str, ...] = ("sha256", "crc32")
) -> dict[str, list[Digest]]:
    """``{name: checksums of each block}``, on all cores; those of other `kinds` are left empty."""
    blocks = [(name, start) for name, size in sizes.items() for start in range(0, max(size, 1), block)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    digests: dict[str, list[Digest]] = {name: [] for name in sizes}
    # At least four: what is not in the page cache is read eight times as fast when several blocks are asked for at once.
    with ThreadPoolExecutor(max_workers=min(max(cores, 4), 16), thread_name_prefix="checksum") as pool:
        hashed = pool.map(lambda item: _hash_block(directory / item[0], item[1], block, kinds), blocks)
        for (name, _), digest in zip(blocks, hashed, strict=True):
            digests[name].append(digest)
    return digests


def _hash_block(path: Path, start: int, block: int, kinds: tuple[str, ...]) -> Digest:
    sha256, crc32, buffer, left = hashlib.sha256(), 0, memoryview(bytearray(2**18)), block
    try:
        with open(path, "rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), start, block, os.POSIX_FADV_WILLNEED)
            file.seek(start)
            while left and (count := file.readinto(buffer[:left])):
                if "sha256" in kinds:
                    sha256.update(buffer[:count])
                if "crc32" in kinds:
                    crc32 = zlib.crc32(buffer[:count], crc32)
                left -= count
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # a failed read does not know its file
    return Digest(sha256.hexdigest() if "sha256" in kinds else "", f"{crc32:08x}" if "crc32" in kinds else "")


def is_inside(name: str) -> bool:
    """Whether the relative path `name` stays in its folder, on any system; links are not looked at."""
    return bool(name) and not re.match(r"[/\\]|[A-Za-z]:", name) and ".." not in re.split(r"[/\\]", name)


def _misplaced(directory: Path, name: str) -> str | None:
    """A manifest may come from anywhere: no name in it may lead out of the checkpoint."""
    if not is_inside(name) or not (directory / name).resolve().is_relative_to(directory.resolve()):
        return f"{directory / MANIFEST} names {name!r}, which lies outside of the checkpoint."
    return None


def _missized(directory: Path, name: str, size: int) -> str | None:
    path = directory / name
    if not path.exists():
        return f"{path} is missing."
    if not path.is_file():
        return f"{path} is not a file."
    if path.stat().st_size != size:
        return f"{path} is damaged: it has {path.stat().st_size:,} bytes instead of {size:,}."
    return None
