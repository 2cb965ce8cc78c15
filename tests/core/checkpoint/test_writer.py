"""Large files in blocks, and saves that go on in the background: the same bytes, hashed right, whole or not at all."""

import errno
import hashlib
import os
import threading

import numpy as np
import pytest
import torch
import xxhash

from posttrain.core.checkpoint import blocks
from posttrain.core.checkpoint.blocks import Memory, Part
from posttrain.core.checkpoint.codec import load_tree, save_tree
from posttrain.core.checkpoint.store import Store
from posttrain.core.checkpoint.transaction import Saver


def tree(value=0.0):
    weight = torch.nn.Parameter(torch.full((3, 4), value))
    state = {0: {"m": torch.full((4, 3), value).T, "step": torch.tensor(value)}}
    large = torch.arange(600_000, dtype=torch.float32) + value  # 2.4 MB
    halves = torch.full((1001, 333), value, dtype=torch.bfloat16)[:, ::2]  # not contiguous
    rows = [np.full(2, value), (1, None, "x")]
    return {"weight": weight, "tied": weight.detach(), "state": state, "large": large, "halves": halves, "rows": rows}


def written(directory, content, later):
    part = Part(directory, Memory(), later)
    with part.writing():
        save_tree(content, directory / "state")
    part.finish()
    return part


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 64 KiB: the file of `tree` has dozens of them, the last not full."""
    monkeypatch.setattr(blocks, "BLOCK", 2**16)


# ---- the bytes ----


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("direct", [True, False])
def test_blocks_make_the_file_that_one_write_makes(later, direct, small_blocks, tmp_path, monkeypatch):
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    (tmp_path / "blocks").mkdir()
    save_tree(tree(0.1), tmp_path / "state")
    part = written(tmp_path / "blocks", tree(0.1), later)
    content = (tmp_path / "state.safetensors").read_bytes()
    assert (tmp_path / "blocks" / "state.safetensors").read_bytes() == content
    assert len(content) > 2.5e6 and len(content) % 4096
    pieces = [content[i : i + 2**16] for i in range(0, len(content), 2**16)]
    expected = [
        {"sha256": hashlib.sha256(piece).hexdigest(), "xxh128": xxhash.xxh128_hexdigest(piece)} for piece in pieces
    ]
    assert part.digests == {"state.safetensors": expected}


def test_a_file_system_without_direct_writing_is_written_through_the_cache(small_blocks, tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, *rest, **more):
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    part = written(tmp_path, tree(3.0), later=False)
    assert part.digests and load_tree(tmp_path / "state")["large"][-1] == 600_002


@pytest.mark.parametrize("later", [False, True])
def test_a_disk_that_fills_up_is_an_error_and_closes_the_file(later, small_blocks, tmp_path, monkeypatch):
    real, calls = os.pwrite, []

    def fail(file, block, offset):
        calls.append(offset)
        if offset >= 2**20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, block, offset)

    monkeypatch.setattr(os, "pwrite", fail)
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path, tree(), later)
    assert before is None or set(os.listdir("/proc/self/fd")) == before


def test_no_block_is_written_where_there_is_no_room_for_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "free_bytes", lambda directory: 2_000_000)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path, tree(), later=False)
    assert not (tmp_path / "state.safetensors").exists()


def test_an_image_does_not_change_with_what_it_was_taken_of(tmp_path):
    live = tree(1.0)
    part = Part(tmp_path, Memory(), later=True)
    with part.writing():
        save_tree(live, tmp_path / "state")
    assert not (tmp_path / "state.safetensors").exists()
    for tensor in (live["weight"].data, live["state"][0]["m"], live["large"], live["halves"]):
        tensor.fill_(9)
    part.finish()
    loaded = load_tree(tmp_path / "state")
    assert loaded["weight"].eq(1).all() and loaded["weight"].data_ptr() == loaded["tied"].data_ptr()
    assert loaded["state"][0]["m"].eq(1).all() and loaded["large"][5] == 6 and loaded["halves"].eq(1).all()


def test_memory_is_used_again_and_grows_where_it_must():
    memory = Memory()
    first = memory.take("a", 10_000)
    assert first.data_ptr() % 4096 == 0 and memory.take("a", 5_000).data_ptr() == first.data_ptr()
    assert memory.take("b", 5_000).data_ptr() != first.data_ptr()
    assert len(memory.take("a", 50_000)) >= 50_000 and memory.bytes == 53_248 + 8_192


# ---- saving in the background ----


def save(store, step, content, later=True, saver=None):
    saver = saver or Saver(store)
    saver.save(step, lambda temp: save_tree(content, temp / "state"), later)
    return saver


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    store, may_write, live = Store(tmp_path), threading.Event(), tree(1.0)
    finish = Part.finish
    monkeypatch.setattr(Part, "finish", lambda part: (may_write.wait(10), finish(part)))
    saver = save(store, 1, live)
    live["large"].fill_(7)  # the next update, while the thread waits
    assert saver.pending == 1 and saver.settle(wait=False) is None and store.checkpoints() == []
    may_write.set()
    outcome = saver.settle()
    assert (outcome.step, outcome.path) == (1, store.path(1)) and store.verify(store.path(1)) == []
    assert load_tree(store.path(1) / "state")["large"][3] == 4
    assert saver.pending is None and saver.settle() is None


def test_a_save_is_settled_before_the_next_begins(tmp_path):
    saver = save(Store(tmp_path), 1, tree())
    with pytest.raises(RuntimeError, match="step 1 is not settled"):
        save(None, 2, tree(), saver=saver)
    saver.settle()


@pytest.mark.parametrize("later", [False, True])
def test_a_full_disk_costs_one_checkpoint_and_no_more(later, tmp_path, monkeypatch, caplog):
    store = Store(tmp_path)
    saver = save(store, 1, tree(1.0), later)
    assert saver.settle().path == store.path(1)
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "pwrite", lambda *args: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device"))
        )
        outcome = save(store, 2, tree(2.0), later, saver).settle()
    assert outcome.step == 2 and outcome.path is None
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "checkpoint-2 was not saved" in warning and "The disk is full" in warning and "tries again" in warning
    assert str(tmp_path) in warning and "needed" in warning
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"] and store.resolve(True) == store.path(1)
    assert save(store, 3, tree(3.0), later, saver).settle().path == store.path(3)


def test_an_error_that_is_no_failing_disk_is_raised_where_it_is_settled(tmp_path, monkeypatch):
    store = Store(tmp_path)
    monkeypatch.setattr(blocks, "digest", lambda view: 1 / 0)
    saver = save(store, 1, tree())
    with pytest.raises(ZeroDivisionError):
        saver.settle()
    assert list(tmp_path.iterdir()) == [] and saver.settle() is None


def test_a_run_that_ends_in_an_error_still_ends_its_save(tmp_path):
    store = Store(tmp_path)
    saver = save(store, 1, tree(1.0))
    assert saver.leave() == store.path(1) and store.verify(store.path(1)) == [] and saver.leave() is None


class Together:
    """`gather` for threads that play the processes of a run."""

    def __init__(self, count):
        self.values, self.barrier = [None] * count, threading.Barrier(count)

    def gather(self, rank):
        def gather(value):
            self.values[rank] = value
            self.barrier.wait(10)
            found = list(self.values)
            self.barrier.wait(10)
            return found

        return gather


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("fails", [None, 0, 2])
def test_processes_write_one_checkpoint_together_and_agree_on_what_it_came_to(later, fails, tmp_path, caplog):
    together, outcomes = Together(3), [None] * 3

    def process(rank):
        def write(temp):
            save_tree({"rank": torch.full((400_000,), float(rank))}, temp / f"rank-{rank}")
            if rank == fails:
                raise OSError(errno.ENOSPC, "No space left on device")

        saver = Saver(Store(tmp_path), rank=rank, world_size=3, gather=together.gather(rank))
        saver.save(4, write, later)
        outcomes[rank] = saver.settle()

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(3)]
    [thread.start() for thread in threads], [thread.join(30) for thread in threads]
    path = tmp_path / "checkpoint-4"
    if fails is None:
        assert [outcome.path for outcome in outcomes] == [path] * 3 and Store(tmp_path).verify(
            path, kind="sha256"
        ) == []
        files = {f"rank-{rank}.{end}" for rank in range(3) for end in ("json", "safetensors")} | {"manifest.json"}
        assert {file.name for file in path.iterdir()} == files
        assert load_tree(path / "rank-2")["rank"][0] == 2
    else:
        assert [outcome.path for outcome in outcomes] == [None] * 3 and list(tmp_path.iterdir()) == []
        (warning,) = [record.getMessage() for record in caplog.records]
        assert f"rank {fails}: DiskFullError" in warning


def test_a_process_that_fails_in_the_background_is_told_to_the_first(tmp_path, monkeypatch, caplog):
    together, outcomes, finish = Together(2), [None] * 2, Part.finish

    def process(rank):
        saver = Saver(Store(tmp_path), rank=rank, world_size=2, gather=together.gather(rank))
        saver.save(4, lambda temp: save_tree({"rank": torch.zeros(400_000)}, temp / f"rank-{rank}"), later=True)
        outcomes[rank] = saver.settle()

    def fail(part):
        if "rank-1.safetensors" in str(part.images[0][0]):
            raise OSError(errno.ENOSPC, "No space left on device")
        finish(part)

    monkeypatch.setattr(Part, "finish", fail)
    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(2)]
    [thread.start() for thread in threads], [thread.join(30) for thread in threads]
    assert [outcome.path for outcome in outcomes] == [None, None] and list(tmp_path.iterdir()) == []
    assert "rank 1: DiskFullError" in caplog.text


def test_a_process_that_never_answers_costs_the_checkpoint(tmp_path, caplog):
    saver = Saver(Store(tmp_path), rank=0, world_size=2, gather=lambda value: [value, value], patience=0.1)
    saver._gather = lambda value: [value] if not isinstance(value, tuple) else [value, (None, None)]
    saver.save(4, lambda temp: save_tree(tree(), temp / "state"), later=True)
    assert saver.settle().path is None and "its files did not come" in caplog.text and list(tmp_path.iterdir()) == []


# ---- devices, and errors ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_image_of_device_tensors_is_complete_when_the_copy_returns(tmp_path):
    live = {"w": torch.arange(10_000_000.0, device="cuda"), "half": torch.ones(3, device="cuda", dtype=torch.bfloat16)}
    saver, store = Saver(Store(tmp_path)), Store(tmp_path)
    for step in (1, 2):  # fresh pinned memory, then the same again
        live["w"].add_(1)
        expected = live["w"].cpu()
        saver.save(step, lambda temp: save_tree(live, temp / "state"), later=True)
        live["w"].sub_(1)
        saver.settle()
        assert torch.equal(load_tree(store.path(step) / "state")["w"], expected)


@pytest.mark.parametrize("kind", ["mps", "xpu", "cuda"])
def test_copies_from_every_kind_of_device_are_waited_for(kind, tmp_path, monkeypatch):
    class Elsewhere(torch.Tensor):  # a host tensor that says it lies on a device: what is checked is who is waited for
        device = torch.device(kind, 0)

    waits = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: waits.append(torch.device(device).type))
    values = torch.arange(10.0)
    source = blocks.Source(b"12345678", [values.as_subclass(Elsewhere)])
    image = torch.empty(source.size, dtype=torch.uint8)
    source.fill(image)
    assert waits == [kind, kind]  # before other threads copy, and when they have
    assert torch.equal(image[8:].view(torch.float32), values)


def test_a_save_that_an_error_cut_short_has_no_result(tmp_path, monkeypatch, caplog):
    store = Store(tmp_path)
    saver = Saver(store)

    def cut(*_):
        raise RuntimeError("DataLoader worker is killed by signal")

    monkeypatch.setattr(store, "commit", cut)
    with pytest.raises(RuntimeError, match="killed by signal"):
        save(store, 1, tree(), False, saver)
    assert saver.pending is None and saver.leave() is None and not caplog.records
