"""Work that each process does by itself, and that a signal to any of them ends for all: they leave together or not."""

import os
import random
import signal
import threading
import time

import pytest

from posttrain.core.distributed.waits import LostProcessError
from posttrain.core.training import preemption
from posttrain.core.training.preemption import Left, Watch
from tests.core.test_waits import team

LONG = 20.0  # seconds of work that is to be left


def works(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.001)
    return seconds


def outcome(dist, work, after=None, number=signal.SIGTERM):
    """What `Watch.at_once` returns or raises, on every process; this one gets a signal `after` so many seconds."""
    watch = Watch(world_size=2)
    watch.begin()
    timer = threading.Timer(after or 0, os.kill, (os.getpid(), number))
    if after is not None:
        timer.start()
    try:
        found = "done", watch.at_once(work, dist)
    except (Left, ConnectionError, ValueError, LostProcessError) as error:
        found = type(error).__name__, str(error)
    if after is not None:
        timer.join()
        time.sleep(0.01)  # the handler is called
    watch.end()
    return dist.gather_patiently(found)


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(preemption, "INTERVAL", 0.01)


@pytest.mark.parametrize("told", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize("seconds", [(LONG, LONG), (LONG, 0.0), (0.0, LONG)], ids=str)
def test_a_signal_to_one_ends_the_work_of_all(told, seconds, tmp_path):
    def member(dist):
        began = time.monotonic()
        found = outcome(dist, lambda: works(seconds[dist.rank]), 0.1 * (1 + dist.rank) if dist.rank in told else None)
        assert found == [("Left", str(128 + signal.SIGTERM))] * 2 and time.monotonic() - began < LONG / 2

    assert team(tmp_path / "store", member, member) == [0, 0]


def test_no_moment_of_a_signal_lets_one_leave_without_the_others(tmp_path):
    """Signals at 120 random moments, around the ends of what each works on."""

    def member(dist):
        draw, kinds = random.Random(0), set()
        for _ in range(120):
            seconds, moments = [draw.random() * 0.02 for _ in range(2)], [draw.random() * 0.03 for _ in range(2)]
            told = draw.choice([[0], [1], [0, 1]])
            moment = moments[dist.rank] if dist.rank in told else None
            (one, _), (other, _) = outcome(dist, lambda most=seconds[dist.rank]: works(most), moment)
            assert one == other
            kinds.add(one)
        assert kinds == {"Left", "done"}

    assert team(tmp_path / "store", member, member) == [0, 0]


def test_an_error_of_one_is_that_of_all_and_a_lost_engine_is_not(tmp_path):
    def fails(kind):
        raise kind("broken")

    def member(dist):
        for rank in range(2):
            error = outcome(dist, lambda rank=rank: fails(ValueError) if dist.rank == rank else 1)
            assert error == [("ValueError", "broken")] * 2
            lost = outcome(dist, lambda rank=rank: fails(ConnectionError) if dist.rank == rank else 1)
            assert lost[rank] == ("ConnectionError", "broken") and lost[1 - rank] == ("done", 1)
            left = outcome(dist, lambda rank=rank: fails(ConnectionError) if dist.rank == rank else works(LONG), 0.1)
            assert left == [("Left", str(128 + signal.SIGTERM))] * 2

    assert team(tmp_path / "store", member, member) == [0, 0]


def test_a_process_that_ends_in_its_work_ends_the_wait_of_the_others(tmp_path):
    def member(dist):
        if dist.rank:
            os._exit(7)
        watch = Watch(world_size=2)
        watch.begin()
        with pytest.raises(LostProcessError):
            watch.at_once(lambda: works(0.1), dist)

    assert team(tmp_path / "store", member, member) == [0, 7]
