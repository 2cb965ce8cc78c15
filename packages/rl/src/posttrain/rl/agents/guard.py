"""The program beside a trainer that ends the programs of agents when the trainer has ended, be it by kill -9.

It reads lines, each the program that runs in a folder, 0 where none does, or -1 where that is gone. When their writer
has ended, it ends the programs and removes the folders that are left. It is run as a file, with nothing but Python.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator


def guard(lines: Iterable[str]) -> None:
    """Read `lines` to their end, then end what is left."""
    programs: dict[str, int] = {}
    for line in lines:
        program, folder = line[:-1].split(" ", 1)
        programs[folder] = int(program)
        if programs[folder] < 0:
            del programs[folder]
    for folder, number in programs.items():
        # One that had only been started. The pipe of the lines closes with its start, by when it is in the folder.
        for started in [number] if number else _in_folder(folder):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def _in_folder(folder: str) -> Iterator[int]:
    """The groups of the processes that are in `folder`, where the system has /proc."""
    for number in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if os.readlink(f"/proc/{number}/cwd") == os.path.realpath(folder):
                yield os.getpgid(int(number))


if __name__ == "__main__":
    guard(sys.stdin)
