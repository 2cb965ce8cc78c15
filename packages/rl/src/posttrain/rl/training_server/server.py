"""The routes of the training API, the futures behind which its answers are, and the order of a model's requests."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.cli.tools import load
from posttrain.core.checkpoint.store import Store
from posttrain.core.errors import CheckpointError, require
from posttrain.rl.agents.endpoint import body_of, serving
from posttrain.rl.agents.messages import RequestError
from posttrain.rl.training_server import policies, wire
from posttrain.rl.training_server.policies import SAMPLERS, STATES, Base, Policy
from posttrain.rl.training_server.samplers import MOST, Samplers, Worker, read_request

logger = logging.getLogger(__name__)

LONGEST = 64 * 2**20
"""Bytes of a request at most."""
WAIT, GAP, GONE = 25.0, 60.0, 1800.0
"""Seconds that a client waits for an answer before it asks again, that a request waits for those before it (some are
sent side by side), and without a sign of life after which a client's models go where others begin."""
FETCHED = 64
"""Answers that were fetched and are kept, in case that they have to be sent again; of all, `MOST` are."""
FIXED: dict[str, Any] = {"healthz": {"status": "ok"}, "telemetry": {"status": "accepted"}}
FIXED |= {"client/config": {}, "client/dynamic_config": {}}
"""Answers that are always the same: no telemetry is kept, and the settings of the SDK fit as they are."""
LOCAL = ("127.0.0.1", "localhost", "[::1]")


@dataclass
class Run:
    """A LoRA model of a client, and its requests that wait for the one of number `following`."""

    name: str
    session: str
    metadata: Any = None
    policy: Policy | None = None
    following: int = 1
    waiting: dict[int, tuple[Callable[[], Any], Future[Any]]] = field(default_factory=dict)

    @property
    def made(self) -> Policy:
        """The policy; a ValueError where there is none."""
        if self.policy is None:
            raise ValueError("This model could not be made, as its first request was answered. Create another one.")
        return self.policy

    def give_up(self, missing: int) -> None:
        """Refuse what waits for the request of number `missing`, which has not come."""
        if self.following == missing and self.waiting:
            self.following = max(self.waiting) + 1
            why = f"Request {missing} of this model did not come within {GAP:g} seconds, so those behind it fail."
            while self.waiting:
                self.waiting.popitem()[1][1].set_exception(ValueError(why))


class TrainingServer:
    """Serves LoRA models on `base`, with checkpoints in the folder `output`. Clients must send `key` as their API key;
    None: any. If `is_local`, only programs on this machine are answered.
    """

    def __init__(self, base: Base, output: Path, key: str | None = None, is_local: bool = True) -> None:
        self.base, self.output, self.key, self.is_local = base, output, key, is_local
        self.samplers = Samplers(base)
        self.worker = Worker(self.samplers)
        self.ends = tuple(load.ends(base.model, base.tokenizer))
        self._sessions: dict[str, float] = {}  # the last sign of life of each
        self._runs: dict[str, Run] = {}
        self._keys: dict[str, str] = {}  # of each sampler, that of its weights
        self._answers: OrderedDict[str, Future[Any]] = OrderedDict()
        self._fetched: deque[str] = deque()

    def serve(self, host: str, port: int) -> None:
        """Answer until Ctrl-C; an OSError where nothing can listen there."""
        server, listening, address = serving(self.app(), host, port)
        print(f"{self.base.name} is trained at {address} until Ctrl-C. Set TINKER_BASE_URL={address}", flush=True)
        try:
            server.run(sockets=[listening])
        finally:
            self.worker.close()

    def app(self) -> Any:
        """The application of starlette."""
        require("starlette", "posttrain-rl[agents]", "posttrain serve-training")
        from starlette.applications import Starlette
        from starlette.routing import Route

        posts = {
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session}/finish": self._finish,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "load_weights": self._load_weights,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "forward_backward": self._in_turn(lambda run, body: run.made.forward_backward(body["message"])),
            "optim_step": self._in_turn(lambda run, body: run.made.optim_step(body["adam_params"])),
            "save_weights": self._in_turn(lambda run, body: {"path": self._save(run, STATES, body)}),
            "save_weights_for_sampler": self._in_turn(self._save_for_sampler),
        }
        routes = [(name, each, ["POST"]) for name, each in posts.items()]
        routes += [("get_server_capabilities", self._capabilities, ["GET"])]
        routes += [("samplers/{sampler}", self._get_sampler, ["GET"]), ("{path:path}", self._other, ["GET", "POST"])]
        return Starlette(routes=[Route(f"/api/v1/{name}", self._guarded(each), methods=m) for name, each, m in routes])

    def _guarded(self, answer: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        """A route that answers programs with a key alone: a page in a browser cannot send its header to other sites."""
        from starlette.responses import JSONResponse, Response

        async def route(http: Any) -> Any:
            try:
                key, host = http.headers.get("x-api-key", ""), http.headers.get("host", "").rpartition(":")[0]
                if self.is_local and host not in LOCAL:
                    raise RequestError(f"This server answers at {', '.join(LOCAL)} alone, not at {host!r}.", 403)
                if not key or (self.key is not None and not hmac.compare_digest(key.encode(), self.key.encode())):
                    raise RequestError("The X-API-Key is missing or wrong. Set TINKER_API_KEY as at the server.", 401)
                found = await answer(http, _read(http, await body_of(http, LONGEST)))
            except RequestError as error:
                return JSONResponse({"error": str(error), "category": "user"}, error.status)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError, CheckpointError) as error:
                return JSONResponse({"error": f"{http.url.path}: {_why(error)}", "category": "user"}, 400)
            if isinstance(found, Response):
                return found
            return Response(found, media_type=wire.CONTENT_TYPE) if isinstance(found, bytes) else JSONResponse(found)

        return route

    async def _other(self, http: Any, body: Any) -> Any:
        if (name := http.path_params["path"]) not in FIXED:
            raise RequestError(f"{http.method} {name} is not done by this server.", 404)
        return FIXED[name]

    async def _capabilities(self, http: Any, body: Any) -> Any:
        one = {"model_name": self.base.name, "trainable": True, "sampleable": True}
        return {"supported_models": [one | {"max_context_length": self.base.max_length}]}

    # ------------------------------------------------------------------------------------------- sessions and models

    async def _create_session(self, http: Any, body: Any) -> Any:
        session = f"local-{secrets.token_hex(6)}"
        self._sessions[session] = asyncio.get_running_loop().time()
        return {"session_id": session}

    def _session(self, session: str) -> str:
        """The session, which is alive."""
        _known(self._sessions, session, "session", 410)
        self._sessions[session] = asyncio.get_running_loop().time()
        return session

    async def _heartbeat(self, http: Any, body: Any) -> Any:
        self._session(body["session_id"])
        return {}

    async def _finish(self, http: Any, body: Any) -> Any:
        self._drop(self._session(http.path_params["session"]))
        return {}

    def _drop(self, session: str) -> None:
        del self._sessions[session]
        self._runs = {name: run for name, run in self._runs.items() if run.session != session}

    async def _create_model(self, http: Any, body: Any) -> Any:
        lora = dict(body["lora_config"])
        rank, seed, kind = lora.pop("rank"), lora.pop("seed", None), body.get("optimizer_config") or {}

        def work(run: Run) -> Any:
            self._check_base(body)
            if kind.get("type", "adamw") != "adamw":
                raise ValueError(f"optimizer_config: {kind} is not done here; this server has adamw. Leave it out.")
            run.policy = Policy(self.base, self.base.lora(rank, **lora), seed)
            return {"model_id": run.name}

        return self._begin(body, work)

    async def _load_weights(self, http: Any, body: Any) -> Any:
        def work(run: Run, _: Any = None) -> Any:
            self._check_base(body)
            folder = policies.folder_of(self.output, body["path"])
            policy = run.policy or Policy(self.base, policies.config_in(folder, self.base))
            policy.load(folder, bool(body["optimizer"]))
            run.policy = policy
            return {"path": body["path"], "model_id": run.name}

        if body.get("model_id") is None:
            return self._begin(body, work)
        return await self._in_turn(work)(http, body)

    def _check_base(self, body: Any) -> None:
        if (name := body.get("base_model")) not in (None, self.base.name):
            raise ValueError(f"base_model={name!r} is not served here; this server has {self.base.name!r}.")

    def _begin(self, body: Any, work: Callable[[Run], Any]) -> Any:
        """Begin a model by its first work, once: a request that comes again gets the same answer."""
        name = f"{self._session(body['session_id'])}:train:{int(body['model_seq_id'])}"
        if name not in self._runs:
            now = asyncio.get_running_loop().time()
            for session in [one for one, seen in self._sessions.items() if now - seen > GONE]:
                self._drop(session)
            run = self._runs[name] = Run(name, body["session_id"], body.get("user_metadata"))
            self._keep(f"{name}:0", self.worker.do(lambda: work(run), Future()))
        return {"request_id": f"{name}:0", "model_id": name}

    async def _get_info(self, http: Any, body: Any) -> Any:
        policy = _known(self._runs, body["model_id"], "model").made
        about = {"model_name": self.base.name, "arch": self.base.model.config.model_type}
        return {"model_id": body["model_id"], "model_data": about, "is_lora": True, "lora_rank": policy.config.r}

    def _in_turn(self, work: Callable[[Run, Any], Any]) -> Callable[[Any, Any], Awaitable[Any]]:
        """A route that does `work` with a model, behind that of its requests with lower numbers."""

        async def route(http: Any, body: Any) -> Any:
            run: Run = _known(self._runs, body["model_id"], "model")
            self._session(run.session)
            last = max([run.following - 1, *run.waiting])
            number = last + 1 if body.get("seq_id") is None else int(body["seq_id"])
            answer = {"request_id": f"{run.name}:{number}", "model_id": run.name}
            if answer["request_id"] in self._answers:  # it was sent again
                return answer
            if number < run.following:
                raise ValueError(f"request {number} of {run.name} was answered, and the next is {run.following}")
            future: Future[Any] = Future()
            self._keep(answer["request_id"], future)
            run.waiting[number] = (lambda: work(run, body)), future
            while run.following in run.waiting:
                self.worker.do(*run.waiting.pop(run.following))
                run.following += 1
            if run.waiting:
                asyncio.get_running_loop().call_later(GAP, run.give_up, run.following)
            return answer

        return route

    def _save_for_sampler(self, run: Run, body: Any) -> Any:
        if body.get("path") is not None:
            return {"path": self._save(run, SAMPLERS, body)}
        sampler = f"{run.session}:sample:{int(body['sampling_session_seq_id'])}"
        self.samplers.keep(sampler, run.made.config, run.made.model)
        self._keys[sampler] = sampler
        return {"sampling_session_id": sampler}

    def _save(self, run: Run, kind: str, body: Any) -> str:
        """Save `run` under the name in `body`; the path."""
        path = f"tinker://{run.name}/{kind}/{body.get('path')}"
        folder = policies.folder_of(self.output, path)
        if Store(folder).checkpoints() and not body.get("overwrite"):
            raise ValueError(f"{path} is there already. Give another name, or save_state(overwrite=True).")
        metadata = {**(run.metadata or {}), **(body.get("user_metadata") or {})}
        about = {"model_id": run.name, "base_model": self.base.name, "user_metadata": metadata}
        run.made.save(folder, about, with_optimizer=kind == STATES)
        return path

    # ----------------------------------------------------------------------------------------------------- sampling

    async def _create_sampler(self, http: Any, body: Any) -> Any:
        sampler = f"{self._session(body['session_id'])}:sample:{int(body['sampling_session_seq_id'])}"
        self._check_base(body)
        if (path := body.get("model_path")) is not None:
            folder = policies.folder_of(self.output, path)
            await asyncio.wrap_future(self.worker.do(lambda: self.samplers.load(sampler, folder), Future()))
        self._keys[sampler] = Samplers.BASE if path is None else sampler
        return {"sampling_session_id": sampler}

    async def _get_sampler(self, http: Any, body: Any) -> Any:
        _known(self._keys, sampler := http.path_params["sampler"], "sampler")
        return {"sampler_id": sampler, "base_model": self.base.name}

    async def _sample(self, http: Any, body: Any) -> Any:
        key, name = _known(self._keys, body["sampling_session_id"], "sampler"), "{sampling_session_id}:{seq_id}"
        name, request = name.format(**body), read_request(self.base, self.ends, body)
        if name not in self._answers:
            if sum(not future.done() for future in self._answers.values()) >= MOST:
                raise RequestError(f"{MOST} requests wait already. Send this one again later.", 429)
            self._keep(name, request.answer)
            self.worker.sample(key, request)
        return {"request_id": name, "sample_sequence_ids": [f"{name}:{i}" for i in range(len(request.seeds))]}

    # ------------------------------------------------------------------------------------------------------ answers

    def _keep(self, name: str, answer: Future[Any]) -> None:
        self._answers[name] = answer
        if len(self._answers) > MOST:
            for old in [one for one, future in self._answers.items() if future.done()][: len(self._answers) - MOST]:
                del self._answers[old]

    async def _retrieve(self, http: Any, body: Any) -> Any:
        from starlette.responses import JSONResponse

        future = _known(self._answers, name := body["request_id"], "answer")
        waiting = asyncio.wrap_future(future)
        waiting.add_done_callback(asyncio.Future.exception)  # else asyncio logs it, where no one waits any more
        await asyncio.wait({waiting}, timeout=WAIT)
        if not future.done():
            return JSONResponse({"type": "try_again", "request_id": name, "queue_state": "active"}, 408)
        if name not in self._fetched:
            self._fetched.append(name)
        while len(self._fetched) > FETCHED:
            self._answers.pop(self._fetched.popleft(), None)
        error = future.exception()
        if error is None:
            return future.result()
        is_users = isinstance(error, (ValueError, TypeError, KeyError, CheckpointError))
        if not is_users:
            logger.error("%s failed.", name, exc_info=error)
        return {"error": f"{type(error).__name__}: {_why(error)}", "category": "user" if is_users else "server"}


def _known(table: Mapping[str, Any], name: str, what: str, status: int = 404) -> Any:
    """The entry `name` of a table; a RequestError where there is none."""
    if name not in table:
        why = "the server was started anew, or it was not used for long. Begin a new session, and load a saved state"
        raise RequestError(f"There is no {what} {name!r} here (any more): {why}.", status)
    return table[name]


def _read(http: Any, body: bytes) -> dict[str, Any]:
    """The body of a request; a ValueError where it cannot be read."""
    if http.headers.get("content-type", "").partition(";")[0] == wire.CONTENT_TYPE:
        message = wire.ForwardBackward(body)
        return {"model_id": message.model_id, "seq_id": message.seq_id or None, "message": message}
    found = json.loads(body or b"{}")
    if not isinstance(found, dict):
        raise ValueError("its body is no object of JSON")
    return found


def _why(error: BaseException) -> str:
    """What is wrong with a request, where reading it raised `error`."""
    if not isinstance(error, KeyError):
        return str(error)
    return f"the request lacks {error}. Send it as tinker 0.38 does, with types.AdamParams as optimizer parameters."
