"""An endpoint over HTTP at which agents ask the policy, as they ask OpenAI's or Anthropic's API.

Each trajectory has a base URL and a key of its own, so that what an agent asks is recorded where it belongs. starlette
and uvicorn serve it, on the program's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from posttrain.core.errors import require
from posttrain.rl.agents.anthropic_api import COUNT, MESSAGES
from posttrain.rl.agents.messages import API, Event, Reply, Request, RequestError
from posttrain.rl.agents.openai_api import CHAT, COMPLETIONS, RESPONSES
from posttrain.rl.rewards import background

logger = logging.getLogger(__name__)

PATHS = {"chat/completions": CHAT, "completions": COMPLETIONS, "responses": RESPONSES, "messages": MESSAGES}
PATHS |= {"messages/count_tokens": COUNT}
PLACE = re.compile(r"(?:/t/([^/]+))?/v1/(.+)")
"""Where requests are sent: the name of a trajectory, and a path. Clients that take host and port alone have its key."""
MODEL = "policy"
"""The name of the policy in the list of models. Requests may name any."""
KEPT = 8
"""The last answers of a trajectory that may be asked for again."""
RETRIES = "x-stainless-retry-count"
"""The header in which the SDKs of OpenAI and Anthropic say how often they have sent a request before."""
MOST_FILES = 65536
"""Open files and connections of a process."""
ANY_ADDRESS = ("0.0.0.0", "::", "")
"""Hosts of a server that listens at all addresses of its machine; no client can call at these."""
IDLE = 3600
"""Seconds that a connection is kept between two requests of an agent: one that is closed as a request comes is an error
there, and uvicorn's 5 seconds are over while a tool runs, or while this process has much to do.
"""
GONE = 499
"""The status of a request whose client has closed the connection, as nginx has it."""


@dataclass
class Access:
    """The way of one trajectory to the policy: `url` without a version, as Anthropic's clients take it; OpenAI's with
    ``/v1``. So many of its requests are being answered as `running` says; `given` are the last answers, by what was
    asked: clients ask again where an answer did not reach them.
    """

    url: str
    key: str
    reply: Callable[[Request], Awaitable[Reply]]
    running: int = 0
    given: dict[int, Reply] = field(default_factory=dict)


class Endpoint:
    """Serves the trajectories that are open.

    Args:
        host: the address to listen at. Programs on other machines, or in containers, reach no ``127.0.0.1``.
        max_requests: of a trajectory that are answered at a time; others get the status 429 and may come again.
        max_bytes: of a request; larger ones get 413.
    """

    def __init__(self, host: str = "127.0.0.1", max_requests: int = 256, max_bytes: int = 32 * 2**20) -> None:
        self.host, self.max_requests, self.max_bytes = host, max_requests, max_bytes
        self._open: dict[str, Access] = {}  # by key
        self._server: Any = None
        self._address = ""

    def open(self, reply: Callable[[Request], Awaitable[Reply]]) -> Access:
        """A way to the policy for a trajectory whose requests are answered by `reply`."""
        if self._server is None:
            self._server, listening, self._address = serving(self.app(), self.host)
            asyncio.run_coroutine_threadsafe(self._server.serve(sockets=[listening]), background.event_loop())
        key = f"sk-posttrain-{secrets.token_urlsafe(24)}"
        access = Access(f"{self._address}/t/{secrets.token_hex(8)}", key, reply)
        self._open[key] = access
        return access

    def shut(self, access: Access) -> None:
        """End the way of a trajectory that is over."""
        self._open.pop(access.key, None)

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.should_exit = True
        self._server = None

    def app(self) -> Any:
        """The application, as ASGI has it: of two routes, which need no router."""
        require("starlette", "posttrain-rl[agents]", "agents that speak HTTP")
        from starlette.requests import Request as Http
        from starlette.responses import Response

        async def app(scope: Any, receive: Any, send: Any) -> None:
            found = PLACE.fullmatch(scope["path"])
            if found is None or scope["method"] not in ("GET", "POST"):
                response = Response("Not Found", 404)
            else:
                name, path = found.groups()
                http, answer = Http(scope, receive), self._models if scope["method"] == "GET" else self._answer
                response = await answer(http, name, path)
            await response(scope, receive, send)

        return app

    # ------------------------------------------------------------------------------------------------ one request

    async def _models(self, http: Any, name: str | None, path: str) -> Any:
        from starlette.responses import JSONResponse

        kind, _, asked = path.partition("/")
        try:
            self._access(http, name)
            if kind != "models":
                raise RequestError(f"There is no GET of /v1/{path} here; there is that of models.", 404, "not_found")
        except RequestError as error:
            return _refusal(CHAT, error)
        model = {"id": asked or MODEL, "object": "model", "created": 0, "owned_by": "posttrain"}
        return JSONResponse(model if asked else {"object": "list", "data": [model]})

    async def _answer(self, http: Any, name: str | None, path: str) -> Any:
        from starlette.responses import JSONResponse, Response

        api = PATHS.get(path, CHAT)
        try:
            access = self._access(http, name)
            if path not in PATHS:
                raise RequestError(f"There is no /v1/{path} here; there are {', '.join(PATHS)}.", 404, "not_found")
            body = await body_of(http, self.max_bytes)
            request = _request(api, body)
            reply = await self._reply(http, access, request, hash((path, body)))
        except RequestError as error:
            return _refusal(api, error)
        except Exception as error:  # which ends the trajectory too, see `Recorder.error`
            return _refusal(api, RequestError(f"{type(error).__name__}: {error}", 500))
        if reply is None:
            return Response(status_code=GONE)
        if request.stream:
            return Response(_sent(api.events(request, reply)), media_type="text/event-stream")
        return JSONResponse(api.answer(request, reply))

    def _access(self, http: Any, name: str | None) -> Access:
        """The trajectory that a request is of."""
        key = http.headers.get("x-api-key") or http.headers.get("authorization", "").rpartition(" ")[2]
        access = self._open.get(key)
        if access is None:
            raise RequestError(
                "This key is of no trajectory that goes on. Send the key of its environment (OPENAI_API_KEY).", 401
            )
        own = access.url.rpartition("/")[2]
        if name not in (own, None):
            raise RequestError("This key is of another trajectory than this URL.", 403)
        return access

    async def _reply(self, http: Any, access: Access, request: Request, key: int) -> Reply | None:
        """The reply; None where the agent has hung up, whose place in the engine is then free."""
        if key in access.given and http.headers.get(RETRIES, "0") != "0":
            return access.given[key]
        if access.running >= self.max_requests:
            what = f"{access.running} requests of this trajectory are being answered, and no more are taken."
            raise RequestError(what, 429, "rate_limit_exceeded", 1)
        access.running += 1
        answering, leaving = asyncio.ensure_future(access.reply(request)), asyncio.ensure_future(_left(http))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return None
            access.given = dict([*access.given.items()][1 - KEPT :]) | {key: answering.result()}
            return answering.result()
        finally:
            access.running -= 1
            answering.cancel()
            leaving.cancel()


def allow_connections() -> None:
    """Let this process and those that it starts have as many connections as an administrator allows, at most
    `MOST_FILES`: often it is 1,024, and an episode takes several.
    """
    if os.name == "posix":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def serving(app: Any, host: str, port: int = 0, backlog: int = 1024) -> tuple[Any, socket.socket, str]:
    """(a server of uvicorn for `app`, its socket, where clients can connect by now, its address); port 0: any."""
    uvicorn = require("uvicorn", "posttrain-rl[agents]", "a server over HTTP")
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(kind, socket.SOCK_STREAM)
    if os.name == "posix":  # elsewhere it would let two programs listen at one port
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((host, port))
    listening.listen(backlog)
    host = _of_this_machine(kind) if host in ANY_ADDRESS else host
    name = f"[{host}]" if kind is socket.AF_INET6 else host
    plain: dict[str, Any] = {"log_config": None, "access_log": False, "lifespan": "off", "ws": "none"}
    config = uvicorn.Config(app, **plain, proxy_headers=False, timeout_keep_alive=IDLE)
    return uvicorn.Server(config), listening, f"http://{name}:{listening.getsockname()[1]}"


def _of_this_machine(kind: socket.AddressFamily) -> str:
    """The address of this machine in its network, or that of itself where it has none. Sends nothing."""
    outside, itself = ("2001:db8::1", "::1") if kind is socket.AF_INET6 else ("192.0.2.1", "127.0.0.1")
    with contextlib.suppress(OSError), socket.socket(kind, socket.SOCK_DGRAM) as way:
        way.connect((outside, 9))
        return str(way.getsockname()[0])
    return itself


async def body_of(http: Any, most: int) -> bytes:
    """The body of a request; a RequestError where it has more than `most` bytes."""
    found = bytearray()
    async for chunk in http.stream():
        found += chunk
        if len(found) > most:
            raise RequestError(f"The request has more than {most} bytes.", 413)
    return bytes(found)


async def _left(http: Any) -> None:
    """Return when the other side has hung up."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _request(api: API, body: bytes) -> Request:
    try:
        document = json.loads(body)
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode()  # else no answer could repeat it
        return api.read(document)
    except RequestError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RequestError(f"The request cannot be read: {type(error).__name__}: {error}") from error


def _refusal(api: API, error: RequestError) -> Any:
    from starlette.responses import JSONResponse

    headers = None if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return JSONResponse(api.error(str(error), error.status, error.code), error.status, headers)


def _sent(events: Iterator[Event]) -> str:
    """Events as server-sent ones, all at once: a stream would take a thread for each."""
    texts = ((name, data if isinstance(data, str) else json.dumps(data)) for name, data in events)
    return "".join(f"{'' if name is None else f'event: {name}{chr(10)}'}data: {text}\n\n" for name, text in texts)
