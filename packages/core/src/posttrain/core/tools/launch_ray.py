"""``posttrain launch --ray``: the processes of a run, and an engine that samples, as actors of a Ray cluster."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from posttrain.core.errors import require

PAUSE = 1.0
"""Seconds before an engine that has ended is started again."""
LAST_WORDS = 30.0
"""Seconds that a process gets to end after it was asked to."""


class Host:
    """A process on some machine of the cluster. Ray runs it as an actor with two threads."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def place(self) -> tuple[str, int]:
        """(the address of this machine, a port that is free there)."""
        import ray

        with socket.socket() as one:
            one.bind(("", 0))
            return ray.util.get_node_ip_address(), one.getsockname()[1]

    def run(self, words: list[str], environment: dict[str, str]) -> int:
        """Run a command to its end; its exit status, 128 and the signal's number if one has ended it."""
        self._process = subprocess.Popen(words, env=os.environ | environment)
        if self._is_stopped:
            self.stop()
        status = self._process.wait()
        return status if status >= 0 else 128 - status

    def keep_running(self, words: list[str], environment: dict[str, str]) -> int:
        """Run a command, again whenever it ends, until `stop`; how often it was started again."""
        starts = 0
        while not self._is_stopped:
            starts += 1
            status = self.run(words, environment)
            if not self._is_stopped:
                print(f"posttrain launch: the engine has ended ({status}) and is started again", flush=True)
                time.sleep(PAUSE)
        return starts - 1

    def stop(self) -> None:
        """End the command: by SIGTERM, and later by SIGKILL."""
        self._is_stopped = True
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(LAST_WORDS)
        except subprocess.TimeoutExpired:
            self._process.kill()


def run(words: list[str], num_processes: int, environment: dict[str, str], use_cpu: bool, engine: str | None) -> int:
    """Run `words` in `num_processes` processes; the exit status of the first that failed, or 0.

    Args:
        words: the command of each process. environment: its variables, beside those that connect the processes.
        engine: a command that runs as long as they do.
    """
    ray = require("ray", "ray", "posttrain launch --ray")
    ray.init(address=os.environ.get("RAY_ADDRESS"), ignore_reinit_error=True)
    resources = {"num_cpus": 1} if use_cpu else {"num_cpus": 1, "num_gpus": 1}
    actor = ray.remote(Host).options(max_concurrency=2, **resources)
    hosts = [actor.remote() for _ in range(num_processes)]
    engines = [] if engine is None else [ray.remote(Host).options(max_concurrency=2, num_cpus=0).remote()]
    try:
        places = ray.get([host.place.remote() for host in hosts])
        for one in engines:
            one.keep_running.remote(shlex.split(engine or ""), environment)
        variables = variables_of(places, use_cpu)
        waiting = [host.run.remote(words, environment | mine) for host, mine in zip(hosts, variables, strict=True)]
        return first_failure(ray, waiting)
    finally:
        ray.wait([one.stop.remote() for one in [*hosts, *engines]], num_returns=len(hosts) + len(engines), timeout=60)
        ray.shutdown()


def variables_of(places: list[tuple[str, int]], use_cpu: bool) -> list[dict[str, str]]:
    """What torch reads, for each of the processes at `places`. On GPUs, Ray lets each see its own alone."""
    address, port = places[0]
    nodes = [node for node, _ in places]
    return [
        {
            "RANK": str(rank), "WORLD_SIZE": str(len(places)), "MASTER_ADDR": address, "MASTER_PORT": str(port),
            "LOCAL_RANK": str(nodes[:rank].count(node)) if use_cpu else "0",
            "LOCAL_WORLD_SIZE": str(nodes.count(node)) if use_cpu else "1",
        }
        for rank, node in enumerate(nodes)
    ]  # fmt: skip


def first_failure(ray: Any, waiting: list[Any]) -> int:
    """The exit status of the first process that fails, as soon as it does; 0 when all have ended well."""
    while waiting:
        done, waiting = ray.wait(waiting)
        try:
            status = ray.get(done[0])
        except ray.exceptions.RayError as error:  # its machine is gone
            print(f"posttrain launch: a process was lost: {error}", file=sys.stderr, flush=True)
            return 1
        if status:
            return status
    return 0


def command(words: list[str]) -> list[str]:
    """The command of a process, for `words` in the order of ``torch.distributed.run``."""
    if words[0] == "--no-python":
        return words[1:]
    return [sys.executable, *(["-m", *words[1:]] if words[0] == "--module" else words)]
