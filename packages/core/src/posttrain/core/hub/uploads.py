"""Uploads to the Hugging Face Hub in the background, without blocking or stopping a run.

huggingface_hub's own background uploads (``run_as_future``) keep the order too, but retry nothing, do not let a newer
checkpoint replace one that waits, and at the program's end wait without limit for a server that stays silent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import shlex
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.config import Help, opt
from posttrain.core.errors import warn
from posttrain.core.fields.redaction import redact, shown

logger = logging.getLogger(__name__)

STRATEGIES = ("end", "every_save", "checkpoint", "all_checkpoints")
#: Files of a checkpoint that only a resumed run reads.
RESUME_FILES = ("optimizer*", "scheduler*", "rank-*", "manifest.json", "trainer_state.json")
#: Seconds to wait before the second, third, ... attempt of an upload.
RETRY_WAITS = (1.0, 4.0, 16.0)
#: Seconds that the end of a run waits for uploads, which do not end by themselves where a server stays silent.
FINISH_TIMEOUT = 3600.0
# Refusals that may pass: timeout, conflict, another commit came first, locked, too early, too many requests.
_MAY_PASS = {408, 409, 412, 423, 425, 429}
_REPO_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[\w.-]{1,96}", re.ASCII)


def is_repo_id(name: str) -> bool:
    """Whether `name` can be that of a repository: ``name`` or ``owner/name``."""
    return _REPO_ID.fullmatch(name) is not None and not re.search(r"--|\.\.|\.git$|(^|/)[.-]|[.-]$", name)


@dataclass
class HubArguments:
    """Whether, when and where to upload on the Hugging Face Hub."""

    push_to_hub: bool = opt(False, "Upload the model while and after training; a failing upload never stops the run.")
    # Not `opt`: the token stays out of the repr.
    hub_token: str | None = dataclasses.field(
        default=None,
        repr=False,
        metadata={
            "help": Help("Token to upload with; None: HF_TOKEN, or that of `hf auth login`."),
            "aliases": ["--push_to_hub_token"],
        },
    )
    hub_model_id: str | None = opt(
        None,
        "Repository to upload to, with or without its owner; None: the name of `output_dir`, in your account.",
        aliases=("push_to_hub_model_id",),
    )
    hub_strategy: str = opt(
        "every_save",
        "What to upload: the model at the end; the model at every save too; that and the newest checkpoint, to "
        "resume from, as last-checkpoint; that and every checkpoint in a separate folder.",
        choices=STRATEGIES,
    )
    hub_private_repo: bool | None = opt(
        None, "Whether a new repository is private; None: as in its owner's settings.", flag=True
    )
    hub_always_push: bool = opt(False, "Upload every save; otherwise a newer save replaces one that is still waiting.")
    hub_revision: str | None = opt(None, "Branch to upload to, made where it does not exist; None: main.")

    @classmethod
    def accept_old_names(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        """``push_to_hub_organization``, which becomes the owner in `hub_model_id`."""
        if (owner := kwargs.get("push_to_hub_organization")) is None:
            return kwargs
        rest = {name: value for name, value in kwargs.items() if name != "push_to_hub_organization"}
        name = rest.pop("push_to_hub_model_id", None) or rest.pop("hub_model_id", None)
        model_id = f"{owner}/{name or Path(rest.get('output_dir') or 'trainer_output').name}"
        warn(f"{cls.__name__}: push_to_hub_organization={owner!r} is now hub_model_id={model_id!r}", FutureWarning)
        return rest | {"hub_model_id": model_id}

    def _problems(self) -> Iterator[str]:
        name = self.hub_model_id
        if isinstance(name, str) and not is_repo_id(name):
            given = shown("hub_model_id", name)
            problem = f"hub_model_id={given} is not the name of a repository; write 'name' or 'owner/name'"
            if self.push_to_hub:
                yield problem
            else:  # often a default that nothing reads
                warn(f"{type(self).__name__}: {problem} before you upload")


def missing_token(args: HubArguments) -> str | None:
    """A warning if push_to_hub is set and there is no token; else None."""
    if not args.push_to_hub or args.hub_token is not None:
        return None
    from huggingface_hub import get_token

    if get_token():
        return None
    return (
        "push_to_hub=True needs a token, and there is none, so nothing will be uploaded. Set HF_TOKEN, run `hf auth "
        "login`, or pass hub_token. Training continues, and its results are in output_dir."
    )


def jobs(
    strategy: str, checkpoint: str | Path | None, output_dir: str | Path, at_end: bool = False
) -> list[tuple[Path, str, tuple[str, ...]]]:
    """The uploads of `strategy` as (folder, path in the repository, patterns of excluded files).

    Args:
        checkpoint: the checkpoint that was just committed, or None.
        output_dir: the folder that holds the final model.
        at_end: training is over and the model is in `output_dir`.
    """
    found: list[tuple[Path, str, tuple[str, ...]]] = []
    if at_end:
        # run.json and the page made of it describe this machine, which is private.
        found.append((Path(output_dir), "", (*RESUME_FILES, "run.json", "report.html", "checkpoint-*", ".*", "_*")))
    elif checkpoint is not None and strategy != "end":
        # A checkpoint has no model card, at most a template by PEFT.
        found.append((Path(checkpoint), "", (*RESUME_FILES, "README.md")))
    if checkpoint is not None and strategy in ("checkpoint", "all_checkpoints"):
        name = "last-checkpoint" if strategy == "checkpoint" else Path(checkpoint).name
        found.append((Path(checkpoint), name, ()))
    return found


@dataclass(eq=False)
class Upload:
    """One upload of a folder to a path in the repository. At most one of `url`, `error` and `replaced` is set."""

    folder: Path
    path_in_repo: str
    message: str
    ignore: tuple[str, ...] = ()
    revision: str | None = None
    token: str | None = dataclasses.field(default=None, repr=False)
    private: bool | None = None
    #: Of the commit, once it is made.
    url: str | None = None
    #: Why it was given up.
    error: str | None = None
    #: A newer one for the same place took its turn.
    replaced: bool = False
    done: threading.Event = dataclasses.field(default_factory=threading.Event, repr=False)

    @property
    def place(self) -> tuple[str, str | None]:
        return self.path_in_repo, self.revision

    def command(self, repo_id: str) -> str:
        """The shell command that makes up for this upload."""
        words = ["hf", "upload", repo_id, str(self.folder), self.path_in_repo or "."]
        words += ["--revision", self.revision] if self.revision else []
        words += ["--private"] if self.private else []
        words += ["--delete", "*"] if self.path_in_repo else []
        return shlex.join([*words, *(word for pattern in self.ignore for word in ("--exclude", pattern))])


#: Every `Uploader` that was asked to upload: a command, which has no trainer, ends with another status if one failed.
USED: list[Uploader] = []


class Uploader:
    """Uploads folders one after another in a background thread, with retries if the Hub does not answer.

    The constructor uses no network. The repository is created with the first upload. Errors of the Hub, the network or
    the token are never raised: a failure is logged once and stored in `failed`.

    Args:
        args: has the fields of `HubArguments`; read at each push.
        output_dir: its name is the repository's if ``args.hub_model_id`` is None.
        retry_waits: seconds before the second, third, ... attempt.
    """

    def __init__(self, args: Any, output_dir: str | Path, retry_waits: Sequence[float] = RETRY_WAITS) -> None:
        self.args, self.output_dir, self.retry_waits = args, Path(output_dir), tuple(retry_waits)
        self.repo_id: str | None = None
        self._branches: set[str] = set()
        self._queue: deque[Upload] = deque()
        self._current: Upload | None = None
        self._failed: dict[tuple[str, str | None], Upload] = {}
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    @property
    def repo_name(self) -> str:
        """The repository's full id once it is created, until then the requested name."""
        folder = re.sub(r"[^A-Za-z0-9_.]+|\.{2,}", "-", self.output_dir.absolute().name)[:96].strip("-.")
        return self.repo_id or self.args.hub_model_id or folder or "model"

    @property
    def failed(self) -> list[Upload]:
        """Failed uploads: the newest one of each path in the repository."""
        with self._changed:
            return list(self._failed.values())

    @property
    def in_use(self) -> list[Path]:
        """Folders that are being uploaded or wait for it, which must not be deleted yet."""
        with self._changed:
            return [one.folder for one in self._pending()]

    def create_repo(self, token: str | None = None, private: bool | None = None) -> str:
        """Create the repository unless it exists, and return its id ``owner/name``. The one call here that raises."""
        if self.repo_id is None:
            from huggingface_hub import HfApi

            private = self.args.hub_private_repo if private is None else private
            api = HfApi(token=token or self.args.hub_token)
            self.repo_id = api.create_repo(self.repo_name, private=private, exist_ok=True).repo_id
        return self.repo_id

    def push(
        self,
        folder: str | Path,
        path_in_repo: str = "",
        message: str = "Upload",
        ignore: Iterable[str] = (),
        blocking: bool = False,
        *,
        revision: str | None = None,
        token: str | None = None,
        private: bool | None = None,
    ) -> Upload:
        """Upload the files of `folder`, which must not change until then (see `in_use`).

        Args:
            path_in_repo: the target; a folder below the root becomes an exact copy, the root keeps its other files.
            message: of the commit.
            ignore: patterns of files to leave out, as `fnmatch` reads them.
            blocking: wait for it, at most `FINISH_TIMEOUT` seconds.
            revision, token, private: instead of those in the arguments.

        Returns:
            The upload: its `url` or `error` is set once ``upload.done`` is.
        """
        args = self.args
        revision, token = revision or args.hub_revision, token or args.hub_token
        private = args.hub_private_repo if private is None else private
        upload = Upload(Path(folder), path_in_repo, message, tuple(ignore), revision, token, private)
        if self not in USED:
            USED.append(self)
        with self._changed:
            for older in [one for one in self._queue if one.place == upload.place and not args.hub_always_push]:
                self._queue.remove(older)
                older.replaced = True
                older.done.set()
            self._queue.append(upload)
            if self._thread is None:
                # A daemon, so that a server that does not answer cannot block the end of the program.
                self._thread = threading.Thread(target=self._work, name="posttrain-upload", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        if blocking:
            upload.done.wait(FINISH_TIMEOUT)
        return upload

    def finish(self, timeout: float | None = FINISH_TIMEOUT) -> bool:
        """Wait until all uploads have ended, at most `timeout` seconds; True if everything is on the Hub.

        Pending uploads then count as failed; they continue in the background while the program runs.
        """
        with self._changed:
            if self._thread is not None:
                logger.info("Waiting for %d upload(s) to %s.", len(self._pending()), self.repo_name)
            self._changed.wait_for(lambda: self._thread is None, timeout)
            for late in self._pending():
                self._fail(late, f"it had not ended after {timeout:g} s")
            return not self._failed

    def _pending(self) -> list[Upload]:
        return [*([self._current] if self._current else []), *self._queue]

    def _work(self) -> None:
        while True:
            with self._changed:
                self._current = upload = self._queue.popleft() if self._queue else None
                if upload is None:
                    self._thread = None
                    self._changed.notify_all()
                    return
            self._attempt(upload)
            upload.done.set()

    def _attempt(self, upload: Upload) -> None:
        for attempt, wait in enumerate((*self.retry_waits, None), start=1):
            try:
                url = self._send(upload)
            except BaseException as error:  # a panic of the transfer library, written in Rust, is no Exception
                reason = _reason(error, upload.token)
                if wait is None or not _may_pass(error):
                    with self._changed:
                        self._fail(upload, reason if attempt == 1 else f"{reason} (attempt {attempt})")
                    return
                logger.info("Uploading %s failed (%s); trying again in %g s.", upload.folder, reason, wait)
            else:
                with self._changed:
                    upload.url, upload.error = url, None
                    if self._failed.get(upload.place) not in self._queue:  # else it is a newer one, whose turn comes
                        self._failed.pop(upload.place, None)
                return
            with self._changed:
                if self._changed.wait_for(lambda: self._is_outdated(upload), wait):
                    upload.replaced = True
                    return

    def _is_outdated(self, upload: Upload) -> bool:
        return not self.args.hub_always_push and any(one.place == upload.place for one in self._queue)

    def _fail(self, upload: Upload, reason: str) -> None:
        upload.error = reason
        self._failed[upload.place] = upload
        logger.warning(
            f"{upload.folder} was not uploaded to {self.repo_name}: {reason.rstrip('.')}. The run is not affected, and "
            f"the files are on this machine. To upload them later: {upload.command(self.repo_name)}"
        )

    def _send(self, upload: Upload) -> str:
        from huggingface_hub import HfApi

        repo_id, api = self.create_repo(upload.token, upload.private), HfApi(token=upload.token)
        branch = upload.revision
        if branch and not branch.startswith("refs/") and branch not in self._branches:
            api.create_branch(repo_id, branch=branch, exist_ok=True)
            self._branches.add(branch)
        with _without_progress_bars():
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=upload.folder,
                path_in_repo=upload.path_in_repo,
                commit_message=upload.message,
                revision=branch,
                ignore_patterns=list(upload.ignore),
                # Extra files of an earlier checkpoint, such as the states of more processes, must be deleted.
                delete_patterns="*" if upload.path_in_repo else None,
            )
        return str(commit.commit_url)


def _may_pass(error: BaseException) -> bool:
    """Whether a retry can help: the network or the Hub failed, instead of rejecting this upload."""
    from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status >= 500 or status in _MAY_PASS
    hopeless = (OfflineModeIsEnabled, LocalTokenNotFoundError, FileNotFoundError, ImportError, ValueError, TypeError)
    return not isinstance(error, hopeless)


def _reason(error: BaseException, token: str | None) -> str:
    return redact(" ".join(str(error).split()), token)[:500] or type(error).__name__


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """The Hub's display moves the cursor about, in the middle of the bar of the training."""
    from huggingface_hub import utils

    shown = not utils.are_progress_bars_disabled()
    if shown:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            utils.enable_progress_bars()
