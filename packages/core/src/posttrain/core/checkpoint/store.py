"""Transactional checkpoints: ``checkpoint-N`` appears complete, by one rename, or not at all.

A checkpoint is written into a temporary directory next to its final path. The commit hashes and fsyncs every file,
writes ``manifest.json`` last, and renames. A process may be killed, or the machine lose power, at any moment: every
directory with the name of a checkpoint is complete. The manifest reveals later damage.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from posttrain.core import files
from posttrain.core.checkpoint.blocks import Digest
from posttrain.core.checkpoint.manifest import damages, is_foreign, read_manifest, run_of, write_manifest
from posttrain.core.checkpoint.remote import Remote, is_url
from posttrain.core.errors import CheckpointError
from posttrain.core.fields.redaction import redact

logger = logging.getLogger(__name__)

_NAME = re.compile(r"checkpoint-(\d+)")
_HIDDEN = re.compile(
    r"\.(?P<role>tmp|old|trash)-(?P<name>checkpoint-\d+)\.(?P<host>[^.]+)\.(?P<pid>\d{1,9})\.(?P<run>\w+)"
)
_HOST = re.sub(r"[^\w-]", "_", socket.gethostname()) or "unknown"
# distinguishes this process from an earlier one of the same id, as in a restarted container
_RUN = secrets.token_hex(4)
_DAY = 24 * 3600.0


def final_path(folder: str | Path) -> Path:
    """The path of `folder`, which may hold a checkpoint that is being written, once it is committed."""
    hidden = _HIDDEN.fullmatch(Path(folder).name)
    return Path(folder).with_name(hidden["name"]) if hidden else Path(folder)


class MissingCheckpointError(CheckpointError, ValueError):
    """The requested checkpoint does not exist."""


class Store:
    """The checkpoints of one run: directories ``checkpoint-<step>`` in `output_dir`, which held the names `found` when
    this was made, hidden ones left out. They are copied to `remote`, and downloaded from it if missing here.

    With several processes one calls `begin`, all write into the directory that it returns, and after a barrier one
    calls `commit`, which includes all files there.
    """

    def __init__(self, output_dir: str | Path, remote: Remote | None = None) -> None:
        self.output_dir, self.remote = Path(output_dir), remote
        entries = self.output_dir.iterdir() if self.output_dir.is_dir() else ()
        self.found = sorted(path.name for path in entries if path.name[0] != ".")
        self._removals: list[threading.Thread] = []

    # ---- writing ----

    def path(self, step: int) -> Path:
        """The path of the committed checkpoint of `step`."""
        return self.output_dir / f"checkpoint-{step}"

    def begin(self, step: int) -> Path:
        """A fresh, empty directory to write the checkpoint of `step` into, for `commit` or `abort`. Raises a
        `DiskFullError` where there is no space for a directory.
        """
        temp = self._hidden("tmp", step)
        with self.writing(temp):
            self.output_dir.mkdir(parents=True, exist_ok=True)
            self.settle()  # deleting frees space
            files.remove(temp)
            temp.mkdir()
        return temp

    @contextlib.contextmanager
    def writing(self, temp: str | Path) -> Iterator[None]:
        """Around the code that writes into `temp`: an error that means a full disk becomes a `DiskFullError`."""
        try:
            yield
        except Exception as error:
            if isinstance(error, files.DiskFullError) or not files.means_disk_full(error):
                files.name_file(error, temp)
                raise
            newest = self.checkpoints()[-1:]  # the best guess of what the next one needs
            raise files.disk_full(temp, sum(map(files.directory_bytes, newest))) from error

    def commit(
        self, temp: str | Path, extra: dict[str, Any] | None = None, known: dict[str, list[Digest]] | None = None
    ) -> Path:
        """Commit `temp`, which `begin` returned, as the checkpoint of its step, replacing an earlier one. The manifest
        keeps `extra` (JSON only); files with digests in `known` are already hashed and on disk.

        When this returns, the checkpoint survives a loss of power. If it raises, `temp` is gone and an earlier
        checkpoint of the same step is untouched: a `DiskFullError`, or a `CheckpointError` where `temp` holds something
        other than files and directories.
        """
        temp = Path(temp)
        hidden = _HIDDEN.fullmatch(temp.name)
        if hidden is None or hidden["role"] != "tmp" or temp.parent != self.output_dir:
            raise ValueError(f"{temp} is not a directory that begin() made in {self.output_dir}.")
        final, step = self.output_dir / hidden["name"], number_of(Path(hidden["name"]))
        try:
            with self.writing(temp):
                write_manifest(temp, step, extra or {}, known)
                self._rename_into_place(temp, final, step)
        except BaseException:
            self.abort(temp)
            raise
        return final

    def abort(self, temp: str | Path) -> None:
        """Remove a checkpoint that will not be committed."""
        files.remove(Path(temp))

    def _rename_into_place(self, temp: Path, final: Path, step: int) -> None:
        old = self._hidden("old", step)
        replaces = os.path.lexists(final)
        if replaces:
            # No portable call swaps two directories. Between the two renames the earlier checkpoint is whole under
            # its hidden name, and `clean` gives it its own name back should this process die there.
            files.remove(old)
            final.rename(old)
        try:
            temp.rename(final)
        except OSError:
            if replaces:
                old.rename(final)
            raise
        files.sync_directory(self.output_dir)
        files.sync_directory(self.output_dir.absolute().parent)  # the output directory may be new itself
        files.remove(old)

    def _hidden(self, role: str, step: int) -> Path:
        return self.output_dir / f".{role}-checkpoint-{step}.{_HOST}.{os.getpid()}.{_RUN}"

    # ---- reading ----

    def checkpoints(self) -> list[Path]:
        """Every ``checkpoint-<step>``, by ascending step, whole or not, whoever wrote it."""
        try:
            found = [path for path in self.output_dir.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(found, key=number_of)

    def newest_whole(self) -> Path | None:
        """The whole checkpoint of the highest step of the run that saved last, with a warning on each damaged one that
        is passed over.
        """
        self.clean()
        remote = self.remote
        there = [] if remote is None else remote.whole()
        names = sorted({path.name for path in self.checkpoints()} | {*there}, key=lambda name: number_of(Path(name)))
        manifests = {name: self._manifest(name, there) for name in names}
        latest = max(names, key=lambda name: manifests[name].get("written", 0), default="")
        run = run_of(manifests.get(latest, {}))
        for name in reversed(names):
            path, manifest = self.output_dir / name, manifests[name]
            if manifest and run_of(manifest) != run:
                continue
            problems = self.verify(path) if path.is_dir() else ["It is not here."]
            if problems and remote is not None and name in there:
                problems = self._fetch(remote, name)
            if not problems:
                if number_of(Path(latest)) < number_of(path):
                    logger.warning(
                        f"{path} is the checkpoint of the highest step, but {self.output_dir / latest} was written "
                        "after it, perhaps by a new run in the same directory. To resume from that one, pass its path."
                    )
                return path
            logger.warning("Passing over %s, which cannot be resumed from: %s", path, " ".join(problems))
        return None

    def manifests(self) -> dict[Path, dict[str, Any]]:
        """That of each checkpoint here, by ascending step; damaged ones are left out."""
        return {path: found for path in self.checkpoints() if (found := self._manifest(path.name))}

    def by_run(self, manifests: dict[Path, dict[str, Any]] | None = None) -> dict[str | None, list[Path]]:
        """The checkpoints here by the run that saved them, that which saved last at the end; damaged ones left out.
        Their `manifests` may have been read before.
        """
        runs: dict[str | None, list[Path]] = {}
        for path, manifest in (read := self.manifests() if manifests is None else manifests).items():
            runs.setdefault(run_of(manifest), []).append(path)
        written = {run: max(read[path]["written"] for path in paths) for run, paths in runs.items()}
        return {run: runs[run] for run in sorted(written, key=written.__getitem__)}

    def _manifest(self, name: str, there: Iterable[str] = ()) -> dict[str, Any]:
        """That of a checkpoint here, or of one in the remote place, which has those in `there`; {} if it is damaged."""
        try:
            return read_manifest(self.output_dir / name)
        except CheckpointError:
            return self.remote.manifest(name) if self.remote is not None and name in there else {}

    def push(self, remote: Remote) -> None:
        """Copy missing checkpoints to `remote`. A failure is logged and retried at the next call."""
        for path in self.checkpoints():
            try:
                if not self.verify(path, deep=False):
                    remote.push(path)
            except Exception as error:  # of a client library, about a network: not worth a run
                logger.warning(
                    f"{path} was not copied to {remote} ({type(error).__name__}: {redact(str(error))}). Training "
                    "continues, the local checkpoint is complete, and the next save retries the copy."
                )

    def push_files(self) -> None:
        """Copy the log and the final model to the remote place; a failure is warned of."""
        if self.remote is not None:
            try:
                self.remote.push_files(self.output_dir)
            except Exception as error:
                logger.warning(
                    f"The files in {self.output_dir} were not all copied to {self.remote} ({type(error).__name__}: "
                    f"{redact(str(error))}); they are on this machine."
                )

    def _fetch(self, remote: Remote, name: str) -> list[str]:
        """Download the checkpoint `name`; returns its problems."""
        temp = self.begin(number_of(Path(name)))
        try:
            with self.writing(temp):
                remote.fetch(name, temp)
            if not (problems := self.verify(temp, kind="sha256")):
                files.sync_directory(temp)
                self._rename_into_place(temp, self.output_dir / name, number_of(Path(name)))
            return problems
        except CheckpointError as error:
            return [str(error)]
        except OSError as error:
            return [f"It could not be downloaded from {remote} ({type(error).__name__}: {redact(str(error))})."]
        finally:
            self.abort(temp)

    def verify(self, path: str | Path, deep: bool = True, kind: str = "xxh128") -> list[str]:
        """The problems of the checkpoint at `path`, a sentence each, as `manifest.damages`; empty if it is intact.
        Files that are not in the manifest, such as those of callbacks, are no damage.
        """
        return damages(path, deep, kind)

    def resolve(self, resume_from_checkpoint: bool | str | Path) -> Path:
        """The intact checkpoint for True (the newest intact one) or for a path (only that one). Raises a
        `MissingCheckpointError` where it does not exist, and a `CheckpointError` where it is damaged. Of another
        trainer's checkpoint, the readable parts are used.
        """
        if resume_from_checkpoint is True:
            if (newest := self.newest_whole()) is None:
                raise self._none_whole()
            return newest
        if not isinstance(resume_from_checkpoint, (str, os.PathLike)):
            raise TypeError(
                f"resume_from_checkpoint={resume_from_checkpoint!r} must be True or the path of a checkpoint."
            )
        if is_url(resume_from_checkpoint):
            folder, _, name = str(resume_from_checkpoint).rstrip("/").rpartition("/")
            return self._resolve_remote(Remote(folder), name)
        path = Path(resume_from_checkpoint)
        if not path.is_dir() and self.remote is not None and path.name in self.remote.whole():
            return self._resolve_remote(self.remote, path.name)
        if not path.is_dir():
            beside = [str(other) for other in (Store(path.parent).checkpoints() or self.checkpoints())]
            hint = f"There are {', '.join(beside)}." if beside else "The path is not a directory."
            raise MissingCheckpointError(f"Can't find a valid checkpoint at {resume_from_checkpoint}. {hint}")
        if not is_foreign(path):
            self._check(path)
        return path

    def has_begun(self) -> bool:
        """Whether the run has left a checkpoint, whole or damaged, here or in its remote folder."""
        return bool(self.checkpoints()) or (self.remote is not None and bool(self.remote.whole()))

    def look_for(self, resume_from_checkpoint: bool | str | Path) -> None:
        """Raise what `resolve` would, as far as it shows without reading a file whole, or fetching or deleting one."""
        path = self.output_dir if isinstance(resume_from_checkpoint, bool) else Path(resume_from_checkpoint)
        if resume_from_checkpoint is True:
            whole = any(not self.verify(one, deep=False) for one in self.checkpoints())
            if not whole and (self.remote is None or not self.remote.whole()):
                raise self._none_whole()
        elif path.is_dir():
            if not is_foreign(path):
                self._check(path, deep=False)
        elif self.remote is None or path.name not in self.remote.whole():
            self.resolve(resume_from_checkpoint)

    def _none_whole(self) -> MissingCheckpointError:
        text = f"No valid checkpoint found in output directory ({self.output_dir})"
        text += f": none of {len(self.checkpoints())} is whole" if self.checkpoints() else ""
        *earlier, _ = [*self.by_run().values()] or [[]]
        if earlier:
            text += f" of the run that saved last. To go on with an earlier run, set a path: {earlier[-1][-1]}"
        if foreign := [path for path in self.checkpoints() if is_foreign(path)]:
            text += (
                f". {len(foreign)} of them are another trainer's, such as transformers' or trl's. Set the path of one "
                f"to resume from it: resume_from_checkpoint={str(foreign[-1])!r}"
            )
        return MissingCheckpointError(f"{text}. To train from the beginning, leave resume_from_checkpoint out.")

    def _check(self, path: Path, deep: bool = True) -> None:
        if problems := self.verify(path, deep):
            if inside := [str(other) for other in Store(path).checkpoints()]:
                problems.append(f"It is a directory of checkpoints; name one of them: {', '.join(inside)}.")
            raise CheckpointError(
                f"Can't find a valid checkpoint at {path}: {' '.join(problems)} Set resume_from_checkpoint=True to "
                "resume from the newest intact one."
            )

    def _resolve_remote(self, remote: Remote, name: str) -> Path:
        path = self.output_dir / name
        if name not in (there := remote.whole()):
            hint = f"There are {', '.join(there)}." if there else "There is none."
            raise MissingCheckpointError(f"Can't find a valid checkpoint at {remote}/{name}. {hint}")
        problems = self.verify(path) if path.is_dir() else ["It is not here."]
        if problems and (problems := self._fetch(remote, name)):
            raise CheckpointError(f"Can't find a valid checkpoint at {remote}/{name}: {' '.join(problems)}")
        return path

    # ---- removing ----

    def rotate(self, limit: int | None, keep: Iterable[str | Path] = ()) -> list[Path]:
        """Delete checkpoints of the lowest steps until `limit` (None or 0: all) are left, those of earlier runs first;
        returns them. Never deleted are the whole checkpoint of the highest step of each run, the one written last, and
        those in `keep`, even if more than `limit` are left then.
        """
        if not limit:
            return []
        checkpoints, removed = self.checkpoints(), []
        whole = {path: read for path, read in self.manifests().items() if not damages(path, deep=False, manifest=read)}
        by_run = [*self.by_run(whole).values()]
        written = {path: read["written"] for path, read in whole.items()}
        newest = sorted(written, key=written.__getitem__)[-1:]
        protected = {Path(path).resolve() for path in [*keep, *newest, *(paths[-1] for paths in by_run)]}
        mine = by_run[-1] if by_run else []
        checkpoints.sort(key=mine.__contains__)  # by steps, with those of earlier runs first
        if self.remote is not None:
            try:
                self.remote.rotate(limit, [path.name for path in protected])
            except Exception as error:
                logger.warning(
                    f"Old checkpoints in {self.remote} could not be deleted ({redact(str(error))}); they stay."
                )
        removable = [path for path in checkpoints if path.resolve() not in protected]
        for path in removable[: max(0, len(checkpoints) - limit - len(by_run[:-1]))]:
            trash = self._hidden("trash", number_of(path))
            try:
                files.remove(trash)
                path.rename(trash)  # a partly deleted checkpoint no longer has the name
            except OSError as error:
                logger.warning("%s could not be deleted (%s); it stays.", path, error)
                continue
            # File systems take 0.2 s for each GB that is deleted, for which no one must wait.
            self._removals.append(threading.Thread(target=files.remove, args=(trash,), name="checkpoint-removal"))
            self._removals[-1].start()
            removed.append(path)
        return removed

    def settle(self) -> None:
        """Wait until the space of all deleted checkpoints is free."""
        while self._removals:
            self._removals.pop().join()

    def clean(self) -> None:
        """Remove partly written and partly deleted checkpoints of dead runs. A run counts as dead if it ran on this
        machine and its process is gone, or if it has not touched the directory for a day.
        """
        for path in list(self.output_dir.iterdir()) if self.output_dir.is_dir() else ():
            hidden = _HIDDEN.fullmatch(path.name)
            if hidden is None or not _is_dead(path, hidden["host"], int(hidden["pid"]), hidden["run"]):
                continue
            final = self.output_dir / hidden["name"]
            if hidden["role"] == "old" and not os.path.lexists(final):
                with contextlib.suppress(OSError):  # another process of this run was first
                    path.rename(final)
            else:
                files.remove(path)


def get_last_checkpoint(folder: str | Path) -> str | None:
    """The ``checkpoint-<step>`` of the highest step in `folder`, or None. Whether it is whole is checked on resuming.
    Raises a `FileNotFoundError` where there is no such folder.
    """
    os.listdir(folder)
    checkpoints = Store(folder).checkpoints()
    return str(checkpoints[-1]) if checkpoints else None


def number_of(path: Path) -> int:
    """The optimizer steps of a checkpoint, by its name."""
    return int(path.name.removeprefix("checkpoint-"))


def _is_dead(path: Path, host: str, pid: int, run: str) -> bool:
    if host == _HOST and pid == os.getpid():
        return run != _RUN
    try:
        if time.time() - path.lstat().st_ctime > _DAY:
            return True
        if host == _HOST:
            os.kill(pid, 0)
    except FileNotFoundError:
        return False  # gone already
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it lives and belongs to someone else
    return False
