"""The program that a launcher starts in place of a script: a fork of `tests.starter` becomes that script.

    python -S -E tests/forked.py SEED SCRIPT ARGUMENTS

It hands on its streams, its environment and the signals that it gets, and ends as the script does.
"""

import json
import os
import signal
import socket
import sys


def main(seed: str, *words: str) -> None:
    starter = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    starter.connect(f"{os.environ['POSTTRAIN_TEST_CACHE']}/starter-{seed}")
    starter.recv(16)
    asked = {"words": words, "cwd": os.getcwd(), "new_session": True, "environment": dict(os.environ)}
    report, theirs = os.pipe()
    socket.send_fds(starter, [json.dumps(asked).encode()], [0, 1, 2, theirs])
    os.close(theirs)
    with open(report, "rb", buffering=0) as lines:
        pid = int(lines.readline())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        code = int(lines.readline())
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
