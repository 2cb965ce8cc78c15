"""Runs the user's code of a rollout in a process of its own: reward functions, tools, environments and agents.

Their Python then holds up neither training nor sampling, and code that needs a main thread works: alarms, and objects
that only the thread which made them may use. In that process, plain functions run in the main thread, one at a time,
and async ones side by side on one event loop. Functions and classes are sent with dill, also those of a script or a
notebook; state that modules have here is not sent. The process sees no GPU, and ends with this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import io
import itertools
import os
import pickle
import random
import re
import socket
import subprocess
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import numpy as np

from posttrain.rl.rewards import background

#: Seconds beyond its time limit that a call may take to be interrupted before its process is ended.
GRACE = 5.0
#: Arguments of reward functions that are functions of the trainer.
RECORDERS = ("log_metric", "log_extra")


class RemoteError(Exception):
    """The traceback of an error in the rollout process, as the cause of that error here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class RolloutProcess:
    """The process, begun at its first call, and again after it ended. `seed` is of the random numbers of Python and
    NumPy in it. A call of a reward function is interrupted after `timeout` seconds, or its process is ended.
    """

    def __init__(self, seed: int, timeout: float | None) -> None:
        self.seed, self.timeout = seed, timeout
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._kept: dict[int, bytes] = {}
        self._kinds: dict[tuple[str, str], type] = {}
        self._worker: _Worker | None = None

    def reward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which runs in the process within `timeout` seconds."""
        return self.function(function, self.timeout, RECORDERS)

    def tool(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which runs in the process."""
        return function if is_remote(function) else self.function(function, None)

    def function(
        self, function: Callable[..., Any], timeout: float | None, asked: Sequence[str] = ()
    ) -> Callable[..., Any]:
        """`function`, which runs in the process within `timeout` seconds; None: no limit. Its keyword arguments `asked`
        are functions of this process: where it calls them they run here, plain ones in the thread that reads from the
        process, and async ones on the event loop.
        """
        key = self._keep(function, f"The function {background.name_of(function)!r}")
        is_async = background.is_async(function)

        def ask(*given: Any) -> Future[Any]:
            return self._current().call(key, None, given, timeout, is_async, asked)

        return _remote(function, ask, is_async)

    def factory(self, make: Callable[[], Any]) -> Callable[[], Any]:
        """A factory of stand-ins for environments that `make` makes in the process: they have the methods of the
        environment's class, and other attributes are read from the environment.
        """
        key = self._keep(make, f"The environment factory {background.name_of(make)!r}")

        def make_remote() -> Any:
            worker = self._current()
            number = next(self._numbers)
            sent = worker.ask("make", key, number, not isinstance(make, type)).result()
            return self._kind(make if isinstance(make, type) else sent)(worker, number)

        return make_remote

    def close(self) -> None:
        """End the process; a later call begins another."""
        with self._lock:
            if self._worker is not None:
                self._worker.end("the trainer has closed it")

    def _keep(self, value: Any, what: str) -> int:
        key = next(self._numbers)
        self._kept[key] = _dumps(value, what)
        with self._lock:
            if self._worker is not None and not self._worker.ended:
                self._worker.ask("keep", key, self._kept[key]).result()
        return key

    def _current(self) -> _Worker:
        with self._lock:
            if self._worker is None or self._worker.ended:
                self._worker = worker = _Worker()
                weakref.finalize(self, worker.end, "the trainer is gone")
                worker.ask("begin", sys.path, self.seed)
                for key, value in self._kept.items():
                    worker.ask("keep", key, value).result()
            return self._worker

    def _kind(self, of: type) -> type:
        """The class of stand-ins for environments of one class: one, however often that class was sent."""
        name = (of.__module__, of.__qualname__)
        if name not in self._kinds:
            methods = {
                method: _remote_method(function)
                for method, function in inspect.getmembers(of, inspect.isfunction)
                if not method.startswith("_")
            }
            self._kinds[name] = type(of.__name__, (RemoteEnvironment,), methods)
        return self._kinds[name]


class RemoteEnvironment:
    """Stands for an environment in the rollout process; where it is sent there, it is that environment."""

    def __init__(self, worker: _Worker, number: int) -> None:
        self._worker, self._number = worker, number

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} in the rollout process: {name!r} is private")
        return self._worker.ask("read", self._number, name).result()

    def __reduce__(self) -> Any:
        return _kept, (self._number,)


def is_remote(function: Callable[..., Any]) -> bool:
    """Whether `function` runs in the rollout process."""
    return getattr(function, "is_remote", False)


def _remote(function: Callable[..., Any], ask: Callable[..., Future[Any]], is_async: bool) -> Callable[..., Any]:
    """A function with the name, signature and docstring of one of the user, which runs in the rollout process."""
    made = functools.wraps(function)(_asking(ask, is_async))
    made.__name__ = background.name_of(function)  # which partial functions and objects do not have
    vars(made)["is_remote"] = True
    return made


def _remote_method(function: Callable[..., Any]) -> Callable[..., Any]:
    name, is_async = function.__name__, inspect.iscoroutinefunction(function)

    def ask(given: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        environment, *args = given
        worker: _Worker = environment._worker
        return worker.call(environment._number, name, (args, kwargs), is_async=is_async)

    return _remote(function, ask, is_async)


class _Worker:
    """One process, from this side: requests go out with a number, and a thread reads the answers."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        program = f"from posttrain.rl.rewards.process import serve; serve({theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,  # Ctrl-C is for the trainer, which ends it
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._waiting: dict[int, tuple[Future[Any], Mapping[str, Any]]] = {}
        self.ended: str | None = None
        threading.Thread(target=self._read, name="posttrain-rollout-process", daemon=True).start()

    def ask(
        self, operation: str, *given: Any, is_async: bool = False, functions: Mapping[str, Any] | None = None
    ) -> Future[Any]:
        """The answer to a request: 8 bytes of a number, a byte that is 1 for an async call, and the pickled rest."""
        answer: Future[Any] = Future()
        with self._lock:
            if self.ended:
                raise ChildProcessError(self._gone())
            number = next(self._numbers)
            body = _dumps((operation, given), "What the rollout process is asked")
            answer.set_running_or_notify_cancel()
            self._waiting[number] = answer, functions or {}
            with contextlib.suppress(OSError):  # the thread that reads says why
                self._connection.send_bytes(number.to_bytes(8) + bytes([is_async]) + body)
        return answer

    def call(
        self,
        key: int,
        method: str | None,
        given: Any,
        timeout: float | None = None,
        is_async: bool = False,
        asked: Sequence[str] = (),
    ) -> Future[Any]:
        """What the kept object, or its `method`, returns; after `timeout` and `GRACE`, the process is ended."""
        args, kwargs = given
        functions = {name: kwargs[name] for name in asked if name in kwargs}
        sent = {name: value for name, value in kwargs.items() if name not in functions}
        kinds = {name: background.is_async(function) for name, function in functions.items()}
        answer = self.ask("call", key, method, args, sent, kinds, timeout, is_async=is_async, functions=functions)
        if timeout is not None:
            late = {answer: TimeoutError(background.too_long(timeout))}
            timer = threading.Timer(timeout + GRACE, self.end, ("a call in it could not be interrupted", late))
            timer.daemon = True
            timer.start()
            answer.add_done_callback(lambda _: timer.cancel())
        return answer

    def end(self, why: str, errors: Mapping[Future[Any], Exception] | None = None) -> None:
        with self._lock:
            self.ended = self.ended or why
            waiting, self._waiting = self._waiting, {}
        self._process.kill()
        self._process.wait()
        for answer, _ in waiting.values():
            answer.set_exception((errors or {}).get(answer) or ChildProcessError(self._gone()))

    def _gone(self) -> str:
        return (
            f"The process of reward functions, tools, environments and agents is gone: {self.ended}. Environments that "
            "were in it are lost."
        )

    def _read(self) -> None:
        try:
            while True:
                reply = self._connection.recv_bytes()
                number, asks = int.from_bytes(reply[:8]), reply[8]
                if asks:
                    self._asked(number, reply[9:])
                    continue
                with self._lock:
                    answer, _ = self._waiting.pop(number, (Future(), {}))
                background.fulfil(answer, functools.partial(_read_reply, reply[9:]))
        except (EOFError, OSError):
            code = self._process.wait()
            self.end(f"it ended with exit code {code}{' (killed by a signal)' if code < 0 else ''}")

    def _asked(self, call: int, question: bytes) -> None:
        """Call a function of that call for the process, and send what it returns. `question`: 8 bytes of a number, and
        pickled its name and arguments.
        """
        answer: Future[Any] = Future()
        try:
            name, args, kwargs = pickle.loads(question[8:])
            with self._lock:
                _, functions = self._waiting.get(call, (None, {}))
            if name not in functions:
                raise RuntimeError(f"{name}() was called after the call that it is for had ended")
            value = functions[name](*args, **kwargs)
            if inspect.iscoroutine(value):
                answer = asyncio.run_coroutine_threadsafe(value, background.event_loop())
            else:
                answer.set_result(value)
        except Exception as error:
            answer.set_exception(error)
        answer.add_done_callback(functools.partial(self._tell, int.from_bytes(question[:8])))

    def _tell(self, question: int, answer: Future[Any]) -> None:
        error = RuntimeError("no one waits for it any more") if answer.cancelled() else answer.exception()
        value = answer.result() if error is None else _sendable(error)[0]
        with contextlib.suppress(ChildProcessError):  # no one waits for it any more
            self.ask("answer", question, error is None, value, is_async=True)


def _read_reply(reply: bytes) -> Any:
    succeeded, value = pickle.loads(reply)
    if not succeeded:
        error, there = value
        raise error from RemoteError(there)
    return value


class _Pickler(pickle.Pickler):
    """Sends functions and classes that no import finds there, those of a script among them, as their code."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, (types.FunctionType, type)):
            return NotImplemented
        if value.__module__ not in ("__main__", "__mp_main__") and "<" not in value.__qualname__:
            return NotImplemented
        import dill

        file = io.BytesIO()
        pickler = dill.Pickler(file, recurse=True)
        pickler.reducer_override = _by_name
        pickler.dump(value)
        return dill.loads, (file.getvalue(),)


def _by_name(value: Any) -> Any:
    """Reduces a module to its name; dill sends all that a module of the user holds."""
    is_imported = isinstance(value, types.ModuleType) and value.__name__ != "__main__"
    return (importlib.import_module, (value.__name__,)) if is_imported else NotImplemented


INSIDE = "Make what it holds (connections, locks, models) inside of it at the first call"


def _dumps(value: Any, what: str, instead: str = INSIDE, way: str = "to") -> bytes:
    file = io.BytesIO()
    try:
        _Pickler(file).dump(value)
    except Exception as error:
        why = re.sub(r"^(\[\d+\])+", "", unsendable(value, lambda part: _Pickler(io.BytesIO()).dump(part)))
        raise TypeError(
            f"{what} cannot be sent {way} the rollout process: {why}. {instead}, or set rollout_process=False."
        ) from error
    return file.getvalue()


def unsendable(value: Any, dump: Callable[[Any], Any], name: str = "", within: tuple[int, ...] = ()) -> str:
    """Which part of `value` cannot be written by `dump`, and why; an empty text where it writes all of it. `name` is
    that of `value`, and `within` the `id` of what holds it.
    """
    try:
        dump(value)
    except Exception as error:
        parts: Any = ()
        if isinstance(value, Mapping):
            parts = ((f"{name}[{key!r}]", part) for key, part in value.items())
        elif isinstance(value, (list, tuple)):
            parts = ((f"{name}[{place}]", part) for place, part in enumerate(value))
        elif not isinstance(value, (type, types.FunctionType, types.ModuleType)):
            parts = ((f"{name}.{key}", part) for key, part in getattr(value, "__dict__", {}).items())
        within = (*within, id(value))
        found = (unsendable(part, dump, where, within) for where, part in parts if id(part) not in within)
        why = f"{name} is of the class {type(value).__qualname__}: " if name else ""
        return next(filter(None, found), f"{why}{type(error).__name__}: {error}".rstrip("."))
    return ""


# ------------------------------------------------------------------------------------------------- in the process

_objects: dict[int, Any] = {}
_questions: dict[int, Future[Any]] = {}
"""What functions of the trainer are asked, by numbers."""


def _kept(key: int) -> Any:
    return _objects[key]


def serve(file: int) -> None:
    """Answer the requests of the trainer that began this process, until it closes the connection."""
    connection, numbers = Connection(file), itertools.count()
    waiting: SimpleQueue[bytes] = SimpleQueue()
    said: SimpleQueue[bytes] = SimpleQueue()  # a thread sends it, which no time limit interrupts

    def ask(call: bytes, *question: Any) -> Future[Any]:
        body, number, answer = _dumps(question, "What the trainer is asked"), next(numbers), Future[Any]()
        answer.set_running_or_notify_cancel()  # its answer comes also where a time limit has ended the wait
        _questions[number] = answer
        said.put(call + b"\1" + number.to_bytes(8) + body)
        return answer

    def answer(message: bytes) -> None:
        try:
            operation, given = pickle.loads(message[9:])
            if operation == "call":
                value = _call(functools.partial(ask, message[:8]), *given)
            else:
                value = _OPERATIONS[operation](*given)
            reply = _dumps((True, value), "A result", "Return numbers, texts, lists and dicts", "from")
        except BaseException as error:
            reply = _dumps((False, _sendable(error)), "An error")
        said.put(message[:8] + b"\0" + reply)

    def read() -> None:
        while True:
            try:
                message = connection.recv_bytes()
            except (EOFError, OSError):
                os._exit(0)  # the trainer has ended, however busy this process is
            if message[8]:
                threading.Thread(target=answer, args=(message,), daemon=True).start()
            else:
                waiting.put(message)

    def write() -> None:
        while True:
            connection.send_bytes(said.get())

    for work in (read, write):
        threading.Thread(target=work, name=f"posttrain-{work.__name__}", daemon=True).start()
    while True:
        answer(waiting.get())


def _call(
    ask: Callable[..., Future[Any]],
    key: int,
    method: str | None,
    args: Any,
    kwargs: Any,
    asked: dict[str, bool],
    timeout: float | None,
) -> Any:
    function = _objects[key] if method is None else getattr(_objects[key], method)
    functions = {name: _asking(functools.partial(ask, name), is_async) for name, is_async in asked.items()}
    return background.call(functools.partial(function, *args, **kwargs, **functions), timeout)


def _asking(ask: Callable[..., Future[Any]], is_async: bool) -> Callable[..., Any]:
    """A function that has the other process call one of its own."""

    async def awaited(*args: Any, **kwargs: Any) -> Any:
        return await asyncio.wrap_future(ask(args, kwargs))

    return awaited if is_async else lambda *args, **kwargs: ask(args, kwargs).result()


def _sendable(error: BaseException) -> tuple[BaseException, str]:
    """An error with its traceback as text; as a RuntimeError where it cannot be sent."""
    text = "".join(traceback.format_exception(error)).rstrip()
    try:
        pickle.loads(_dumps(error, "An error"))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    if not isinstance(error, Exception):  # SystemExit and the like would end the trainer
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return error.with_traceback(None), text


def _begin(path: list[str], seed: int) -> None:
    sys.path[:] = path
    random.seed(seed)
    np.random.seed(seed)


def _keep(key: int, value: bytes) -> None:
    _objects[key] = pickle.loads(value)


def _answer(question: int, succeeded: bool, value: Any) -> None:
    answer = _questions.pop(question)
    answer.set_result(value) if succeeded else answer.set_exception(value)


def _make(factory: int, key: int, wants_class: bool) -> type | None:
    _objects[key] = _objects[factory]()
    return type(_objects[key]) if wants_class else None


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "begin": _begin,
    "answer": _answer,
    "keep": _keep,
    "make": _make,
    "read": lambda key, name: getattr(_objects[key], name),
}
