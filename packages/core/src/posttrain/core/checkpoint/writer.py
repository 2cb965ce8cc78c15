"""The background thread that writes checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class AsyncWriter:
    """Runs one job at a time in a thread. The next call raises a job's error.

    The thread is not a daemon: a script that ends while a job runs waits for it.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._result: Any = None

    def submit(self, job: Callable[[], Any]) -> None:
        """Start `job`, after waiting for the one before it.

        Raises:
            Exception: what the job before raised; `job` is not started then.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint-writer")
        self._thread.start()

    def finished(self, result: Any) -> None:
        """Take in the result of a job that needed no thread, for `wait` to return."""
        self.wait()
        self._result = result

    def wait(self) -> Any:
        """Wait until nothing is being written.

        Returns:
            What the last job returned; None if there was none or it was returned before.

        Raises:
            Exception: what the last job raised, once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, result, self._error, self._result = self._error, self._result, None, None
        if error is not None:
            raise error
        return result

    @property
    def busy(self) -> bool:
        """Whether a job is running; submitting another would wait for it."""
        return self._thread is not None and self._thread.is_alive()

    def _run(self, job: Callable[[], Any]) -> None:
        try:
            self._result = job()
        except BaseException as error:
            self._error = error
