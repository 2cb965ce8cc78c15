"""The thread that ends a run whose processes hang, with a store of this process."""

import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch

from posttrain.core.distributed import waits, world
from posttrain.core.distributed import watchdog as watchdog_module
from posttrain.core.distributed.watchdog import Watchdog


class SlowStore:
    """Answers late, as one does whose server is going down."""

    def __init__(self):
        self.asked = 0

    def set(self, key, value):
        pass

    def check(self, keys):
        self.asked += 1
        time.sleep(0.2)
        return False


def test_no_thread_is_left_inside_the_store_when_the_program_ends(tmp_path):
    store = SlowStore()
    watchdog = Watchdog(store, 0, 2, seconds=0.1, folder=tmp_path)
    watchdog.start()
    while not store.asked:
        time.sleep(0.005)
    watchdog.stop()
    assert not watchdog.is_alive()
    Watchdog(store, 0, 2, seconds=0.1, folder=tmp_path).stop()  # one that was never started


def test_a_wait_that_is_too_long_writes_the_stacks_and_ends_the_process(tmp_path, capfd):
    left = []
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=10))
    watchdog = Watchdog(store, 0, 1, seconds=0.2, folder=tmp_path, leave=left.append)
    with watchdog("the forward pass"):
        pass
    watchdog.step, watchdog.batches = 3, 8
    watchdog.start()
    with watchdog("a sum"):
        watchdog.join(timeout=20)
    assert left == [1]
    assert "waited in a sum" in (tmp_path / "rank-0.txt").read_text()
    said = "rank 0 has waited 0.2 s for the others in a sum (step 3, from batch 8 of its epoch, wait number 2)"
    assert said in capfd.readouterr().err


def test_a_thread_in_the_background_leaves_the_wait_of_the_main_thread_alone(tmp_path):
    watchdog = Watchdog(None, 0, 2, seconds=60, folder=tmp_path)

    def read():
        with world._waiting_for_device(watchdog):
            pass

    with watchdog("a sum"):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        assert watchdog._waits[0] == "a sum"
    with world._waiting_for_device(watchdog):
        assert watchdog._waits[0].startswith("what the device computes")


@pytest.mark.parametrize("ended_as_it_should", [False, True])
def test_a_wait_for_a_process_that_is_lost_ends_at_once(ended_as_it_should, tmp_path, capfd, monkeypatch):
    """A collective of NCCL with a process that is gone raises nothing, and never ends."""
    monkeypatch.setattr(watchdog_module, "_LOOK", 0.0)
    left = []
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=10))
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    word = waits.LEFT if ended_as_it_should else 7
    store.set("posttrain/alive/1", f"{word}\n{int(gone.stdout)}\n{waits._machine()}")
    seconds = 1.0 if ended_as_it_should else 60.0
    watchdog = Watchdog(store, 0, 2, seconds, folder=tmp_path, leave=left.append, beside=[1])
    watchdog.start()
    with watchdog("a sum"):
        watchdog.join(timeout=30)
    assert left == [1]
    said = capfd.readouterr().err
    expected = "has waited 1 s for the others in a sum" if ended_as_it_should else "rank 1 has ended. See its error."
    assert expected in said and "rank 1 did not answer" in said


def test_a_process_says_that_it_leaves_unless_an_error_ends_it(tmp_path, monkeypatch):
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=10))
    for number, error in enumerate((None, ValueError())):
        if error is not None:
            monkeypatch.setattr(sys, "last_value", error, raising=False)
        watchdog = Watchdog(store, number, 2, seconds=60, folder=tmp_path)
        watchdog.start()
        while not store.check([f"posttrain/alive/{number}"]):
            pass
        watchdog.stop()
        assert store.get(f"posttrain/alive/{number}").decode().startswith(waits.LEFT) == (error is None)
