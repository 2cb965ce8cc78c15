"""Processes that wait for the work of another: as long as it takes, and no longer than that process lives."""

import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import pytest
from torch.distributed import DistBackendError, FileStore

from posttrain.core.distributed import waits
from posttrain.core.distributed.waits import LostProcessError, Waits, beat, portable
from posttrain.core.distributed.watchdog import is_consequence
from posttrain.core.distributed.world import World

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes")


def team(path, *members, seconds=1.0):
    """Runs each member(dist) in a process; their exit codes."""
    context = multiprocessing.get_context("fork")

    def run(rank, member):
        store = FileStore(str(path), len(members))
        beat(store, rank, 1)
        dist = SimpleNamespace(rank=rank, process_index=rank, local_rank=rank, is_main=rank == 0)
        dist.waits, dist._waiting = Waits(store, rank, len(members), seconds), None
        for name in ("main_first", "on_main", "gather_patiently", "meet", "all_come"):
            setattr(dist, name, getattr(World, name).__get__(dist))
        member(dist)

    running = [context.Process(target=run, args=pair) for pair in enumerate(members)]
    for process in running:
        process.start()
    for process in running:
        process.join(30)
    codes = [process.exitcode for process in running]
    for process in running:
        process.kill()
    return codes


def raises(kind, text, work):
    with pytest.raises(kind, match=text):
        work()


def test_a_gathering_brings_what_each_passed_and_leaves_no_keys(tmp_path):
    def member(dist):
        for number in range(3):
            assert dist.gather_patiently((dist.rank, number)) == [(rank, number) for rank in range(3)]
        for number in range(40):
            assert dist.on_main(lambda number=number: number) == number
            dist.meet()
        assert dist.waits.store.num_keys() < 20

    assert team(tmp_path / "store", member, member, member) == [0, 0, 0]


def test_all_come_or_none_waits_for_another(tmp_path):
    def member(dist):
        assert dist.all_come("error after 3", 10)
        assert not dist.all_come(f"error after {min(dist.rank, 1)}", 0.3)  # they are not at the same place
        if dist.rank != 1:  # one stays away
            assert not dist.all_come("error after 4", 0.3)
        if dist.rank == 2:  # and one has waited more often
            dist.waits.next()
        assert not dist.all_come("error after 5", 0.3)

    assert team(tmp_path / "store", member, member, member) == [0, 0, 0]


def test_the_others_wait_longer_than_the_limit_of_a_collective(tmp_path, monkeypatch):
    monkeypatch.setattr(waits, "SILENCE", 0.0)  # only signs of life count

    def main(dist):
        with dist.main_first():
            for count in range(8):
                time.sleep(0.5)
                beat(dist.waits.store, 0, count)
            (tmp_path / "cache").write_text("ready")

    def other(dist):
        with dist.main_first():
            assert (tmp_path / "cache").read_text() == "ready"

    assert team(tmp_path / "store", main, other, seconds=2) == [0, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_is_gone_is_named_to_who_tells_as_to_who_hears(rank):
    def gone(*_):
        raise RuntimeError("Broken pipe")

    alone = Waits(SimpleNamespace(set=gone, check=gone), rank, 2, 1.0)
    for ask in (lambda: alone.gather(1, "all"), lambda: alone.hear("name", 1 - rank, "all")):
        raises(LostProcessError, r"cannot reach each other any more \(Broken pipe\)", ask)


@pytest.mark.parametrize("how", ["main_first", "on_main", "meet"])
def test_the_death_of_the_process_that_works_ends_the_wait_soon(how, tmp_path):
    def main(dist):
        os.kill(os.getpid(), signal.SIGKILL)

    def other(dist):
        def wait():
            if how == "main_first":
                with dist.main_first():
                    pass
            elif how == "on_main":
                dist.on_main(lambda: None)
            else:
                dist.meet()

        began = time.monotonic()
        raises(LostProcessError, "Process 0 has ended, and this one waited for it", wait)
        assert time.monotonic() - began < 10

    assert team(tmp_path / "store", main, other, seconds=1000) == [-9, 0]


@pytest.mark.long
def test_a_process_that_is_silent_counts_as_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(waits, "SILENCE", 0.0)
    monkeypatch.setattr(waits, "_machine", lambda: str(os.getpid()))  # none sees the other

    def main(dist):
        time.sleep(6)

    def other(dist):
        raises(LostProcessError, "no sign of life for 1 s", dist.meet)

    assert team(tmp_path / "store", main, other) == [0, 0]


class Unsendable(ValueError):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_is_raised_on_all(failing, tmp_path):
    def member(dist):
        def work():
            with dist.main_first():
                if dist.rank == failing:
                    raise KeyError("row 7")

        raises(KeyError, "row 7", work)
        assert dist.gather_patiently(dist.rank) == [0, 1]  # and all are in step

    assert team(tmp_path / "store", member, member) == [0, 0]


def test_an_error_of_the_main_process_that_cannot_travel_arrives_as_text(tmp_path):
    def member(dist):
        def fail():
            raise Unsendable("this", "that")

        kind = Unsendable if dist.rank == 0 else RuntimeError
        raises(kind, "this and that", lambda: dist.on_main(fail))

    assert team(tmp_path / "store", member, member) == [0, 0]
    assert is_consequence(portable(KeyboardInterrupt())) and portable(None) is None
    assert is_consequence(DistBackendError("NCCL error: ncclRemoteError, NCCL version 2.27.3"))
    assert not is_consequence(DistBackendError("NCCL error: ncclInvalidUsage"))


def test_the_first_of_each_machine_goes_first_on_it(tmp_path):
    def member(dist):
        machine, dist.local_rank = divmod(dist.rank, 2)
        with dist.main_first(local=True):
            mark = tmp_path / f"machine-{machine}"
            if dist.local_rank == 0:
                time.sleep(0.3 * machine)
                mark.touch()
            assert mark.exists()

    assert team(tmp_path / "store", *[member] * 4) == [0] * 4
