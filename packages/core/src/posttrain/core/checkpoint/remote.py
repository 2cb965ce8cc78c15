"""Copies checkpoints to and from a remote file system of fsspec (``s3://``, ``gs://``, ``memory://`` ...).

Checkpoints are committed locally first, then uploaded with the manifest last: an object store has no rename, but a
checkpoint without a manifest is invalid. Downloads are verified with the SHA-256 in the manifest.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from posttrain.core.checkpoint.manifest import MANIFEST, is_inside, read_manifest
from posttrain.core.errors import CheckpointError, require
from posttrain.core.fields.redaction import redact

_NAME = re.compile(r"checkpoint-\d+")


def is_url(path: Any) -> bool:
    """Whether `path` names a place that fsspec reaches, rather than one on this machine."""
    return isinstance(path, str) and re.match(r"[A-Za-z][\w+.-]*://", path) is not None


def working_folder(url: str) -> str:
    """The local working folder of a run with the output `url`; the same at each start."""
    return str(Path("trainer_output") / re.sub(r"[^\w.-]+", "-", redact(url)).strip("-"))


class Remote:
    """The folder at `url`, which holds directories ``checkpoint-<step>``. Raises an `ImportError` where the package
    that fsspec needs for this kind of url is missing.
    """

    def __init__(self, url: str) -> None:
        fsspec = require("fsspec", "fsspec", why=redact(url))
        self.url = url.rstrip("/")
        self.fs, self.root = fsspec.core.url_to_fs(self.url)
        self._pushed: dict[Path, tuple[int, int]] = {}  # files that are no checkpoint's: size and time when uploaded

    def __str__(self) -> str:
        return redact(self.url)

    def whole(self) -> list[str]:
        """Names of the checkpoints that were uploaded to their end, by ascending step."""
        return [name for name in self._names() if self.fs.exists(self._path(name, MANIFEST))]

    def manifest(self, name: str) -> dict[str, Any]:
        """That of the checkpoint `name`, as it says; {} where it cannot be read."""
        try:
            return dict(json.loads(self.fs.cat_file(self._path(name, MANIFEST))))
        except (OSError, ValueError, TypeError):
            return {}

    def push(self, checkpoint: Path) -> None:
        """Upload a committed checkpoint, unless it is there already."""
        name, manifest = checkpoint.name, (checkpoint / MANIFEST).read_bytes()
        place = self._path(name, MANIFEST)
        if self.fs.exists(place):
            if self.fs.cat_file(place) == manifest:
                return
            self.fs.rm_file(place)  # an earlier one of this step is invalid from here on
        for file in (*sorted(read_manifest(checkpoint)["files"]), MANIFEST):
            self._put(checkpoint / file, self._path(name, file))

    def fetch(self, name: str, directory: Path) -> None:
        """Download the checkpoint `name` into `directory`, which is empty. Raises a `CheckpointError` where its
        manifest is damaged, or names files outside of the checkpoint.
        """
        self.fs.get_file(self._path(name, MANIFEST), str(directory / MANIFEST))
        for file in read_manifest(directory)["files"]:
            if not is_inside(file):
                raise CheckpointError(f"{self}/{name}/{MANIFEST} names {file!r}, which is outside of it.")
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            self.fs.get_file(self._path(name, file), str(directory / file))

    def rotate(self, limit: int, keep: Iterable[str]) -> None:
        """Delete checkpoints of the lowest steps until `limit` are left, but none of `keep`, nor the newest whole
        one.
        """
        names, kept = self._names(), {*keep, *self.whole()[-1:]}
        for name in [name for name in names if name not in kept][: max(0, len(names) - limit)]:
            if self.fs.exists(self._path(name, MANIFEST)):
                self.fs.rm_file(self._path(name, MANIFEST))  # half deleted, it is no checkpoint
            self.fs.rm(self._path(name), recursive=True)

    def push_files(self, folder: Path) -> None:
        """Upload the files in `folder` itself: the log and the final model, no checkpoints or hidden files."""
        for path in sorted(folder.iterdir()):
            if not path.is_file() or path.name.startswith("."):
                continue
            stamp = path.stat().st_size, path.stat().st_mtime_ns
            if self._pushed.get(path) != stamp:
                self._put(path, self._path(path.name))
                self._pushed[path] = stamp

    def _names(self) -> list[str]:
        self.fs.invalidate_cache()
        try:
            found = {PurePosixPath(entry.rstrip("/")).name for entry in self.fs.ls(self.root, detail=False)}
        except FileNotFoundError:
            return []
        return sorted(filter(_NAME.fullmatch, found), key=lambda name: int(name.removeprefix("checkpoint-")))

    def _path(self, *parts: str) -> str:
        return posixpath.join(self.root, *parts)

    def _put(self, file: Path, place: str) -> None:
        self.fs.makedirs(posixpath.dirname(place), exist_ok=True)
        self.fs.put_file(str(file), place)
        self.fs.invalidate_cache(posixpath.dirname(place))
        if self.fs.size(place) != file.stat().st_size:
            raise OSError(f"{place} has {self.fs.size(place)} bytes after the upload of {file.stat().st_size}")
