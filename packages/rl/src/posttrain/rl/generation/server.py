"""HTTP requests to a generation server."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

RETRIES = 4
"""Times that a request which may be repeated is sent again, after 1, 2, 4 ... seconds."""
BUSY = (500, 502, 503)


class Refused(ConnectionError):
    """The server answered with an error. `code` is its HTTP status."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Server:
    """An HTTP server.

    Args:
        url: such as ``http://host:8000``.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def call(self, path: str, body: dict[str, Any] | None = None, empty: bool = False, retries: int = 0) -> Any:
        """GET `path`, or POST `body` to it; the answer, read as JSON unless it is `empty`.

        Args:
            retries: further attempts while the server is busy or unreachable.

        Raises:
            Refused: the server answers with an error.
            ConnectionError: it cannot be reached.
        """
        for wait in (2**attempt for attempt in range(retries)):
            try:
                return self._call(path, body, empty)
            except ConnectionError as error:
                if getattr(error, "code", BUSY[0]) not in BUSY:
                    raise
                time.sleep(wait)
        return self._call(path, body, empty)

    def _call(self, path: str, body: dict[str, Any] | None, empty: bool) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request) as answer:
                return None if empty else json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            said = error.read()[:500].decode(errors="replace")
            raise Refused(f"The server at {self.url} answered {path} with {error.code}: {said}", error.code) from error
        except urllib.error.URLError as error:
            raise ConnectionError(f"The vLLM server at {self.url} cannot be reached: {error.reason}") from error

    def wait(self, timeout: float) -> None:
        """Wait until it is up, for `timeout` seconds at most."""
        until = time.monotonic() + timeout
        while True:
            try:
                return self.call("/health", empty=True)
            except ConnectionError:
                if time.monotonic() > until:
                    raise
                time.sleep(min(2.0, timeout / 10))

    def has(self, path: str) -> bool:
        """Whether GET `path` is answered."""
        try:
            self.call(path, empty=True)
        except Refused as error:
            if error.code in (404, 405):
                return False
            raise
        return True
