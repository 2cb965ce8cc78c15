"""Kills a process of an online run at random moments, again and again, and audits what the ledger says.

    python -m tests.rl.online.kills                                                # 50 kills of each
    python -m tests.rl.online.kills --victims server trainer --times 10 --bound 0
    .venv-vllm/bin/python -m tests.rl.online.kills --victims server --times 5 --vllm     # vLLM itself

A run is a trainer, a server that writes completions, a process that the reward function asks, and one that holds the
environments. The victim is killed with SIGKILL at a random moment, then started again. A trainer that has ended resumes
from its last checkpoint. The server stands in for vLLM unless ``--vllm`` is given. Where the victim is ``rollout``, the
trainer has a process of its own for reward functions and environments; where it is ``agent``, each episode is a program
that asks the trainer's endpoint twice; where it is ``episode``, episodes are functions in the process of ``rollout``:
these are killed as they are found, and the trainer starts others. ``engine``, with ``--vllm``, is the process behind
vLLM's server, which then stops listening, and is killed and started again. ``worker`` is the process of a rollout
worker, which writes and scores by itself. Other ways to end or to hold up the trainer: ``save`` and ``sync`` kill it
while it writes a checkpoint, or it or the stand-in while weights are sent; ``term`` is SIGTERM twice; ``pause`` stops
the trainer or the server for some seconds; and with ``full`` no file can grow any more, as on a full disk.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import queue
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests import programs

WAYS = ("save", "sync", "term", "pause", "full")  # of the trainer
VICTIMS = ("server", "trainer", "reward", "environment", "rollout", "agent", "episode", "worker", *WAYS)
CHILDREN = {"rollout": "posttrain.rl.rewards.process", "agent": "agent.py"}  # of the trainer, by words of their command
CHILDREN |= {"episode": CHILDREN["rollout"], "engine": "VLLM::EngineCore"}  # and of the server
CHILDREN |= {"worker": "spawn_main"}
AGENT = """
import json, os, time, urllib.request
messages = json.load(open("row.json"))["prompt"]
messages = [{"role": "user", "content": messages}]
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
for _ in range(2):
    body = json.dumps({"messages": messages, "max_tokens": 3}).encode()
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    answer = json.load(urllib.request.urlopen(asked, timeout=300))["choices"][0]["message"]
    messages += [{"role": "assistant", "content": answer["content"] or ""}, {"role": "user", "content": "a"}]
    time.sleep(0.05)
"""
PROGRESS = 400  # seconds within which a run must go on after a kill; vLLM starts in two minutes
PER_STEP = 8  # completions


# ---------------------------------------------------------------------------------------------------- the processes


class Service(BaseHTTPRequestHandler):
    """The process of the reward function, and that of the environments."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(0.02)
        said = json.dumps([sum(ids) % 7 / 7 for ids in asked]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)


def ask(port: int, rows: list[list[int]]) -> list[float]:
    """What a `Service` says of `rows`."""
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("POST", "/", json.dumps(rows))
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def serve_rewards(port: int, folder: Path) -> None:
    ThreadingHTTPServer(("127.0.0.1", port), Service).serve_forever()


def serve_completions(port: int, folder: Path) -> None:
    """A stand-in for vLLM, with weights of its own until it is sent others."""
    from tests import tiny
    from tests.rl.generation import test_vllm
    from tests.rl.online import test_asynchronous

    class Same(test_vllm.Server):
        def server_bind(self):
            self.server_address = ("127.0.0.1", port)
            super().server_bind()

        def read_weights(self, weights_path):
            with self.lock:
                super().read_weights(weights_path)

    one = Same(
        tiny.causal_lm(seed=9, initializer_range=0.3).eval(), test_asynchronous.Pausing, mode="processed_logprobs",
        dtype="torch.float32",
    )  # fmt: skip
    one.running, one.resumed, one.rows, one.is_old, one.holds = threading.Event(), 0, 0, False, lambda prompt: False
    one.running.set()
    threading.Event().wait()


def write_there(asked: Any, written: Any) -> None:
    """The process of a `ProcessWorker`: completions of the last version that it was told, until it is killed."""
    version, draw = asked.recv(), random.Random(time.time())
    while True:
        while asked.poll():
            version = asked.recv()
        prompt, ids = [[draw.randrange(5, 30) for _ in range(4)] for _ in range(2)]
        written.send({
            "prompt": "a prompt", "completion": "a completion", "input_ids": prompt + ids,
            "completion_mask": [0] * 4 + [1] * 4, "old_log_probs": [0.0] * 4 + [-5.9] * 4,
            "advantage": draw.random() - 0.5, "model_version": version, "metrics": {"reward": sum(ids) % 7 / 7},
        })  # fmt: skip
        time.sleep(0.02)


class ProcessWorker:
    """A rollout worker that writes in a process of its own, at most 16 completions ahead."""

    def __init__(self) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(16)
        spawning = multiprocessing.get_context("spawn")
        (theirs, self.asked), (written, self.ours) = spawning.Pipe(False), spawning.Pipe(False)
        self.process = spawning.Process(target=write_there, args=(theirs, self.ours), daemon=True)
        self.written, self.theirs, self.has_ended = written, theirs, False

    def start(self) -> None:
        self.process.start()
        self.ours.close()
        self.theirs.close()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self.rollout_buffer.put(SimpleNamespace(**self.written.recv()))
        self.has_ended = True

    def stop(self) -> None:
        self.process.kill()

    def update_model_version(self, model_version: int) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is found by `check_health`
            self.asked.send(model_version)

    def check_health(self, stale_after_s: float) -> None:
        if self.has_ended:
            raise RuntimeError("The process of the rollout worker has ended.")


def train(
    folder: Path, ports: dict[str, int], steps: int, bound: int, patience: float, vllm: bool, victim: str
) -> None:
    """The trainer, from its last checkpoint if there is one."""
    import torch

    from posttrain.rl import AsyncGRPOTrainer, GRPOTrainer
    from posttrain.rl.generation.vllm import VLLMServerGenerator
    from posttrain.rl.online import rollout_worker
    from tests import tiny
    from tests.contract.trainers import arguments, text_rows
    from tests.vllm import servers

    torch.set_num_threads(1)
    rollout_worker.POLL = 0.2

    def asked(completion_ids):
        return ask(ports["reward"], completion_ids)

    class Room:
        """An environment whose state is in another process."""

        def reset(self, **row):
            self.level = ask(ports["environment"], [[3]])[0]

        def get_reward(self):
            return ask(ports["environment"], [[int(7 * self.level)]])[0]

    made: dict[str, Any] = {"environment_factory": Room}
    if victim == "agent":
        (folder / "agent.py").write_text(AGENT)
        made = {"agent": [sys.executable, str(folder / "agent.py")]}

    async def episode_of(episode, row):
        said = [{"role": "user", "content": row["prompt"]}]
        for _ in range(2):
            said += [await episode.generate(said, max_tokens=3), {"role": "user", "content": "a"}]
            await asyncio.sleep(0.05)

    if victim == "episode":
        made = {"agent": episode_of}
    has_agent = "agent" in made
    shared = None if vllm else str(folder / "shared")
    url = f"http://127.0.0.1:{ports['server']}"
    generator = VLLMServerGenerator(url, patience, 0, folder=shared, in_flight=bound > 0, request_timeout=60)
    kind, engine = GRPOTrainer, {"generator": generator}
    if victim == "worker":
        kind, made, engine = AsyncGRPOTrainer, {}, {"rollout_worker": ProcessWorker()}
    trainer = kind(
        servers.model() if vllm else tiny.causal_lm(initializer_range=0.1), asked,
        arguments(
            kind.config_class, folder / "run", num_generations=2, max_steps=steps,
            max_completion_length=40 if has_agent else 6, reward_on_error="mask" if has_agent else "raise",
            rollout_process=victim in ("rollout", "episode"),
            num_train_epochs=999, gradient_checkpointing=False, save_strategy="steps", save_steps=2,
            save_total_limit=2, max_staleness=bound, sample_ledger=True, reward_concurrency=2, learning_rate=0.01,
        ),
        [{"prompt": row["prompt"]} for row in text_rows(13)], processing_class=tiny.tokenizer(), **made, **engine,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=any((folder / "run").glob("checkpoint-*")))


# ------------------------------------------------------------------------------------------------- who kills and starts


def write_into(log: Path) -> None:
    """All that this process says from now on."""
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)


class Run:
    """The processes of a run in `folder`."""

    def __init__(
        self,
        folder: Path,
        steps: int,
        bound: int = 2,
        vllm: bool = False,
        patience: float = 300.0,
        victim: str = "trainer",
    ) -> None:
        self.folder, self.steps, self.bound, self.vllm, self.patience = folder, steps, bound, vllm, patience
        self.victim = victim
        folder.mkdir(parents=True, exist_ok=True)
        from tests.vllm.servers import free_port

        self.draw = random.Random(0)
        self.ports = {name: free_port() for name in VICTIMS if name not in ("trainer", *CHILDREN, *WAYS)}
        self.processes: dict[str, subprocess.Popen | programs.Program] = {}
        self.said: list[str] = []
        if vllm:
            from tests.vllm import servers

            servers.save(folder / "model")

    def __enter__(self) -> Run:
        for name in ("reward", "environment", "server", "trainer"):
            self.start(name)
        return self

    def __exit__(self, *error: object) -> None:
        for name, process in self.processes.items():
            if process.poll() is None:
                self.kill(name)

    def start(self, name: str) -> None:
        """Start a process, which has ended or never was; the trainer starts its own."""
        name = "server" if name in ("engine", "sync") else name
        if name in (*CHILDREN, *WAYS) or (name in self.processes and self.processes[name].poll() is None):
            return
        if name == "server" and self.vllm:
            from tests.vllm import servers

            log = self.folder / "server.log"
            self.processes[name] = servers.start(self.folder / "model", self.ports[name], log)
            return
        said = {"port": self.ports.get(name), "folder": str(self.folder)}
        if name == "trainer":
            said |= {"ports": self.ports, "steps": self.steps, "bound": self.bound, "vllm": self.vllm}
            said |= {"patience": self.patience, "victim": self.victim}
        words = ["-m", "tests.rl.online.kills", "--process", name, "--options", json.dumps(said)]
        self.processes[name] = programs.Program(words, programs.environment(MKL_NUM_THREADS="1"))

    def kill(self, name: str) -> None:
        """As `kill -9` does. vLLM's engine and worker are processes of their own, and go with the server."""
        if name in WAYS:
            return self.strike(name)
        if name == "engine":
            self.until(lambda: self.has_ended() or self.kill_child(CHILDREN[name], "server"))
            self.until(lambda: self.has_ended() or not self.is_listening("server"))
            name = "server"  # its process may wait for the engine for ever; whoever looks after it ends it
        if name in CHILDREN:
            self.until(lambda: self.has_ended() or self.kill_child(CHILDREN[name]))
            return
        pid = self.processes[name].pid
        if name == "server" and self.vllm:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        else:
            with contextlib.suppress(ProcessLookupError):  # the run has ended meanwhile
                os.kill(pid, signal.SIGKILL)
        self.processes[name].wait()

    def strike(self, way: str) -> None:
        """End or hold up the trainer, or perhaps the server, in one of the `WAYS`."""
        run, victim = self.folder / "run", "server" if self.draw.random() < 0.5 else "trainer"
        before, shared = time.time_ns(), self.folder / "shared"
        if way == "save":
            beginnings = partial(run.glob, ".tmp-checkpoint-*")
            self.until(lambda: self.has_ended() or any(_changed(one) > before for one in beginnings()), pause=0.0005)
            time.sleep(self.draw.random() * 0.02)
            self.kill("trainer")
        elif way == "sync":
            sending = self.is_paused if self.vllm else lambda: _changed(shared) > before
            self.until(lambda: self.has_ended() or sending(), pause=0.0005)
            time.sleep(self.draw.random() * 0.02)
            self.kill(victim)
        elif way == "term":
            for _ in range(2):
                with contextlib.suppress(ProcessLookupError):  # the first was enough
                    os.kill(self.processes["trainer"].pid, signal.SIGTERM)
                time.sleep(self.draw.random())
        elif way == "full":
            self.until(lambda: self.has_ended() or self.fill_up(run / "samples-0.jsonl"))
            self.until(lambda: self.has_ended() or self.processes["trainer"].poll() is not None)
        elif way == "pause":
            os.kill(self.processes[victim].pid, signal.SIGSTOP)
            time.sleep(4 * self.draw.random())
            os.kill(self.processes[victim].pid, signal.SIGCONT)

    def fill_up(self, ledger: Path) -> bool:
        """Let no file of the trainer become much larger than the `ledger` is; whether it runs."""
        most = ledger.stat().st_size + self.draw.randrange(2000)
        try:
            resource.prlimit(self.processes["trainer"].pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        except ProcessLookupError:
            return False
        return True

    def is_listening(self, name: str) -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", self.ports[name])) == 0

    def is_paused(self) -> bool:
        """Whether vLLM's server is being sent weights."""
        with contextlib.suppress(OSError, HTTPException):
            connection = HTTPConnection("127.0.0.1", self.ports["server"], timeout=5)
            connection.request("GET", "/is_paused")
            return json.loads(connection.getresponse().read())["is_paused"]
        return False

    def kill_child(self, words: str, of: str = "trainer") -> bool:
        """Kill a process of the trainer that has these words in its command; whether there was one."""
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = path.joinpath("stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == self.processes[of].pid and words in path.joinpath("cmdline").read_text():
                    os.kill(int(path.name), signal.SIGKILL)
                    return True
            except (FileNotFoundError, ProcessLookupError):
                continue
        return False

    def lines(self) -> int:
        """Of the ledger."""
        path = self.folder / "run" / "samples-0.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def has_ended(self) -> bool:
        return self.processes["trainer"].poll() == 0

    def until(self, true: Callable[[], bool], seconds: float = PROGRESS, pause: float = 0.02) -> None:
        """Wait, and start the trainer again where it has ended with an error."""
        end = time.monotonic() + seconds
        while not true():
            if self.processes["trainer"].poll() not in (None, 0):
                lines = (self.folder / "trainer.log").read_text().splitlines()
                self.said.append([line for line in lines if line[:1].strip()][-1])  # no note of the error
                print(self.said[-1], file=sys.stderr, flush=True)
                self.start("trainer")
            if time.monotonic() > end:
                logs = {name: (self.folder / f"{name}.log").read_text()[-1500:] for name in self.processes}
                raise RuntimeError(f"The run has not gone on for {seconds:g} seconds: {json.dumps(logs, indent=1)}")
            time.sleep(pause)

    def goes_on(self, more: int) -> None:
        """Wait until `more` lines have been written, or the run is at its end."""
        wanted = self.lines() + more
        self.until(lambda: self.has_ended() or self.lines() >= wanted)


def _changed(folder: Path) -> int:
    """When something was last added to `folder` or below it, or taken away, in nanoseconds since 1970."""
    with contextlib.suppress(FileNotFoundError):
        return max(path.stat().st_mtime_ns for path in (folder, *folder.rglob("*")))
    return 0


def kill_again_and_again(run: Run, victim: str, times: int, draw: random.Random) -> dict[str, Any]:
    """Kill `victim` so often, unless the run ends before; what the ledger says at its end.

    Between two kills the run learns from at most two rollouts, and a random part of a second more: every third kill or
    so hits a process that is starting. vLLM takes minutes to start, so there the run learns from one rollout at least.
    """
    least = 1 if run.vllm else 0
    kills, began, run.draw = 0, time.monotonic(), draw
    with run:
        run.goes_on(2 * PER_STEP)
        while kills < times and not run.has_ended():
            time.sleep(draw.random())
            if run.has_ended():
                break
            run.kill(victim)
            kills += 1
            time.sleep(2 * draw.random())
            run.start(victim)
            run.goes_on(PER_STEP * draw.randint(least, 2))
        run.until(run.has_ended, max(PROGRESS, 2 * run.steps))
    told = {"victim": victim, "bound": run.bound, "kills": kills, "resumed": len(run.said)}
    return told | {"seconds": round(time.monotonic() - began)} | judged(run)


def judged(run: Run) -> dict[str, Any]:
    """The audit of a run that has ended."""
    from posttrain.rl.online.ledger import audit, prompt_id
    from tests import tiny

    found, unfinished = audit(run.folder / "run"), prompt_id([tiny.tokenizer().eos_token_id])
    problems = list(found.problems)
    steps = [step for step in range(1, run.steps + 1) for _ in range(PER_STEP)]
    if [line["step"] for line in found.used] != steps:
        problems.append("steps have too few completions, or too many")
    if [line["rollout"] for line in found.used] != [number for number in range(run.steps) for _ in range(PER_STEP)]:
        problems.append("rollouts do not count on")
    epoch = 3 * PER_STEP  # 12 of 13 prompts, twice each
    for start in () if run.victim == "worker" else range(0, len(found.used) - epoch + 1, epoch):
        told = Counter(line["prompt"] for line in found.used[start : start + epoch])
        failed = told.pop(unfinished, 0)  # agents that were killed before their first turn
        if max(told.values()) > 2 or sum(told.values()) + failed != epoch or (not failed and len(told) != 12):
            problems.append(f"a prompt came twice in the epoch from rollout {start // PER_STEP}")
    ages = [line["step"] - 1 - line["versions"][0] for line in found.used]
    return {"stalest": max(ages), "problems": problems, "said": sorted(set(run.said))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--victims", nargs="+", choices=[*VICTIMS, "engine"], default=list(VICTIMS))
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--bound", type=int, default=2, help="max_staleness")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=300.0, help="seconds to wait for the server")
    parser.add_argument("--vllm", action="store_true", help="vLLM itself, on the CPU")
    parser.add_argument("--process", choices=VICTIMS, help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    cache = tempfile.TemporaryDirectory(prefix="posttrain-tests-")
    os.environ.setdefault("POSTTRAIN_TEST_CACHE", cache.name)  # as tests/conftest.py does
    if options.process:
        write_into(Path(options.options["folder"]) / f"{options.process}.log")
        given = options.options | {"folder": Path(options.options["folder"])}
        port = given.pop("port")
        if options.process == "trainer":
            train(**given)
        else:
            (serve_completions if options.process == "server" else serve_rewards)(port, given["folder"])
        return
    failed = False
    for victim in options.victims:
        draw, kills = random.Random(options.seed), 0
        while kills < options.times:  # a run may end before all of them
            steps = 2 * (options.times - kills) + 8
            with tempfile.TemporaryDirectory() as folder:
                run = Run(Path(folder), steps, options.bound, options.vllm, options.patience, victim)
                found = kill_again_and_again(run, victim, options.times - kills, draw)
            print(json.dumps(found), flush=True)
            kills += found["kills"]
            failed |= bool(found["problems"])
    sys.exit(failed)


if __name__ == "__main__":
    main()
