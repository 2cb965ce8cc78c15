"""Runs user code in threads and on one event loop, with a time limit."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Any

import torch


def keep_device() -> Callable[[], None]:
    """What a new thread must call to compute on the device of this one: by itself it begins on the first."""
    if not torch.cuda.is_initialized():
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The program's one event loop, in its own thread, so that open connections survive from call to call."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="posttrain-async", daemon=True).start()
    return loop


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def call(function: Callable[[], Any], timeout: float | None = None) -> Any:
    """``function()``, awaited where it is async.

    Args:
        timeout: seconds. A function that takes longer keeps running in its thread, and its result is dropped.

    Raises:
        TimeoutError: after `timeout`.
    """
    result = call_with_limit(function, timeout) if timeout is not None else function()
    return wait_for(result, timeout) if inspect.isawaitable(result) else result


def wait_for(awaitable: Any, timeout: float | None = None) -> Any:
    """The result of a coroutine, run on `event_loop`."""

    async def run() -> Any:
        return await asyncio.wait_for(awaitable, timeout)

    return asyncio.run_coroutine_threadsafe(run(), event_loop()).result()


def call_with_limit(function: Callable[[], Any], timeout: float) -> Any:
    """``function()`` in a thread that the program does not wait for when it ends."""
    results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
    on_device = keep_device()

    def work() -> None:
        try:
            on_device()
            results.put((function(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=work, name="posttrain-call", daemon=True).start()
    try:
        result, error = results.get(timeout=timeout)
    except Empty:
        raise TimeoutError(f"no answer after {timeout:g} seconds") from None
    if error is not None:
        raise error
    return result


def gather(coroutines: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results of coroutines that run side by side on `event_loop`."""

    async def run() -> list[Any]:
        return await asyncio.gather(*coroutines)

    return asyncio.run_coroutine_threadsafe(run(), event_loop()).result()
