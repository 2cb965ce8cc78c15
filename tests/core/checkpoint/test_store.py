"""`Store`: a checkpoint is there whole or not at all, and damage that comes later is found and named."""

import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import xxhash

from posttrain.core import files
from posttrain.core.checkpoint import blocks, manifest, store
from posttrain.core.checkpoint.codec import load_tree, save_tree
from posttrain.core.checkpoint.store import MissingCheckpointError, Store, get_last_checkpoint
from posttrain.core.errors import CheckpointError
from posttrain.core.files import DiskFullError, check_space, directory_bytes
from tests import programs


def save(checkpoints, step, value=None, **kwargs):
    temp = checkpoints.begin(step)
    save_tree({"w": torch.full((64,), float(step if value is None else value))}, temp / "state")
    (temp / "nested" / "deep").mkdir(parents=True)
    (temp / "nested" / "deep" / "notes.txt").write_text(f"step {step}")
    (temp / "nothing.txt").touch()
    return checkpoints.commit(temp, **kwargs)


def names(directory):
    return sorted(path.name for path in Path(directory).iterdir())


@pytest.fixture
def checkpoints(tmp_path):
    return Store(tmp_path / "out")


# ---- committing ----


def test_a_checkpoint_has_its_name_only_once_committed(checkpoints):
    temp = checkpoints.begin(3)
    (temp / "a").write_text("x")
    assert checkpoints.checkpoints() == [] and temp.name.startswith(".tmp-checkpoint-3")
    assert checkpoints.commit(temp) == checkpoints.path(3) == checkpoints.output_dir / "checkpoint-3"
    assert names(checkpoints.output_dir) == ["checkpoint-3"]
    assert checkpoints.verify(checkpoints.path(3)) == []


def test_the_manifest_says_what_is_in_the_checkpoint(checkpoints):
    path = save(checkpoints, 3, extra={"run": "a", "world_size": 2})
    read = manifest.read_manifest(path)
    assert (read["step"], read["extra"]) == (3, {"run": "a", "world_size": 2})
    assert set(read["files"]) == {"state.json", "state.safetensors", "nested/deep/notes.txt", "nothing.txt"}
    digests = {"sha256": [hashlib.sha256(b"step 3").hexdigest()], "xxh128": [xxhash.xxh128_hexdigest(b"step 3")]}
    assert read["files"]["nested/deep/notes.txt"] == {"size": 6} | digests


def test_a_large_file_is_hashed_in_blocks(checkpoints, monkeypatch):
    monkeypatch.setattr(manifest, "BLOCK", 2**20)
    content = random.Random(0).randbytes(2**21 + 5)
    temp = checkpoints.begin(1)
    (temp / "large").write_bytes(content)
    path = checkpoints.commit(temp)
    monkeypatch.undo()  # the size of a block is part of the manifest
    expected = [hashlib.sha256(content[i : i + 2**20]).hexdigest() for i in (0, 2**20, 2**21)]
    assert manifest.read_manifest(path)["files"]["large"]["sha256"] == expected
    assert checkpoints.verify(path) == []
    for position in (5, 2**20 + 5, 2**21 + 4):
        (path / "large").write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        for kind, name in (("xxh128", "XXH128"), ("sha256", "SHA-256")):
            (problem,) = checkpoints.verify(path, kind=kind)
            assert f"its {name} is not" in problem


def test_files_are_on_the_disk_before_the_name_is(checkpoints, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def record_rename(self, target):
        events.append(f"rename to {target.name}")
        rename(self, target)

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc to tell which file a descriptor is")
    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record_rename)
    temp = checkpoints.begin(1)
    (temp / "sub").mkdir()
    (temp / "sub" / "b").write_text("b")
    (temp / "a").write_text("a")
    checkpoints.commit(temp)
    assert set(events[:2]) == {"a", "b"}
    assert events[2:] == [
        "manifest.json",
        "sub",
        temp.name,
        "rename to checkpoint-1",
        "out",
        checkpoints.output_dir.parent.name,
    ]


def test_files_of_other_processes_are_taken_in(checkpoints):
    temp = checkpoints.begin(1)
    script = "import sys, pathlib; pathlib.Path(sys.argv[1], 'rank-1').write_text('hello')"
    subprocess.run([sys.executable, "-c", script, str(temp)], check=True)
    assert set(manifest.read_manifest(checkpoints.commit(temp))["files"]) == {"rank-1"}


def test_committing_a_step_again_replaces_it(checkpoints):
    save(checkpoints, 1, value=10)
    path = save(checkpoints, 1, value=20)
    assert load_tree(path / "state")["w"][0] == 20
    assert names(checkpoints.output_dir) == ["checkpoint-1"] and checkpoints.verify(path) == []


def test_a_commit_that_fails_leaves_the_earlier_checkpoint_of_that_step(checkpoints, monkeypatch):
    path = save(checkpoints, 1, value=10)
    rename = Path.rename

    def fail(self, target):
        if self.name.startswith(".tmp"):
            raise OSError(errno.EIO, "broken")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="broken"):
        save(checkpoints, 1, value=20)
    assert load_tree(path / "state")["w"][0] == 10
    assert names(checkpoints.output_dir) == ["checkpoint-1"] and checkpoints.verify(path) == []


def test_begin_starts_from_an_empty_directory_and_abort_removes_it(checkpoints):
    (checkpoints.begin(1) / "left over").touch()
    temp = checkpoints.begin(1)
    assert names(temp) == []
    checkpoints.abort(temp)
    checkpoints.abort(temp)
    assert names(checkpoints.output_dir) == []


def test_what_is_no_file_is_refused_and_nothing_is_left(checkpoints, tmp_path):
    (tmp_path / "secret").write_text("x")
    temp = checkpoints.begin(1)
    (temp / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="link is neither a file nor a directory"):
        checkpoints.commit(temp)
    assert names(checkpoints.output_dir) == []


def test_only_what_begin_made_can_be_committed(checkpoints, tmp_path):
    with pytest.raises(ValueError, match="begin"):
        checkpoints.commit(tmp_path)


def test_extra_that_is_not_json_is_refused_and_nothing_is_left(checkpoints):
    with pytest.raises(TypeError):
        save(checkpoints, 1, extra={"x": object()})
    assert names(checkpoints.output_dir) == []


# ---- killing ----

# Importing torch takes longer than all the rest: it is done once, and each victim is a fork.
VICTIMS = """
import os, sys, torch
from posttrain.core.checkpoint.codec import save_tree
from posttrain.core.checkpoint.store import Store
torch.set_num_threads(1)

def save_for_ever(store, step):
    while True:
        step += 1
        for value in (1, 2):  # the second one replaces the first
            temp = store.begin(step)
            for name in ("model", "optimizer"):
                save_tree({"w": torch.full((20_000,), float(value)), "step": step}, temp / name)
            store.commit(temp)
        store.rotate(2)

for line in sys.stdin:
    victim = os.fork()
    if not victim:
        save_for_ever(Store(sys.argv[1]), int(line))
    print(victim, flush=True)
    os.waitpid(victim, 0)
    print("dead", flush=True)
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_no_kill_leaves_a_checkpoint_that_is_not_whole(tmp_path):
    rng, checkpoints, step, hidden = random.Random(0), Store(tmp_path), 0, 0
    save(checkpoints, 0)
    command = [sys.executable, "-c", VICTIMS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as forker:
        for _ in range(40):
            print(step, file=forker.stdin, flush=True)
            victim = int(forker.stdout.readline())
            time.sleep(rng.uniform(0, 0.1))
            os.kill(victim, signal.SIGKILL)
            assert forker.stdout.readline() == "dead\n"
            hidden += any(name.startswith(".") for name in names(tmp_path))
            newest = checkpoints.resolve(True)
            assert not any(name.startswith(".") for name in names(tmp_path))
            for path in checkpoints.checkpoints():
                assert checkpoints.verify(path) == []
            assert int(newest.name.removeprefix("checkpoint-")) >= step  # no kill costs a checkpoint that was there
            step = int(newest.name.removeprefix("checkpoint-"))
        forker.stdin.close()
    assert hidden > 10 and step > 10  # else no kill met a save, or no save was ever finished


@pytest.mark.long
@pytest.mark.parametrize("moment", ["old is hidden", "new is in place"])
def test_a_death_while_replacing_loses_neither_checkpoint(moment, checkpoints):
    script = f"""
import os, pathlib, sys
from posttrain.core.checkpoint.store import Store
store = Store(sys.argv[1])
for value in "ab":
    temp = store.begin(1)
    (temp / "value").write_text(value)
    if value == "b":
        rename = pathlib.Path.rename
        def die(self, target):
            if {moment == "new is in place"}: rename(self, target)
            if self.name.startswith(".tmp"): os._exit(9)
            return rename(self, target)
        pathlib.Path.rename = die if {moment == "old is hidden"} else rename
        if {moment == "new is in place"}:
            from posttrain.core import files as module
            module.sync_directory = lambda path: os._exit(9)
    store.commit(temp)
"""
    assert programs.run(["-c", script, str(checkpoints.output_dir)]).returncode == 9
    assert any(name.startswith(".old") for name in names(checkpoints.output_dir))
    newest = checkpoints.resolve(True)
    assert (newest / "value").read_text() == ("a" if moment == "old is hidden" else "b")
    assert checkpoints.verify(newest) == [] and names(checkpoints.output_dir) == ["checkpoint-1"]


# ---- damage ----


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "first bit flipped": lambda path: flip(path, 0),
    "a bit flipped": lambda path: flip(path, path.stat().st_size // 2),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["state.json", "state.safetensors", "nested/deep/notes.txt", "manifest.json"])
def test_every_damage_is_found_named_and_passed_over(name, damage, checkpoints, caplog):
    older, newer = save(checkpoints, 1), save(checkpoints, 2)
    DAMAGES[damage](newer / name)
    problems = checkpoints.verify(newer)
    assert len(problems) == 1 and name in problems[0]
    assert checkpoints.resolve(True) == checkpoints.newest_whole() == older
    assert caplog.records[0].levelname == "WARNING" and str(newer) in caplog.text and problems[0] in caplog.text
    with pytest.raises(CheckpointError) as error:
        checkpoints.resolve(newer)
    assert problems[0] in str(error.value)


def test_any_flipped_byte_of_the_manifest_that_changes_its_meaning_is_found(checkpoints):
    path = save(checkpoints, 1, extra={"note": "x", "tokens": 12})
    content = (path / "manifest.json").read_bytes()
    for position in range(len(content)):
        (path / "manifest.json").write_bytes(
            content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
        )
        assert checkpoints.verify(path, deep=False) != [], content[position - 9 : position + 9]


def test_a_shallow_look_reads_no_file_but_sees_its_size(checkpoints):
    path = save(checkpoints, 1)
    flip(path / "state.safetensors", -1)
    assert checkpoints.verify(path, deep=False) == [] and len(checkpoints.verify(path)) == 1
    DAMAGES["cut"](path / "state.safetensors")
    assert len(checkpoints.verify(path, deep=False)) == 1


def test_each_damaged_file_gets_a_sentence(checkpoints):
    path = save(checkpoints, 1)
    DAMAGES["missing"](path / "state.json")
    DAMAGES["a bit flipped"](path / "state.safetensors")
    problems = checkpoints.verify(path)
    assert len(problems) == 2 and "state.json is missing" in problems[0] and "XXH128" in problems[1]


def test_files_that_a_callback_adds_are_no_damage(checkpoints):
    path = save(checkpoints, 1)
    (path / "metrics.txt").write_text("added later")
    assert checkpoints.verify(path) == []


def test_a_file_that_cannot_be_read_is_named(checkpoints, monkeypatch):
    path = save(checkpoints, 1)

    def fail(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")  # as a failing disk does: without a file name

    monkeypatch.setattr(blocks, "open", fail, raising=False)
    (problem,) = checkpoints.verify(path)
    assert str(path) in problem and problem.endswith(" cannot be read: Input/output error.")


def rewrite_manifest(path, change):
    """Change the manifest as someone would who knows how to seal it."""
    body = json.loads((path / "manifest.json").read_text())
    del body["sha256"]
    change(body)
    (path / "manifest.json").write_text(json.dumps(body | {"sha256": manifest._seal(body)}))


@pytest.mark.parametrize("how", ["dots", "absolute", "backslashes", "through a link", "a link"])
def test_a_name_that_leads_out_of_the_checkpoint_is_refused(how, checkpoints, tmp_path):
    path = save(checkpoints, 1)
    (tmp_path / "secret").write_text("step 1")
    name = {
        "dots": "nested/../../../secret",
        "absolute": str(tmp_path / "secret"),
        "backslashes": "..\\..\\secret",
        "through a link": "up/secret",
        "a link": "linked",
    }[how]
    (path / "up").symlink_to(tmp_path)
    (path / "linked").symlink_to(tmp_path / "secret")
    rewrite_manifest(path, lambda body: body["files"].update({name: body["files"]["nested/deep/notes.txt"]}))
    problems = checkpoints.verify(path)
    assert len(problems) == 1 and "is outside of the checkpoint" in problems[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(files=[]),
        lambda body: body.update(files={"a": 3}),
        lambda body: body["files"]["state.json"].update(size="9"),
        lambda body: body["files"]["state.json"].update(sha256=None),
        lambda body: body["files"]["state.json"].update(xxh128=None),
        lambda body: body.update(block=1),
        lambda body: body.update(version=4),
        lambda body: body.update(format="other"),
        lambda body: body.pop("written"),
    ],
)
def test_a_manifest_of_the_wrong_form_is_a_damage_and_no_crash(change, checkpoints):
    path = save(checkpoints, 1)
    rewrite_manifest(path, change)
    assert len(checkpoints.verify(path)) == 1


# ---- finding ----


def test_checkpoints_are_listed_by_step_whoever_wrote_them(checkpoints):
    for step in (100, 20, 3):
        save(checkpoints, step)
    (checkpoints.output_dir / "checkpoint-50").mkdir()
    (checkpoints.output_dir / "checkpoint-best").mkdir()
    (checkpoints.output_dir / "checkpoint-7").write_text("a file")
    assert [path.name for path in checkpoints.checkpoints()] == [f"checkpoint-{n}" for n in (3, 20, 50, 100)]
    assert Store(checkpoints.output_dir / "nowhere").checkpoints() == []


def test_a_checkpoint_of_another_trainer_is_passed_over_and_said_to_be_one(checkpoints, caplog):
    mine, foreign = save(checkpoints, 1), checkpoints.output_dir / "checkpoint-2"
    foreign.mkdir()
    (foreign / "trainer_state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no manifest.json, so it is not a checkpoint"):  # nobody's
        checkpoints.resolve(foreign)
    (foreign / "training_args.bin").write_bytes(b"a pickle")
    assert checkpoints.resolve(True) == mine
    assert "written by another trainer" in caplog.text
    assert checkpoints.resolve(foreign) == foreign  # named, it is taken for what can be read of it
    DAMAGES["missing"](mine / "state.json")
    with pytest.raises(
        MissingCheckpointError, match=r"none of 2 is whole. 1 of them are another trainer's.*checkpoint-2'"
    ):
        checkpoints.resolve(True)
    (foreign / "rank-0.json").write_text("{}")  # ours, without its manifest
    with pytest.raises(CheckpointError, match=r"no manifest.json"):
        checkpoints.resolve(foreign)


def test_without_a_whole_checkpoint_resuming_says_so(checkpoints):
    for error in (CheckpointError, ValueError):
        with pytest.raises(error, match=r"No valid checkpoint found in output directory \(.*out\)"):
            checkpoints.resolve(True)
    DAMAGES["missing"](save(checkpoints, 1) / "state.json")
    with pytest.raises(MissingCheckpointError, match="none of 1 is whole"):
        checkpoints.resolve(True)


def test_a_path_is_taken_as_text_or_path_and_only_if_it_is_a_checkpoint(checkpoints):
    path = save(checkpoints, 5)
    assert checkpoints.resolve(str(path)) == checkpoints.resolve(path) == path
    with pytest.raises(ValueError, match=r"Can't find a valid checkpoint at .*checkpoint-6. There are .*checkpoint-5"):
        checkpoints.resolve(checkpoints.output_dir / "checkpoint-6")
    with pytest.raises(CheckpointError, match=r"a directory of checkpoints; name one of them: .*checkpoint-5"):
        checkpoints.resolve(checkpoints.output_dir)
    for wrong in (False, None, 5):
        with pytest.raises(TypeError, match="True or the path"):
            checkpoints.resolve(wrong)


def test_a_run_started_afresh_in_a_used_directory_is_pointed_out(checkpoints, caplog):
    newest = save(checkpoints, 9)
    assert checkpoints.resolve(True) == newest and not caplog.records
    later = save(checkpoints, 4)
    assert checkpoints.resolve(True) == newest
    assert str(later) in caplog.text and "perhaps by a new run in the same directory" in caplog.text


def test_get_last_checkpoint_gives_the_highest_step_as_text(checkpoints):
    with pytest.raises(FileNotFoundError):
        get_last_checkpoint(checkpoints.output_dir)
    checkpoints.output_dir.mkdir()
    assert get_last_checkpoint(checkpoints.output_dir) is None
    for step in (9, 10):
        save(checkpoints, step)
    assert get_last_checkpoint(str(checkpoints.output_dir)) == str(checkpoints.output_dir / "checkpoint-10")


# ---- rotating and cleaning ----


@pytest.mark.parametrize(
    ("limit", "keep", "left"),
    [
        (None, [], [1, 2, 3, 10]),
        (0, [], [1, 2, 3, 10]),
        (9, [], [1, 2, 3, 10]),
        (3, [], [2, 3, 10]),
        (1, [], [10]),
        (2, [1], [1, 10]),
        (1, [2], [2, 10]),
        (2, [1, 2], [1, 2, 10]),
    ],
)
def test_rotation_keeps_the_newest_and_what_it_is_told_to(limit, keep, left, checkpoints):
    for step in (1, 2, 3, 10):
        save(checkpoints, step)
    removed = checkpoints.rotate(limit, keep=(str(checkpoints.path(step)) for step in keep))
    assert [path.name for path in checkpoints.checkpoints()] == [f"checkpoint-{step}" for step in left]
    assert removed == [checkpoints.path(step) for step in (1, 2, 3, 10) if step not in left]
    checkpoints.settle()
    assert names(checkpoints.output_dir) == sorted(f"checkpoint-{step}" for step in left)


def test_rotation_never_deletes_the_only_whole_one(checkpoints):
    for step in (1, 2, 3):
        save(checkpoints, step)
    for step in (2, 3):
        DAMAGES["cut"](checkpoints.path(step) / "state.json")
    checkpoints.rotate(1)
    assert checkpoints.newest_whole() == checkpoints.path(1)


def test_rotation_never_deletes_what_was_just_written(checkpoints):
    for step in (500, 1000, 100):  # a run of 1000 steps, then one that starts afresh
        save(checkpoints, step)
    assert checkpoints.rotate(2) == [checkpoints.path(500)]
    save(checkpoints, 200)
    assert checkpoints.rotate(2) == [checkpoints.path(100)]


@pytest.mark.long
def test_deleting_takes_no_time_of_training_and_is_done_before_the_next_save(checkpoints, monkeypatch):
    save(checkpoints, 1), save(checkpoints, 2)
    real, may_delete = files.remove, threading.Event()
    monkeypatch.setattr(files, "remove", lambda path: (may_delete.wait(10), real(path)))
    assert checkpoints.rotate(1) == [checkpoints.path(1)]
    assert any(name.startswith(".trash-checkpoint-1.") for name in names(checkpoints.output_dir))
    may_delete.set()
    begun = checkpoints.begin(3)
    assert names(checkpoints.output_dir) == [begun.name, "checkpoint-2"]


def test_what_is_half_deleted_does_not_carry_the_name(checkpoints, monkeypatch):
    save(checkpoints, 1), save(checkpoints, 2)
    seen = []
    monkeypatch.setattr("shutil.rmtree", lambda path, **kwargs: seen.append(Path(path).name))
    checkpoints.rotate(1)
    checkpoints.settle()
    assert len(seen) == 1 and seen[0].startswith(".trash-checkpoint-1.")
    assert [path.name for path in checkpoints.checkpoints()] == ["checkpoint-2"]


def test_what_cannot_be_deleted_stays_and_is_warned_about(checkpoints, monkeypatch, caplog):
    save(checkpoints, 1), save(checkpoints, 2)

    def fail(self, target):
        raise PermissionError("not yours")

    monkeypatch.setattr(Path, "rename", fail)
    assert checkpoints.rotate(1) == []
    assert len(checkpoints.checkpoints()) == 2 and "not yours" in caplog.text


def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_only_what_dead_runs_left_is_removed(checkpoints):
    host, out = store._HOST, checkpoints.output_dir
    mine = checkpoints.begin(1)
    dead = [f".tmp-checkpoint-2.{host}.{dead_pid()}.aa", f".trash-checkpoint-3.{host}.{os.getpid()}.bb"]
    alive = [f".tmp-checkpoint-4.{host}.{os.getppid()}.cc", ".tmp-checkpoint-5.elsewhere.1.dd", ".tmp-other", "logs"]
    for name in (*dead, *alive):
        (out / name).mkdir()
    checkpoints.clean()
    assert names(out) == sorted([mine.name, *alive])


def test_what_another_machine_left_is_removed_after_a_day(checkpoints, monkeypatch):
    mine = checkpoints.begin(1)
    (checkpoints.output_dir / ".tmp-checkpoint-5.elsewhere.1.dd").mkdir()
    now = time.time()
    monkeypatch.setattr(store.time, "time", lambda: now + 23 * 3600)
    checkpoints.clean()
    assert len(names(checkpoints.output_dir)) == 2
    monkeypatch.setattr(store.time, "time", lambda: now + 25 * 3600)
    checkpoints.clean()
    assert names(checkpoints.output_dir) == [mine.name]


# ---- a full disk ----


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["fsync", "write_text", "mkdir"])
def test_a_full_disk_is_called_one_and_nothing_is_left(call, code, checkpoints, monkeypatch):
    older = save(checkpoints, 1)

    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os if call == "fsync" else Path, call, fail)
        with pytest.raises(DiskFullError) as error:
            temp = checkpoints.begin(2)
            (temp / "weights").write_bytes(bytes(5000))
            checkpoints.commit(temp)
    message = str(error.value)
    assert "The disk is full" in message and str(checkpoints.output_dir) in message and "free" in message
    assert "needed" in message or "5,000 bytes" in message
    assert names(checkpoints.output_dir) == ["checkpoint-1"] and checkpoints.resolve(True) == older


@pytest.mark.parametrize("text", ["I/O error: No space left on device (os error 28)", "Disk quota exceeded"])
def test_a_full_disk_is_recognised_in_what_libraries_raise(text, checkpoints):
    from safetensors import SafetensorError

    temp = checkpoints.begin(1)
    with pytest.raises(DiskFullError, match="The disk is full"), checkpoints.writing(temp):
        raise SafetensorError(text)
    with pytest.raises(SafetensorError, match="other"), checkpoints.writing(temp):
        raise SafetensorError("other")


@pytest.fixture
def small_disk(tmp_path):
    directory = tmp_path / "small"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(directory)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("needs the right to mount a tmpfs")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def test_a_disk_that_is_really_full(small_disk):
    checkpoints = Store(small_disk)

    def attempt(step):
        temp = checkpoints.begin(step)
        try:
            with checkpoints.writing(temp):
                save_tree({"w": torch.zeros(25_000)}, temp / "state")  # 100 kB: two fit, three do not
            checkpoints.commit(temp)
        except DiskFullError:
            checkpoints.abort(temp)
            raise

    attempt(1), attempt(2)
    with pytest.raises(DiskFullError, match="about 100,.* bytes needed"):
        attempt(3)
    assert names(small_disk) == ["checkpoint-1", "checkpoint-2"]
    assert checkpoints.resolve(True) == checkpoints.path(2)
    checkpoints.rotate(1)
    attempt(3)
    assert checkpoints.resolve(True) == checkpoints.path(3)


def test_room_is_measured_before_it_is_needed(tmp_path):
    (tmp_path / "a").write_bytes(bytes(1000))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b").write_bytes(bytes(234))
    assert directory_bytes(tmp_path) == 1234
    assert check_space(tmp_path / "not" / "there" / "yet", 1000) is None
    sentence = check_space(tmp_path, 10**18)
    assert str(tmp_path) in sentence and "1000000000.000 GB are needed for a checkpoint" in sentence
    with pytest.raises(
        DiskFullError, match="about 2000000000.000 GB are needed for 3 checkpoints.*weights of one.*5000"
    ):
        check_space(tmp_path, 2 * 10**18, 3, 5 * 10**12 * 1000)


# ---- several runs in one directory ----


def of_run(store, run, *steps):
    for step in steps:
        temp = store.begin(step)
        (temp / "state.json").write_text("{}")
        store.commit(temp, {"run": run})


def left(store):
    return [int(path.name.removeprefix("checkpoint-")) for path in store.checkpoints()]


def test_true_follows_the_run_that_saved_last_and_no_other(checkpoints, caplog):
    of_run(checkpoints, "old", 10, 20)
    of_run(checkpoints, "new", 2, 6)
    assert checkpoints.resolve(True) == checkpoints.path(6) and not caplog.records
    DAMAGES["cut"](checkpoints.path(6) / "state.json")
    assert checkpoints.resolve(True) == checkpoints.path(2) and "Passing over" in caplog.text
    DAMAGES["cut"](checkpoints.path(2) / "state.json")
    with pytest.raises(CheckpointError, match=r"of the run that saved last\. .* set a path: .*checkpoint-20"):
        checkpoints.resolve(True)


def test_rotation_keeps_the_newest_of_each_run_and_counts_its_own(checkpoints):
    of_run(checkpoints, "old", 10, 20)
    of_run(checkpoints, "new", 2, 4, 6)
    checkpoints.rotate(2)
    assert left(checkpoints) == [4, 6, 20]
    checkpoints.rotate(1)
    assert left(checkpoints) == [6, 20]
