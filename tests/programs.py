"""Runs Python programs of tests without the seconds that a new interpreter needs for its imports.

A program is a fork of a process that has imported them, `tests.starter`. There are two of these, with other seeds for
the hashes of strings and hence other orders of sets: the processes of a job, and a run and the one that goes on with
it, agree on no order by chance. What a test promises about an interpreter's start, or what it reads from the
environment as it imports, needs `subprocess`. What a launcher starts may be `tests.forked`.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from tests.starter import LONGEST

ROOT = Path(__file__).parents[1]
PACKAGES = [str(path) for path in sorted((ROOT / "packages").glob("*/src"))]
_turns = itertools.cycle((0, 1))
_starters: list[subprocess.Popen] = []  # kept, for Popen warns of one that it forgets


def environment(**changes: str) -> dict[str, str]:
    """That of a launcher: this checkout's packages, one thread, no GPU, and nothing of a launcher above."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
    path = os.pathsep.join([*PACKAGES, str(ROOT)])
    return (
        own
        | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
        | changes
    )


@functools.cache
def _starter(seed: int) -> socket.socket:
    """A connection to the starter with this seed of the test run, which whoever is first starts."""
    place = Path(os.environ["POSTTRAIN_TEST_CACHE"]) / f"starter-{seed}"
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with FileLock(f"{place}.lock"):
        try:
            ours.connect(str(place))
        except OSError:  # there is none, or it has ended
            place.unlink(missing_ok=True)
            _start(seed, str(place))
            ours.connect(str(place))
    if ours.recv(16) != b"ready":
        raise RuntimeError("tests.starter has ended")
    return ours


def _start(seed: int, place: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(place)
        listener.listen()
        command = [sys.executable, "-m", "tests.starter", str(listener.fileno())]
        own = environment(PYTHONHASHSEED=str(seed))
        del own["PYTHONWARNINGS"]  # as each program has it
        own["PYTHONPATH"] = os.pathsep.join(filter(None, [own["PYTHONPATH"], os.environ.get("PYTHONPATH")]))
        _starters.append(
            subprocess.Popen(command, cwd=ROOT, env=own, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL)
        )


class Program:
    """A running program, with what `subprocess.Popen` has of it; its two outputs are files.

    Args:
        words: a file or -c and code or -m and a module, and what follows on the command line.
        seed: which of the two starters it is forked from; without it each in turn.
    """

    def __init__(
        self,
        words: list[str],
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike = ROOT,
        start_new_session: bool = False,
        seed: int | None = None,
    ):
        self.returncode: int | None = None
        starter = _starter(next(_turns) if seed is None else seed)
        asked = {"words": [str(word) for word in words], "cwd": str(cwd), "new_session": start_new_session}
        asked["environment"] = dict(os.environ if env is None else env)
        packet = json.dumps(asked).encode()
        if len(packet) > LONGEST:
            raise ValueError(f"a program's words and environment have {len(packet)} bytes; {LONGEST} may be sent")
        self._files = [tempfile.TemporaryFile() for _ in range(2)]
        self.stdout, self.stderr = (_Output(self, file.fileno()) for file in self._files)
        report, theirs = os.pipe()
        self._report = open(report, "rb", buffering=0)
        with open(os.devnull, "rb") as nothing:
            socket.send_fds(starter, [packet], [nothing.fileno(), *(f.fileno() for f in self._files), theirs])
        os.close(theirs)
        self.pid = int(self._report.readline())

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = int(self._report.readline())
            self._report.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self.stdout.read(), self.stderr.read()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Output:
    """What a program has written, read as it is written."""

    def __init__(self, program: Program, descriptor: int):
        # A weak one: the files of a program are closed when nobody has it any more, not when garbage is collected.
        self.program = weakref.proxy(program)
        self.descriptor, self.position, self.rest = descriptor, 0, b""

    def _more(self) -> bool:
        found = os.pread(self.descriptor, 2**20, self.position)
        self.position += len(found)
        self.rest += found
        return bool(found)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while b"\n" not in self.rest:
            has_ended = self.program.poll() is not None
            if not self._more():
                if has_ended:
                    break
                time.sleep(0.002)
        line, newline, self.rest = self.rest.partition(b"\n")
        if not line and not newline:
            raise StopIteration
        return (line + newline).decode(errors="replace")

    def read(self) -> str:
        """All that comes, to the program's end."""
        self.program.wait()
        while self._more():
            pass
        rest, self.rest = self.rest, b""
        return rest.decode(errors="replace")


def run(
    words: list[str],
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike = ROOT,
    timeout: float = 300,
    check: bool = False,
    seed: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """A program to its end, as of `subprocess.run` with captured text."""
    program = Program(words, env, cwd, seed=seed)
    return _finish([program], words, timeout, check)


def together(
    processes: int,
    words: list[str],
    timeout: float = 300,
    nodes: int = 1,
    cwd: str | os.PathLike = ROOT,
    **changes: str,
) -> subprocess.CompletedProcess[str]:
    """So many processes of one program, as torchrun sets them up on so many machines; where one fails, all are killed.

    `changes` are those of the environment.
    """
    import torch.distributed

    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    each = processes // nodes
    common = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": each, "GROUP_WORLD_SIZE": nodes, "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    started = []
    for rank in range(processes):
        own: dict[str, Any] = common | {"RANK": rank, "LOCAL_RANK": rank % each, "GROUP_RANK": rank // each} | changes
        env = environment(**{name: str(value) for name, value in own.items()})
        started.append(Program(words, env, cwd, seed=rank % 2))
    return _finish(started, words, timeout)


def _finish(
    programs: list[Program], words: list[str], timeout: float, check: bool = False
) -> subprocess.CompletedProcess[str]:
    running, until = list(programs), time.monotonic() + timeout
    while running and time.monotonic() < until:
        select.select([one._report for one in running], [], [], until - time.monotonic())
        running = [one for one in running if one.poll() is None]
        if any(one.returncode for one in programs):
            break
    timed_out = running and not any(one.returncode for one in programs)
    code = next((one.returncode for one in programs if one.returncode), 0)
    for one in running:
        one.kill()
    outputs = [one.communicate() for one in programs]
    stdout, stderr = ("".join(texts) for texts in zip(*outputs, strict=True))
    if timed_out:
        raise subprocess.TimeoutExpired(words, timeout, stdout, stderr)
    done = subprocess.CompletedProcess(words, code, stdout, stderr)
    if check:
        done.check_returncode()
    return done
