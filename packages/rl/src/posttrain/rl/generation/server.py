"""HTTP requests to a server, over connections that are kept."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import queue
import socket
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

RETRIES = 4
"""Times that a request which may be repeated is sent again, after 1, 2, 4 ... seconds."""
BUSY = (408, 429, 500, 502, 503, 504)
CONNECT_SECONDS = 10.0
"""Seconds until a server that does not even accept a connection counts as unreachable."""


class Refused(ConnectionError):
    """The server answered with an error. `code` is its HTTP status."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def is_passing(error: Exception) -> bool:
    """Whether a server may answer yet: it is busy, or cannot be reached."""
    return isinstance(error, ConnectionError) and not (isinstance(error, Refused) and error.code not in BUSY)


class Server:
    """An HTTP server.

    Args:
        url: such as ``http://host:8000``. timeout: seconds within which it must answer a request.
        headers: of every request.
        by_proxy: reach an https address through the proxy that the environment names (``https_proxy``), if any.
        limit: the argument of the user that sets `timeout`, for messages.
    """

    def __init__(
        self,
        url: str,
        timeout: float = 1800.0,
        headers: Mapping[str, str] | None = None,
        by_proxy: bool = False,
        limit: str = "vllm_request_timeout",
    ) -> None:
        self.url, self.timeout, self._limit = url.rstrip("/"), timeout, limit
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a server; write it as http://host:8000")
        self._secure, self._host, self._path = parts.scheme == "https", parts.netloc.rpartition("@")[2], parts.path
        goes_by_proxy = by_proxy and self._secure and not urllib.request.proxy_bypass(parts.hostname)
        self._proxy = urllib.request.getproxies().get("https", "") if goes_by_proxy else ""
        self._kept: queue.LifoQueue[http.client.HTTPConnection] = queue.LifoQueue()

    def call(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        empty: bool = False,
        retries: int = 0,
        before_retry: Callable[[], None] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """GET `path`, or POST `body` to it; the answer, read as JSON unless it is `empty`.

        Args:
            retries: further attempts while the server is busy or unreachable.
            before_retry: called before each of them; what it raises ends the attempts.
            timeout: seconds, instead of the server's.

        Raises:
            Refused: the server answers with an error.
            ConnectionError: it cannot be reached, or does not answer in time.
        """
        for wait in (2**attempt for attempt in range(retries)):
            try:
                return self._call(path, body, empty, timeout)
            except ConnectionError as error:
                if not is_passing(error):
                    raise
                time.sleep(wait)
            if before_retry is not None:
                before_retry()
        return self._call(path, body, empty, timeout)

    def _call(self, path: str, body: dict[str, Any] | None, empty: bool, timeout: float | None) -> Any:
        """Over a connection that is kept, or over a new one if the server has closed that."""
        timeout, data = timeout or self.timeout, None if body is None else json.dumps(body).encode()
        while True:
            connection, is_kept = self._connection(timeout)
            try:
                connection.request("GET" if data is None else "POST", self._path + path, data, self._headers)
                answer = connection.getresponse()
                code, said = answer.status, answer.read()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if is_kept and isinstance(error, (ConnectionResetError, BrokenPipeError)):  # closed meanwhile
                    continue
                why = f"cannot be reached: {str(error) or type(error).__name__}"
                if isinstance(error, TimeoutError):
                    why = f"has not answered {path} within {timeout:g} seconds. If completions take that long, raise "
                    why += f"{self._limit}."
                raise ConnectionError(f"The server at {self.url} {why}") from error
            if answer.will_close:
                connection.close()
            else:
                self._kept.put(connection)
            if code >= 400:
                text = said[:500].decode(errors="replace")
                raise Refused(f"The server at {self.url} answered {path} with {code}: {text}", code)
            return None if empty else json.loads(said or b"null")

    def _connection(self, timeout: float) -> tuple[http.client.HTTPConnection, bool]:
        """(a connection, whether it has been used before)."""
        with contextlib.suppress(queue.Empty):
            connection = self._kept.get_nowait()
            connection.sock.settimeout(timeout)
            return connection, True
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        user, _, between = urllib.parse.urlsplit(self._proxy or f"//{self._host}").netloc.rpartition("@")
        connection = kind(between, timeout=min(CONNECT_SECONDS, timeout))
        if self._proxy:
            secret = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
            connection.set_tunnel(self._host, headers={"Proxy-Authorization": f"Basic {secret}"} if user else {})
        try:
            connection.connect()
        except OSError as error:
            raise ConnectionError(f"The server at {self.url} cannot be reached: {error}") from error
        connection.sock.settimeout(timeout)
        keep_alive(connection.sock)
        return connection, False

    def wait(self, timeout: float) -> None:
        """Wait until it is up, for `timeout` seconds at most."""
        until = time.monotonic() + timeout
        while True:
            try:
                return self.call("/health", empty=True, timeout=CONNECT_SECONDS)
            except ConnectionError as error:
                if time.monotonic() > until:
                    raise ConnectionError(f"{error} (waited {timeout:g} seconds, vllm_server_timeout)") from error
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


def keep_alive(connection: socket.socket) -> None:
    """Notice within two minutes that the machine at the other end is gone, also while it is to answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 6}.items():
        if name in vars(socket):  # not every system has all
            connection.setsockopt(socket.IPPROTO_TCP, vars(socket)[name], value)
