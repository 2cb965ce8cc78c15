"""Starts programs of several gloo processes on this machine; each job runs once, however many tests look at it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from tests import programs
from tests.distributed import worker
from tests.programs import environment, together

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests" / "distributed" / "worker.py"
FORKED = str(ROOT / "tests" / "forked.py")


def torchrun(processes: int, *arguments: str, timeout: float = 300, **changes: str) -> subprocess.CompletedProcess[str]:
    """torchrun with a free port, of forked processes; returns the finished program."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), "--no-python"]
    command += [sys.executable, "-S", "-E", FORKED, "1", *arguments]
    return programs.run(command, environment(**changes), timeout=timeout, seed=1)


def once(folder: Path, name: str, make: Callable[[Path], Any]) -> Path:
    """The folder in which ``make(folder)`` was done, by whichever of the test processes was first."""
    done = folder / name
    with FileLock(f"{done}.lock"):
        if not (done / "ready").exists():
            done.mkdir(exist_ok=True)
            make(done)
            (done / "ready").touch()
    return done


def do(processes: int, work: list[list[Any]], folder: Path, **changes: str) -> str:
    """Let so many processes do `work` (label, function of `worker`, its arguments), and return what they said.

    One process is this one.
    """
    if processes == 1:
        for label, function, arguments in work:
            torch.save(getattr(worker, function)(**arguments), folder / f"{label}.pt")
        return ""
    patience = max(300, 40 * len(work))  # seconds; on a busy machine a training takes ten times as long as alone
    words = [str(WORKER), str(folder), json.dumps(work)]
    done = together(processes, words, patience, **changes)
    if done.returncode == -signal.SIGSEGV:  # once in some thousand runs a thread of gloo ends so, on a busy machine
        warnings.warn(f"a process crashed, and the work is done again; it said:\n{done.stderr[-2000:]}", stacklevel=2)
        done = together(processes, words, patience, **changes)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stderr


def result(folder: Path, label: str) -> Any:
    """What a piece of work returned on rank 0."""
    found = torch.load(folder / f"{label}.pt", weights_only=False)
    assert not (isinstance(found, dict) and "error" in found), found["error"]
    return found
