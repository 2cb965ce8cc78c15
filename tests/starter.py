"""The process that `tests.programs` forks programs from: it has imported what trainings import.

It has computed nothing, and its only thread beside the first is one of pyarrow's allocator, which forks know of. What
is forked from it is as a new interpreter after these imports.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import types
import warnings
from typing import Any

#: What takes long to import, and what the first trainer of a process imports as it is made.
MODULES = """
    numpy torch torch.distributed.fsdp torch.distributed.tensor torch.distributed.device_mesh torch._dynamo
    datasets datasets.packaged_modules pandas safetensors.torch
    transformers transformers.generation.utils transformers.modeling_utils transformers.integrations
    transformers.models.auto.modeling_auto transformers.models.qwen3.modeling_qwen3 tests.distributed.worker
"""
#: A request is one packet of at most so many bytes, and the streams of the program, 0 to 2, and its report beside it.
LONGEST, STREAMS = 2**20, 4


def serve(client: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Start programs until there is nobody to ask for more: None. A fork returns with what it is to be."""
    reports: dict[int, int] = {}
    ended, told = os.pipe()
    for end in (ended, told):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(told)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a keyboard's is for the tests
    while True:
        ready, _, _ = select.select([client, ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            while reports and (found := os.waitpid(-1, os.WNOHANG))[0]:
                report = reports.pop(found[0])
                os.write(report, b"%d\n" % os.waitstatus_to_exitcode(found[1]))
                os.close(report)
        if client in ready:
            asked, streams, _, _ = socket.recv_fds(client, LONGEST, STREAMS)
            if not asked:
                return None
            report = streams.pop()
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for end in (client.detach(), ended, told, report, *reports.values()):
                    os.close(end)
                return json.loads(asked), streams
            reports[pid] = report
            os.write(report, b"%d\n" % pid)
            for stream in streams:
                os.close(stream)


def become(asked: dict[str, Any], streams: list[int]) -> None:
    """Make this fork the program that was asked for, and run it."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if asked["new_session"]:
        os.setsid()
    os.chdir(asked["cwd"])
    for name in os.environ.keys() - asked["environment"].keys():
        del os.environ[name]
    os.environ.update(asked["environment"])
    warnings._processoptions(filter(None, asked["environment"].get("PYTHONWARNINGS", "").split(",")))
    sys.modules["numpy"].random.seed(None)  # each interpreter begins with another
    first, *rest = asked["words"]
    if first == "-m":
        sys.argv, sys.path[0] = rest, asked["cwd"]
        runpy._run_module_as_main(rest[0])
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(rest[0], main.__dict__)
    else:
        sys.argv, sys.path[0] = [first, *rest], os.path.dirname(os.path.abspath(first))
        main.__file__ = first
        with open(first, encoding="utf-8") as program:
            code = compile(program.read(), first, "exec")
        exec(code, main.__dict__)


if __name__ == "__main__":
    for name in MODULES.split():
        importlib.import_module(name)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.send(b"ready")
    program = serve(connection)
    if program is not None:
        become(*program)
