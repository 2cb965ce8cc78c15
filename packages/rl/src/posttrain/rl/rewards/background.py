"""Runs user code in threads and on one event loop, with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from functools import cache, partial
from typing import Any

logger = logging.getLogger(__name__)

#: Seconds after which a call of the user's code is named in the log: all of the run waits for it.
SLOW = 60.0


def keep_device() -> Callable[[], None]:
    """What a new thread must call to compute on the device of this one: by itself it begins on the first."""
    torch = sys.modules.get("torch")  # a process of rewards has none, and begins faster
    if torch is None:
        return lambda: None
    from posttrain.core.data import accelerator

    if (kind := accelerator.gpu()) is None or not accelerator.module(kind).is_initialized():
        return lambda: None
    return partial(torch.accelerator.set_device_index, torch.accelerator.current_device_index())


def event_loop() -> asyncio.AbstractEventLoop:
    """The program's one event loop, in its own thread, so that open connections survive from call to call."""
    with _MAKING_LOOP:  # rollouts that overlap ask for it at the same time
        return _event_loop()


_MAKING_LOOP = threading.Lock()


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # of one task, which asyncio lets end the loop
                loop.run_forever()

    thread = threading.Thread(target=run, name="posttrain-async", daemon=True)
    thread.start()

    def watch() -> None:
        while True:
            time.sleep(SLOW)
            name_holder(loop, thread)

    threading.Thread(target=watch, name="posttrain-watch", daemon=True).start()
    return loop


def name_holder(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Warn where a function holds the event loop of `thread` for `SLOW` seconds: not even a time limit ends it then."""
    answered = threading.Event()
    loop.call_soon_threadsafe(answered.set)
    if answered.wait(SLOW):
        return
    logger.warning(
        "An async function has not awaited anything for %g seconds: no other goes on, and no time limit ends it. Await "
        "what takes long, make it a plain function, or set rollout_process=True, where it is interrupted. It is here:"
        "\n%s",
        SLOW,
        "".join(traceback.format_stack(sys._current_frames()[thread.ident or 0])[-4:]),
    )
    answered.wait()


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def name_of(function: Any) -> str:
    """The name of a function of the user in the log and in errors."""
    while isinstance(function, partial) and "__name__" not in vars(function):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def call(function: Callable[[], Any], timeout: float | None = None, what: str = "", remedy: str = "") -> Any:
    """``function()``, awaited where it is async. Raises TimeoutError after so many seconds: in the main thread, the
    function is interrupted; elsewhere it keeps running, and its result is dropped. For `what` and `remedy` see
    `naming_slow`; "": it is not named.
    """
    with naming_slow(what, remedy) if what else contextlib.nullcontext():
        if timeout is None:
            result = function()
        elif threading.current_thread() is threading.main_thread() and sys.platform != "win32":
            with interrupted_after(timeout):  # in another thread, functions that set alarms themselves would fail
                result = function()
        else:
            done = in_thread(function)
            if not wait({done}, timeout).done:
                raise TimeoutError(too_long(timeout))
            result = done.result()
        return wait_for(result, timeout) if inspect.isawaitable(result) else result


@contextlib.contextmanager
def naming_slow(what: str, remedy: str) -> Iterator[None]:
    """Warns, where the work in this context takes longer than `SLOW` seconds, that `what` does, and of the `remedy`."""
    timer = threading.Timer(SLOW, logger.warning, ("%s has been running for %g seconds. %s", what, SLOW, remedy))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in this context, which must be in the main thread, once it has taken so long."""
    is_running = True

    def stop(*_: Any) -> None:
        if is_running:
            raise TimeoutError(too_long(seconds))

    before = signal.signal(signal.SIGURG, stop)  # which nothing else uses, and which is ignored where none is set
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.main_thread().ident, signal.SIGURG))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        is_running = False
        timer.cancel()
        signal.signal(signal.SIGURG, before or signal.SIG_DFL)


def too_long(seconds: float) -> str:
    return f"no answer after {seconds:g} seconds"


def wait_for(awaitable: Any, timeout: float | None = None) -> Any:
    """The result of a coroutine, run on `event_loop`."""

    async def run() -> Any:
        try:
            async with asyncio.timeout(timeout) as limit:
                return await outcome(awaitable)
        except TimeoutError as error:
            if timeout is None or not limit.expired():  # the user's own
                raise
            raise TimeoutError(too_long(timeout)) from error

    return asyncio.run_coroutine_threadsafe(run(), event_loop()).result()


async def outcome(awaitable: Awaitable[Any]) -> Any:
    """What the user's code gives on `event_loop`, which a ``sys.exit()`` would end, and not the program. Raises
    RuntimeError where it called that, or was cancelled, itself or what it awaited, while no one has cancelled this.
    """

    async def own() -> Any:
        try:
            return await awaitable
        except SystemExit as error:
            raise RuntimeError(f"it called sys.exit({'' if error.code is None else repr(error.code)})") from error

    try:
        return await asyncio.create_task(own())  # it may cancel its task
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        raise RuntimeError("it cancelled itself, or what it awaited") from error


def in_thread(function: Callable[[], Any]) -> Future[Any]:
    """The result of ``function()`` in a thread of its own, which the program does not wait for when it ends."""
    done: Future[Any] = Future()
    done.set_running_or_notify_cancel()  # who waits may stop to, and the function goes on
    on_device = keep_device()

    def work() -> None:
        on_device()
        fulfil(done, function)

    threading.Thread(target=work, name="posttrain-call", daemon=True).start()
    return done


def fulfil(future: Future[Any], call: Callable[[], Any]) -> None:
    """Let `future` have the result of ``call()``, or its error, which is raised where the result is read."""
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


async def awaited(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a plain function returns, whose thread waits beside any number of others, and not this one."""
    return await asyncio.wrap_future(in_thread(partial(function, *args, **kwargs)))


def begin(coroutines: list[Coroutine[Any, Any, Any]]) -> Future[list[Any]]:
    """The results of coroutines that run side by side on `event_loop`; where one has failed, the others end too."""

    async def run() -> list[Any]:
        tasks = [asyncio.ensure_future(one) for one in coroutines]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    return asyncio.run_coroutine_threadsafe(run(), event_loop())
