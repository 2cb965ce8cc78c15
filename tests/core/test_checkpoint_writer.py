"""`snapshot` and `AsyncWriter`: training goes on while the checkpoint of an earlier moment is written."""

import threading
import time

import numpy as np
import pytest
import torch

from posttrain.core.checkpoint import AsyncWriter, Store, load_tree, save_tree, snapshot


def tree(value=0.0):
    weight = torch.nn.Parameter(torch.full((3, 4), value))
    state = {0: {"m": torch.full((4, 3), value).T, "step": torch.tensor(value)}}
    return {"weight": weight, "tied": weight.detach(), "state": state, "rows": [np.full(2, value), (1, None, "x")]}


def test_a_snapshot_does_not_change_with_what_it_was_taken_of():
    live = tree(1.0)
    frozen = snapshot(live)
    live["weight"].data.fill_(9), live["state"][0]["m"].fill_(9), live["state"][0]["step"].fill_(9)
    live["rows"][0].fill(9)
    live["state"][1] = "new"
    assert frozen["weight"].eq(1).all() and frozen["state"][0]["m"].eq(1).all() and frozen["state"][0]["step"] == 1
    assert frozen["rows"][0].tolist() == [1, 1] and frozen["rows"][1] == (1, None, "x") and list(frozen["state"]) == [0]


def test_a_snapshot_is_saved_as_what_it_was_taken_of(tmp_path):
    live = tree(0.1)
    save_tree(live, tmp_path / "live")
    save_tree(snapshot(live), tmp_path / "frozen")
    for suffix in (".json", ".safetensors"):
        assert (tmp_path / f"live{suffix}").read_bytes() == (tmp_path / f"frozen{suffix}").read_bytes()


def test_tied_tensors_stay_tied():
    frozen = snapshot(tree())
    assert frozen["weight"] is frozen["tied"]


def test_an_earlier_snapshot_lends_its_memory():
    first = snapshot(tree(1.0))
    addresses = [first["weight"].data_ptr(), first["state"][0]["m"].data_ptr()]
    second = snapshot(tree(2.0), reuse=first)
    assert [second["weight"].data_ptr(), second["state"][0]["m"].data_ptr()] == addresses
    assert second["weight"].eq(2).all() and second["state"][0]["m"].eq(2).all()


@pytest.mark.parametrize(
    "other",
    [
        None,
        {},
        {"a": torch.zeros(3), "b": torch.zeros(2)},
        {"a": torch.zeros(2, dtype=torch.float64), "b": 3},
        [torch.zeros(2), torch.zeros(2)],
    ],
)
def test_an_earlier_snapshot_of_something_else_does_no_harm(other):
    live = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])}
    frozen = snapshot(live, reuse=other)
    assert frozen["a"].tolist() == [1, 2] and frozen["b"].tolist() == [3, 4]


def test_tensors_that_were_tied_before_do_not_overwrite_each_other():
    one = torch.zeros(2)
    before = snapshot({"a": one, "b": one})
    frozen = snapshot({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])}, reuse=before)
    assert frozen["a"].tolist() == [1, 2] and frozen["b"].tolist() == [3, 4]


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    store, writer, may_write = Store(tmp_path), AsyncWriter(), threading.Event()
    weight = torch.zeros(1000)
    frozen = snapshot({"w": weight})

    def write():
        temp = store.begin(1)
        assert may_write.wait(10)
        save_tree(frozen, temp / "state")
        return store.commit(temp)

    writer.submit(write)
    weight.fill_(1)  # the next update, while the thread waits
    assert writer.busy and store.checkpoints() == []
    may_write.set()
    path = writer.wait()
    assert not writer.busy and path == store.path(1) and store.verify(path) == []
    assert load_tree(path / "state")["w"].sum() == 0


def test_one_job_runs_at_a_time():
    writer, running, most = AsyncWriter(), [], []

    def job(number):
        running.append(number)
        most.append(len(running))
        time.sleep(0.01)
        running.remove(number)

    for number in range(5):
        writer.submit(lambda number=number: job(number))
    writer.wait()
    assert most == [1] * 5


def test_an_error_surfaces_at_the_next_call_and_only_once():
    writer = AsyncWriter()

    def fail():
        raise OSError("disk on fire")

    ran = []
    writer.submit(fail)
    with pytest.raises(OSError, match="disk on fire"):
        writer.submit(lambda: ran.append(1))
    assert ran == [] and writer.wait() is None
    writer.submit(lambda: ran.append(2))
    writer.wait()
    assert ran == [2]
    writer.submit(fail)
    with pytest.raises(OSError, match="disk on fire"):
        writer.wait()


def test_a_result_is_given_once():
    writer = AsyncWriter()
    assert writer.wait() is None
    writer.submit(lambda: "path")
    assert writer.wait() == "path" and writer.wait() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_snapshot_of_device_tensors_is_complete_when_it_returns(tmp_path):
    live = {"w": torch.arange(10_000_000.0, device="cuda"), "half": torch.ones(3, device="cuda", dtype=torch.bfloat16)}
    frozen = None
    for _ in range(2):  # fresh pinned memory, then the same again
        live["w"].add_(1)
        expected = live["w"].cpu()
        frozen = snapshot(live, reuse=frozen)
        live["w"].sub_(1)
        assert frozen["w"].device.type == "cpu" and frozen["w"].is_pinned() and torch.equal(frozen["w"], expected)
    save_tree(live, tmp_path / "live")
    assert torch.equal(load_tree(tmp_path / "live")["w"], live["w"].cpu())
