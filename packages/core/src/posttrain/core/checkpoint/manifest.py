"""``manifest.json``: name, size, SHA-256 and XXH128 of every file of a checkpoint. Written last, read first.

A resume compares the XXH128. The SHA-256 is compared after a download.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from posttrain.core.checkpoint.blocks import BLOCK, KINDS, SHOWN, Digest, digests_of_files
from posttrain.core.checkpoint.codec import read_document
from posttrain.core.errors import CheckpointError
from posttrain.core.files import sync_directory, sync_file

MANIFEST, FORMAT, VERSION = "manifest.json", "posttrain-checkpoint", 3
#: The record of a run, in the folder of its checkpoints.
RECORD = "run.json"
#: What transformers' trainer writes into each checkpoint, all of it pickles.
_THEIRS = {"training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt"}


def write_manifest(
    directory: Path, step: int, extra: dict[str, Any], known: dict[str, list[Digest]] | None = None
) -> None:
    """Fsync everything in `directory` and write the manifest of all files that are there; those in `known` were hashed
    while they were written and are on disk. Raises a `CheckpointError` where there is something other than files and
    directories.
    """
    files, directories = _contents(directory)
    files.pop(MANIFEST, None)
    digests = {name: found for name, found in (known or {}).items() if name in files}
    others = {name: size for name, size in files.items() if name not in digests}
    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="fsync") as pool:
        synced = [pool.submit(sync_file, directory / name) for name in others]  # waits for the disk while we hash
        digests |= digests_of_files(directory, others, BLOCK)
        for file in synced:
            file.result()
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "written": round(time.time(), 6),
        "block": BLOCK,
        "files": {
            name: {"size": size} | {kind: [digest[kind] for digest in digests[name]] for kind in KINDS}
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
    """The validated manifest of a checkpoint; its files are not checked. Returns ``{"step", "written": seconds since
    1970, "block": bytes, "extra", "files": {name: {"size": bytes, "sha256": [one for each block], "xxh128":
    [likewise]}}}``. Raises a `CheckpointError` where it is missing or damaged.
    """
    path = Path(checkpoint) / MANIFEST
    if not path.is_file():
        why = ", so it is not a checkpoint, or not a whole one"
        if is_foreign(path.parent):
            why = (
                ": it was written by another trainer, such as transformers' or trl's. Set its path to resume from it: "
                f"resume_from_checkpoint={str(path.parent)!r}"
            )
        raise CheckpointError(f"{path.parent} has no {MANIFEST}{why}.")
    manifest = read_document(path, FORMAT, VERSION, "is damaged")
    if manifest.pop("sha256", None) != _seal(manifest) or not _well_formed(manifest):
        raise CheckpointError(f"{path} is damaged: its content and its own SHA-256 do not agree.")
    return manifest


def run_of(manifest: dict[str, Any]) -> str | None:
    """The id of the run that saved the checkpoint; None where the manifest names none."""
    return (manifest.get("extra") or {}).get("run")


def is_foreign(directory: str | Path) -> bool:
    """Whether transformers' trainer, or one made of it, wrote the checkpoint: its own files are there, and none of
    ours.
    """
    files = {path.name for path in Path(directory).iterdir()} if Path(directory).is_dir() else set()
    ours = MANIFEST in files or any(name.startswith("rank-") and name.endswith(".json") for name in files)
    theirs = files & _THEIRS or any(name.startswith("rng_state") and name.endswith(".pth") for name in files)
    return "trainer_state.json" in files and bool(theirs) and not ours


def rows_per_batch(checkpoint: Path, train_batch_size: int | None) -> int | None:
    """Rows of a micro-batch over all processes of the run that saved `checkpoint`, with `train_batch_size` in its
    trainer state; None where it does not tell. Another trainer's processes left a file of random numbers each.
    """
    if is_foreign(checkpoint):
        return train_batch_size and train_batch_size * max(len([*checkpoint.glob("rng_state*.pth")]), 1)
    return read_manifest(checkpoint)["extra"].get("rows_per_batch")


def damages(
    checkpoint: str | Path, deep: bool = True, kind: str = "xxh128", manifest: dict[str, Any] | None = None
) -> list[str]:
    """A sentence for each damaged file of the checkpoint, whose `manifest` may have been read before; empty if it is
    intact. `deep`: read every file and compare its checksum of `kind` ("xxh128" or "sha256"); else only check that it
    is there and has its size.
    """
    directory = Path(checkpoint)
    try:
        manifest = read_manifest(directory) if manifest is None else manifest
        files = manifest["files"]
        problems = {name: _damage(directory, name, files[name]["size"]) for name in files}
        if deep:
            present = {name: files[name]["size"] for name, problem in problems.items() if not problem}
            for name, digests in digests_of_files(directory, present, manifest["block"], [kind]).items():
                if [digest[kind] for digest in digests] != files[name][kind]:
                    problems[name] = f"{directory / name} is damaged: its {SHOWN[kind]} is not the one in {MANIFEST}."
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
        and all(isinstance(entry.get(kind), list) for entry in files.values() for kind in KINDS)
    )


def _contents(directory: Path) -> tuple[dict[str, int], list[str]]:
    """``{relative name: bytes}`` of the files below `directory`, and its directories, the deepest first."""
    files: dict[str, int] = {}
    directories: list[str] = []
    for path in sorted(directory.rglob("*"), reverse=True):  # what is in a directory, before it
        relative = path.relative_to(directory).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{path} is neither a file nor a directory; a checkpoint holds nothing else.")
        if path.is_dir():
            directories.append(relative)
        else:
            files[relative] = path.stat().st_size
    return files, directories


def is_inside(name: str) -> bool:
    """Whether the relative path `name` stays in its folder, on any system; links are not followed."""
    return bool(name) and not re.match(r"[/\\]|[A-Za-z]:", name) and ".." not in re.split(r"[/\\]", name)


def _damage(directory: Path, name: str, size: int) -> str | None:
    path = directory / name
    # A manifest may come from anywhere: no name in it may lead out of the checkpoint.
    if not is_inside(name) or not path.resolve().is_relative_to(directory.resolve()):
        return f"{directory / MANIFEST} names {name!r}, which is outside of the checkpoint."
    if not path.exists():
        return f"{path} is missing."
    if not path.is_file():
        return f"{path} is not a file."
    if path.stat().st_size != size:
        return f"{path} is damaged: it has {path.stat().st_size:,} bytes instead of {size:,}."
    return None
