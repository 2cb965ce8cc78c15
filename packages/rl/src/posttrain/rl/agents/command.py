"""A program as an agent: it is run for each row, in a folder of its own, and asks the policy over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from posttrain.core.files import write_text

LAST = 4096
"""Bytes of a program's output that are read, from its end."""


class AgentCommand:
    """A program that is trained as an agent.

    It runs in a new folder with the row in ``row.json``. OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL and the same of
    ANTHROPIC lead it to the policy, past a proxy that the environment names. Its reward is what the `verifier` says, or
    else the number that it prints on its last line, if it does.

    Args:
        command: its words, or a text that is split into words as a shell does. ``{name}`` stands for that column of the
            row, ``{folder}`` for the folder, and a word that is the path of a file is made absolute.
        verifier: a second command, run in the folder after the agent has ended. The number on its last line is the
            reward; without one it is 1 where it exits with 0, else 0.
        environment: more variables, in which the same words may stand.
    """

    def __init__(
        self,
        command: str | Sequence[str],
        verifier: str | Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.command, self.verifier = _words(command), None if verifier is None else _words(verifier)
        self.environment = dict(environment or {})
        scripts = [Path(word).stem for word in self.command if word.endswith(".py")]
        self.__name__ = (scripts or [Path(self.command[0]).name])[0]  # its rewards are logged under it

    async def __call__(self, episode: Any, row: dict[str, Any]) -> float | None:
        """The reward of a run on `row`; None if there is none.

        Raises:
            RuntimeError: the program failed, and there is no verifier to judge what it left.
        """
        with _folder() as folder:
            write_text(Path(folder, "row.json"), json.dumps(row, default=str))
            values = {name: str(value) for name, value in row.items()} | {"folder": folder}
            around = [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), urlsplit(episode.base_url).hostname]
            variables = {
                **dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(filter(None, around))),
                "OPENAI_BASE_URL": episode.base_url,
                "OPENAI_API_KEY": episode.api_key,
                "OPENAI_MODEL": episode.model,
                "ANTHROPIC_BASE_URL": episode.anthropic_base_url,
                "ANTHROPIC_API_KEY": episode.api_key,
                "ANTHROPIC_MODEL": episode.model,
                **{name: _filled(value, values) for name, value in self.environment.items()},
            }
            code, output, errors = await _run(self.command, values, folder, variables)
            if self.verifier is not None:
                code, output, _ = await _run(self.verifier, values, folder, variables)
                reward = _number(output)
                return float(code == 0) if reward is None else reward
        if code:
            raise RuntimeError(f"{shlex.join(self.command)} has exited with {code}: {(errors or output).strip()}")
        return _number(output)


def _words(command: str | Sequence[str]) -> list[str]:
    words = shlex.split(command) if isinstance(command, str) else list(command)
    if not words:
        raise ValueError("The command of an agent is empty; give the program and its arguments.")
    return [os.path.abspath(word) if os.path.isfile(word) else word for word in words]


def _filled(word: str, values: Mapping[str, str]) -> str:
    """`word` with the values of names in it, in which other names in braces stay as they are."""
    names = "|".join(map(re.escape, values))
    return re.sub(f"{{({names})}}", lambda found: values[found[1]], word)


async def _run(
    words: Sequence[str], values: Mapping[str, str], folder: str, variables: Mapping[str, str]
) -> tuple[int, str, str]:
    """(exit status, end of its output, end of its errors) of a program, which is killed where this is cancelled."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        program = await asyncio.create_subprocess_exec(
            *(_filled(word, values) for word in words),
            cwd=folder,
            env={**os.environ, "PWD": folder, **variables},  # by which some find where they are
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        _tell_guard(program.pid, folder)
        try:
            code = await program.wait()
        finally:  # with what it has started itself
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            _tell_guard(0, folder)
            await asyncio.shield(program.wait())
        return code, _end(output), _end(errors)


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="posttrain-agent-", ignore_cleanup_errors=True) as folder:
        _tell_guard(0, folder)
        try:
            yield folder
        finally:
            _tell_guard(-1, folder)


def _tell_guard(program: int, folder: str) -> None:
    with contextlib.suppress(OSError):  # it was killed; programs end without it, as long as this process does not
        os.write(_guard().stdin.fileno(), f"{program} {folder}\n".encode())


@functools.cache
def _guard() -> Any:
    file, null = Path(__file__).with_name("guard.py"), subprocess.DEVNULL
    words = [sys.executable, "-I", "-S", str(file)]
    # Ctrl-C is for the trainer.
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True)


def _end(file: IO[bytes]) -> str:
    file.seek(max(file.seek(0, os.SEEK_END) - LAST, 0))
    return file.read().decode(errors="replace")


def _number(output: str) -> float | None:
    with contextlib.suppress(ValueError, IndexError):
        return float(output.strip().splitlines()[-1])
    return None
