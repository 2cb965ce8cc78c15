"""Keeps the messages of a restarted job apart from those of its earlier starts.

torchrun keeps one store for all starts of a job (torch 2.13; `TORCH_DISABLE_SHARE_RDZV_TCP_STORE` makes it a new one
for each). A process that looks for the address of another one there may find that of a process that is dead, and one
that waits for a message may find that of an earlier start. So the processes of a start agree on a name, under which
they keep their keys.
"""

from __future__ import annotations

import functools
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from posttrain.core.distributed.waits import read

SCHEME = "posttrain-attempt"
_KEY = "posttrain/attempt"


def init_method(environ: Mapping[str, str] = os.environ) -> str | None:
    """The ``init_method`` for the process group of a job that may be restarted with its store; None: torch's own."""
    shares = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not shares or not int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        return None
    _register()
    return f"{SCHEME}://"


@functools.cache
def _register() -> None:
    torch.distributed.register_rendezvous_handler(SCHEME, _meet)


def _meet(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    store, rank, world_size = next(torch.distributed.rendezvous("env://", **options))
    yield torch.distributed.PrefixStore(agreed_name(store, rank, world_size), store), rank, world_size


def agreed_name(store: Any, rank: int, world_size: int, seconds: float = 600) -> str:
    """A name that all processes of this start have, and those of no other start; `store` may hold the keys of earlier
    ones. Rank 0 answers each process with what that one has just made up, so that no answer to an earlier start is
    taken for one, until all have said that they know its name. Raises a `TimeoutError` where some do not come within
    `seconds`.
    """
    own, until = uuid.uuid4().hex, time.monotonic() + seconds
    if rank:
        store.set(f"{_KEY}/hello/{rank}", own)
        while not (answer := read(store, f"{_KEY}/welcome/{rank}")).startswith(own):
            _pause(until, "rank 0")
        name = answer.partition(" ")[2]
        store.set(f"{_KEY}/known/{rank}", name)
        return name
    answered: dict[int, str] = {}
    missing = set(range(1, world_size))
    while missing:
        for other in sorted(missing):
            hello = read(store, f"{_KEY}/hello/{other}")
            if hello and hello != answered.get(other):
                store.set(f"{_KEY}/welcome/{other}", f"{hello} {own}")
                answered[other] = hello
            if read(store, f"{_KEY}/known/{other}") == own:
                missing.discard(other)
        if missing:
            _pause(until, f"ranks {', '.join(map(str, sorted(missing)))}")
    return own


def _pause(until: float, whom: str) -> None:
    if time.monotonic() > until:
        raise TimeoutError(f"The processes of this job could not begin: no word from {whom}. See their own errors.")
    time.sleep(0.01)
