"""``posttrain launch --ray``: the processes of a run, and an engine that samples, as actors of a Ray cluster."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from typing import Any, NamedTuple

from posttrain.core.errors import ConfigError, require

PAUSE = 1.0
"""Seconds before an engine that has ended is started again."""
LAST_WORDS = 30.0
"""Seconds that a process gets to end after it was asked to."""


VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ONEAPI_DEVICE_SELECTOR")
"""The variables by which Ray gives GPUs to an actor."""


class Place(NamedTuple):
    """Where an actor is: `gpus` are its GPUs, by the variable of `VISIBLE` that names them."""

    node: str
    port: int
    gpus: dict[str, str] = {}


class Host:
    """A process on some machine of the cluster. Ray runs it as an actor with two threads."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def place(self) -> Place:
        """This machine, a port that is free there, and the GPUs that Ray lets this actor see."""
        import ray

        with socket.socket() as one:
            one.bind(("", 0))
            seen = {name: os.environ[name] for name in VISIBLE if os.environ.get(name)}
            return Place(ray.util.get_node_ip_address(), one.getsockname()[1], seen)

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


def run(
    words: list[str],
    num_processes: int,
    environment: dict[str, str],
    use_cpu: bool,
    engine: str | None,
    engine_gpus: int = 1,
    timeout: float = 600.0,
) -> int:
    """Run `words` in `num_processes` processes; the exit status of the first that failed, or 0. Raises a `ConfigError`
    where the cluster had no room for them in time.

    Args:
        words: the command of each process. environment: its variables, beside those that connect the processes.
        engine: a command that runs as long as they do. engine_gpus: the GPUs of one machine that it gets.
        timeout: seconds until the cluster has room for all of them.
    """
    ray = require("ray", "ray", "posttrain launch --ray")
    require("ray.util.scheduling_strategies", "ray", "posttrain launch --ray")
    ray.init(address=os.environ.get("RAY_ADDRESS"), ignore_reinit_error=True)
    bundles = [{"CPU": 1.0} if use_cpu else {"CPU": 1.0, "GPU": 1.0}] * num_processes
    has_engine_bundle = engine is not None and not use_cpu and engine_gpus > 0
    bundles += [{"GPU": float(engine_gpus)}] if has_engine_bundle else []
    group = ray.util.placement_group(bundles, strategy="PACK")  # all of them or none
    if not ray.wait([group.ready()], timeout=timeout)[0]:
        has = {name: ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU")}
        ray.util.remove_placement_group(group)
        ray.shutdown()
        problem = f"the Ray cluster had no room for {bundles} within {timeout:g} seconds; it has {has} in all"
        raise ConfigError("launch", [f"{problem}. Start fewer processes (-n), or wait longer (ray_timeout)"])

    def start(place: int | None, **resources: float) -> Any:
        options: dict[str, Any] = {"max_concurrency": 2, **resources}
        if place is not None:
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            options["scheduling_strategy"] = strategy(group, placement_group_bundle_index=place)
        return ray.remote(Host).options(**options).remote()

    hosts = [start(i, num_cpus=1, num_gpus=0 if use_cpu else 1) for i in range(num_processes)]
    place, gpus = (num_processes, engine_gpus) if has_engine_bundle else (None, 0)
    engines = [] if engine is None else [start(place, num_cpus=0, num_gpus=gpus)]
    try:
        found = ray.get([host.place.remote() for host in hosts], timeout=timeout)
        nodes = [place.node for place in found]
        # Ranks of one machine follow one another, as torchrun numbers them.
        order = sorted(range(num_processes), key=lambda i: nodes.index(nodes[i]))
        hosts, places = [hosts[i] for i in order], [found[i] for i in order]
        for one in engines:
            one.keep_running.remote(shlex.split(engine or ""), environment)
        variables = variables_of(places)
        waiting = [host.run.remote(words, environment | mine) for host, mine in zip(hosts, variables, strict=True)]
        return first_failure(ray, waiting)
    finally:
        ray.wait([one.stop.remote() for one in [*hosts, *engines]], num_returns=len(hosts) + len(engines), timeout=60)
        ray.util.remove_placement_group(group)
        ray.shutdown()


def variables_of(places: list[Place]) -> list[dict[str, str]]:
    """What torch reads, for each of the processes at `places`.

    Each sees the GPUs of all processes on its machine, as under torchrun: LOCAL_RANK is the number of its own.
    """
    address, port, _ = places[0]
    nodes = [place.node for place in places]
    gpus: dict[str, dict[str, str]] = {}
    for place in places:
        ours = gpus.setdefault(place.node, {})
        for name, number in place.gpus.items():
            ours[name] = f"{ours[name]},{number.rpartition(':')[2]}" if name in ours else number
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "LOCAL_RANK": str(nodes[:rank].count(node)),
            "LOCAL_WORLD_SIZE": str(nodes.count(node)),
            **gpus[node],
        }
        for rank, node in enumerate(nodes)
    ]


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
