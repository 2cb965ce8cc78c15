"""Kills processes of a job under torchrun at random moments, and judges from its ledger what it has read.

    python -m tests.distributed.elastic --kills 30 [--seed 0] [--machines 2 --losses 2]

With one machine, a process of four is killed again and again, and torchrun starts all four again. With two machines
(two agents of torchrun on this one, two processes each), one machine is lost as a whole: the other one goes on alone,
and with both when a new one has come.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.programs import ROOT, environment

ROWS, GLOBAL_BATCH = 50, 8
STANDALONE = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "job")
PATIENCE = 120.0  # seconds without progress after which a job has failed


class Job:
    """Agents of torchrun with the job of `tests.distributed.elastic_job`, and what its processes have noted."""

    def __init__(self, folder: Path, steps: int, dropout: float = 0.1, pace: float = 0.05) -> None:
        self.folder = folder
        self.words = [str(folder), json.dumps({"steps": steps, "dropout": dropout, "pace": pace})]
        self.agents: list[subprocess.Popen] = []
        self.log = open(folder / "log.txt", "ab")

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        for one in self.processes():
            _kill(one["pid"])
        for agent in self.agents:
            agent.kill()
            agent.wait()
        self.log.close()

    def start(self, processes: int, *flags: str) -> subprocess.Popen:
        """One more agent, with so many processes."""
        command = [sys.executable, "-m", "tests.distributed.elastic_job", *self.words]
        command += ["--nproc_per_node", str(processes), *flags]
        # On several machines each start needs a store of its own: torch 2.13 does not tell a new machine of the first.
        apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if "--nnodes" in flags else {}
        env = environment(**apart)
        self.agents.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=self.log, stderr=self.log))
        return self.agents[-1]

    def processes(self) -> list[dict[str, Any]]:
        """What each process that has been started so far has noted: {"pid", "agent", "world", "attempt", ...}."""
        found = []
        for path in sorted((self.folder / "ledger").glob("*.jsonl")):
            lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            one: dict[str, Any] = {"name": path.name, "attempt": None, "start": None, "steps": []}
            for line in lines:
                if "step" in line:
                    one["attempt"] = line["attempt"]
                    one["steps"].append((line["step"], line["rows"]))
                else:
                    one |= line
            found += [one] * bool(lines)
        return found

    def until(self, true: Callable[[], Any]) -> Any:
        """Wait until `true()` is, for as long as the ledger grows."""
        size, since = -1, time.monotonic()
        while not (found := true()):
            now = sum(path.stat().st_size for path in (self.folder / "ledger").glob("*"))
            size, since = (now, time.monotonic()) if now != size else (size, since)
            ended = [agent.returncode for agent in self.agents if agent.poll() not in (None, 0, -signal.SIGKILL)]
            if ended or time.monotonic() - since > PATIENCE:
                how = f"an agent ended with {ended[0]}" if ended else f"no progress for {PATIENCE:g} s"
                raise RuntimeError(f"{how}: {(self.folder / 'log.txt').read_text()[-4000:]}")
            time.sleep(0.02)
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        return torch.load(self.folder / "weights.pt")


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def undisturbed(folder: Path, steps: int, dropout: float) -> Job:
    """The same run, of which nothing is killed."""
    folder.mkdir(parents=True)
    with Job(folder, steps, dropout, pace=0.0) as job:
        assert job.start(4, *STANDALONE).wait(300) == 0, (folder / "log.txt").read_text()[-4000:]
    return job


def kill_processes(folder: Path, steps: int, kills: int, draw: random.Random) -> tuple[Job, list[str]]:
    """A job of four processes of which one is killed `kills` times; the moments at which, in words."""
    folder.mkdir(parents=True)
    moments = []
    with Job(folder, steps) as job:
        agent = job.start(4, *STANDALONE, "--max-restarts", str(kills), "--monitor-interval", "0.1")
        old: set[str] = set()
        for _ in range(kills):
            started = job.until(lambda known=frozenset(old): _of_one_start(job, known, 4))
            names = {one["name"] for one in started}
            if draw.random() < 0.2:
                time.sleep(draw.uniform(0, 1))  # while it starts
            else:
                ahead = draw.randint(1, 6)
                job.until(lambda some=names, n=ahead: _have_done(job, some, n) or agent.poll() is not None)
                time.sleep(draw.uniform(0, 0.15))
            if agent.poll() is not None:
                break
            victim = draw.choice([one for one in job.processes() if one["name"] in names])
            done = victim["steps"][-1][0] if victim["steps"] else None
            moments.append("as it started" if victim["start"] is None else f"in step {done or victim['start'] + 1}")
            _kill(victim["pid"])
            old |= names
        job.until(lambda: agent.poll() is not None)
        assert agent.returncode == 0, (folder / "log.txt").read_text()[-4000:]
    return job, moments


def _of_one_start(job: Job, known: frozenset[str], world: int) -> list[dict[str, Any]]:
    """The processes that are not `known`, once `world` of them are there."""
    found = [one for one in job.processes() if one["name"] not in known]
    return found if len(found) == world else []


def _have_done(job: Job, names: set[str], steps: int) -> bool:
    return any(len(one["steps"]) >= steps for one in job.processes() if one["name"] in names)


def lose_machines(folder: Path, steps: int, losses: int, draw: random.Random) -> tuple[Job, list[str]]:
    """A job on two machines of which the second is lost `losses` times, and comes back after some steps."""
    folder.mkdir(parents=True)
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    meeting = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{store.port}"]
    conf = "is_host=false,last_call_timeout=15,keep_alive_interval=3,keep_alive_max_attempt=5"
    meeting += ["--rdzv-id", "job", "--rdzv-conf", conf, "--max-restarts", "100", "--monitor-interval", "0.1"]
    moments = []
    with Job(folder, steps, dropout=0.0, pace=0.2) as job:

        def trains(world: int, after: int, more: int) -> bool:
            """Whether `world` processes that were started after the first `after` have done `more` steps each."""
            found = [one for one in job.processes()[after:] if one["world"] == world and len(one["steps"]) >= more]
            return len(found) >= world

        agents = [job.start(2, *meeting), job.start(2, *meeting)]
        for _ in range(losses):
            before = max(len(job.processes()) - 4, 0)
            more = draw.randint(2, 5)
            job.until(lambda n=before, more=more: trains(4, n, more))
            of_agent = [one for one in job.processes()[-4:] if one["agent"] == agents[1].pid]
            moments.append(f"in step {of_agent[0]['steps'][-1][0]}")
            before, more = len(job.processes()), draw.randint(2, 5)
            for pid in (agents[1].pid, *(one["pid"] for one in of_agent)):
                _kill(pid)
            job.until(lambda n=before, more=more: trains(2, n, more))
            before = len(job.processes())
            agents[1] = job.start(2, *meeting)
            job.until(lambda n=before: trains(4, n, 1))
        job.until(lambda: agents[0].poll() is not None)
        assert agents[0].returncode == 0, (folder / "log.txt").read_text()[-4000:]
    return job, moments


def history(job: Job) -> dict[int, list[int]]:
    """The rows of each step that counts: that of the last attempt which made it. Sorted, for they are dealt to several
    processes.
    """
    attempts: dict[int, dict[int, list[int]]] = {}
    for one in job.processes():
        for step, rows in one["steps"]:
            attempts.setdefault(one["attempt"], {}).setdefault(step, []).extend(rows)
    steps: dict[int, list[int]] = {}
    for attempt in sorted(attempts):
        first = min(attempts[attempt])
        steps = {step: rows for step, rows in steps.items() if step < first}  # what was lost since the checkpoint
        steps |= {step: sorted(rows) for step, rows in attempts[attempt].items()}
    return steps


def judged(job: Job, expected: Job, steps: int) -> dict[str, Any]:
    """What is to hold of a disturbed run beside an undisturbed one, in numbers."""
    found, reference = history(job), history(expected)
    each = -(-ROWS // GLOBAL_BATCH)  # steps of an epoch
    epochs = [range(first, first + each) for first in range(1, steps + 1, each) if first + each - 1 <= steps]
    once = [Counter(row for step in epoch for row in found.get(step, ())) == Counter(range(ROWS)) for epoch in epochs]
    mine, other = job.weights(), expected.weights()
    gap = max(float((mine[name] - other[name]).abs().max()) for name in other)
    worlds = Counter(one["world"] for one in job.processes())
    return {
        "steps": list(found) == list(range(1, steps + 1)),
        "rows of each step as undisturbed": found == reference,
        "epochs with each row once": f"{sum(once)} of {len(epochs)}",
        "largest gap of the weights": gap,
        "processes started": dict(worlds),
        "steps made again": sum(len({s for s, _ in one["steps"]}) for one in job.processes()) / 4 - steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--machines", type=int, default=1, choices=(1, 2))
    parser.add_argument("--losses", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    draw, folder = random.Random(asked.seed), Path(tempfile.mkdtemp())
    steps, began = asked.steps or (140 if asked.machines == 1 else 80), time.monotonic()
    if asked.machines == 1:
        job, moments = kill_processes(folder / "killed", steps, asked.kills, draw)
    else:
        job, moments = lose_machines(folder / "killed", steps, asked.losses, draw)
    whole = undisturbed(folder / "whole", steps, dropout=0.1 if asked.machines == 1 else 0.0)
    print(f"{len(moments)} kills in {time.monotonic() - began:.0f} s: {', '.join(moments)}")
    for name, value in judged(job, whole, steps).items():
        print(f"  {name}: {value}")
    print(f"  folder: {folder}")


if __name__ == "__main__":
    main()
