"""What happens to all when something happens to one: the job ends soon, and the last thing on the screen is why."""

import re
import time

import pytest

from tests.distributed import jobs

BEFORE: list[str] = []  # a program that runs the one after it
FAULTY = str(jobs.ROOT / "tests" / "distributed" / "faulty.py")


def suffer(act, out, mode="ddp"):
    """(the finished program, seconds from the fault to its end)."""
    done = jobs.torchrun(2, *BEFORE, FAULTY, str(out), act, mode)
    ended = time.time()
    assert done.returncode != 0
    happened = re.search(r"^at ([\d.]+)$", done.stderr, re.MULTILINE)
    assert happened, done.stderr[-4000:]
    return done, ended - float(happened[1])


def root_cause(text):
    return text.rpartition("Root Cause (first observed failure)")[2]


@pytest.mark.rotated("ends")
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_the_error_of_the_process_that_failed_is_shown_last(mode, tmp_path):
    done, seconds = suffer("raises", tmp_path, mode)
    assert seconds < 30
    cause = root_cause(done.stderr)
    assert "the reward file has no row 7" in cause and "in raises" in cause and "rank      : 1" in cause


@pytest.mark.rotated("ends")
def test_a_killed_process_ends_the_job(tmp_path):
    done, seconds = suffer("is_killed", tmp_path)
    assert seconds < 30
    cause = root_cause(done.stderr)
    assert "rank      : 1" in cause and "SIGKILL" in cause


@pytest.mark.rotated
@pytest.mark.parametrize("mode", ["ddp", "fsdp", "device"])
def test_a_process_that_hangs_is_found_by_the_others(mode, tmp_path):
    done, seconds = suffer("is_stuck", tmp_path, mode)
    assert seconds < 6 + 30
    stacks = {rank: (tmp_path / "hang" / f"rank-{rank}.txt").read_text() for rank in (0, 1)}
    assert "it did not wait for the others" in stacks[1] and "in is_stuck" in stacks[1]
    where, place = ("what the device computes", "in read") if mode == "device" else ("", "in train_on_window")
    assert f"it waited in {where}" in stacks[0] and place in stacks[0]
    place = (
        r"rank 1 did not wait for the others \(step 2, from batch 2 of its epoch, wait number \d+\): it is at is_stuck "
        r"\(distributed/faulty.py:\d+\), called by "
    )
    place += r"on_step_begin \(distributed/faulty.py:\d+\)"
    for text in (done.stderr, root_cause(done.stderr)):
        assert "rank 0 has waited 6 s for the others in" in text
        assert re.search(place, text) and str(tmp_path / "hang") in text
