"""The process that `tests.programs` forks programs from: it has imported what trainings import.

It has computed nothing, and its only thread beside the first is one of pyarrow's allocator, which forks know of. What
is forked from it is as a new interpreter after these imports. All workers of a test run share it.
"""

from __future__ import annotations

import contextlib
import gc
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
    datasets datasets.packaged_modules pandas safetensors.torch peft
    transformers transformers.generation.utils transformers.modeling_utils transformers.integrations
    transformers.models.auto.modeling_auto transformers.models.qwen3.modeling_qwen3 tests.distributed.worker
"""
#: A request is one packet of at most so many bytes, and the streams of the program, 0 to 2, and its report beside it.
LONGEST, STREAMS = 2**20, 4
#: Seconds that it waits for another worker where none is connected.
PATIENCE = 5.0


def tell(report: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the worker that asked may have gone, and others go on
        os.write(report, b"%d\n" % number)


def serve(listener: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Start programs until there is nobody to ask for more: None. A fork returns with what it is to be."""
    clients: list[socket.socket] = []
    reports: dict[int, int] = {}
    ended, told = os.pipe()
    for end in (ended, told):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(told)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a keyboard's is for the tests
    while True:
        ready, _, _ = select.select([listener, ended, *clients], [], [], None if clients else PATIENCE)
        if not ready:
            return None
        if ended in ready:
            os.read(ended, 4096)
            while reports and (found := os.waitpid(-1, os.WNOHANG))[0]:
                report = reports.pop(found[0])
                tell(report, os.waitstatus_to_exitcode(found[1]))
                os.close(report)
        if listener in ready:
            clients.append(listener.accept()[0])
            with contextlib.suppress(BrokenPipeError):
                clients[-1].send(b"ready")
        for client in set(ready) & set(clients):
            asked, streams = b"", []
            with contextlib.suppress(ConnectionResetError):
                asked, streams, _, _ = socket.recv_fds(client, LONGEST, STREAMS)
            if not asked:
                clients.remove(client)
                client.close()
                continue
            report = streams.pop()
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                sockets = [one.detach() for one in (listener, *clients)]
                for end in (*sockets, ended, told, report, *reports.values()):
                    os.close(end)
                return json.loads(asked), streams
            reports[pid] = report
            tell(report, pid)
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
    sys.orig_argv = [sys.executable, *asked["words"]]
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
    gc.collect()
    gc.freeze()  # else each program looks through all that is imported for garbage
    program = serve(socket.socket(fileno=int(sys.argv[1])))
    if program is not None:
        become(*program)
