import os
import platform
import subprocess
import sys

import pytest

from posttrain.core import TrainingArguments
from posttrain.core.training import allocator

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")

FAULTS = """
import logging, resource, torch
logging.basicConfig(level="DEBUG")
from posttrain.core.training import allocator
def step():
    x = torch.ones(2**24)  # 64 MiB, which are 16,384 pages
    for _ in range(2):
        y = x * 2
        x = y + x
def faults():
    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
with allocator.freed_memory_kept(False):
    off = faults()
before = faults(), resident()
with allocator.freed_memory_kept(), allocator.freed_memory_kept():
    kept = faults()
print(before[0], kept, off, resident() - before[1])
"""


def faults(**environment):
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environment)
    return [int(word) for word in done.stdout.split()], done.stderr


@pytest.mark.long
@glibc
def test_memory_is_kept_within_the_context_and_given_back_after():
    (before, kept, off, more), said = faults()
    # Faults after the context say nothing: glibc may use holes of the heap, though their pages were given back.
    assert before > 100_000 and kept < before / 4 and off > 100_000
    assert more < 64 * 2**20  # of the 128 MiB and more that were kept
    assert said.count("DEBUG:posttrain.core.training.allocator:Freed memory is kept") == 1


@pytest.mark.rotated
@pytest.mark.long
@glibc
@pytest.mark.parametrize(
    "tuned", [{"MALLOC_TOP_PAD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=4"}], ids=["old", "new"]
)
def test_an_allocator_that_the_user_has_tuned_is_left_alone(tuned):
    (before, kept, *_), said = faults(**tuned)
    assert kept > before / 2 and "Freed" not in said


@pytest.mark.parametrize("wanted", [True, False])
def test_training_on_the_cpu_keeps_memory_unless_told_not_to(wanted, tmp_path, monkeypatch):
    from tests.contract.trainers import TRAINERS

    called = []
    monkeypatch.setattr("posttrain.core.training.allocator._can_be_set", lambda: True)
    monkeypatch.setattr("posttrain.core.training.allocator._set", called.append)
    trainer = TRAINERS["causal-lm"](tmp_path, max_steps=1, keep_freed_memory=wanted)
    trainer.train()
    assert called == ([allocator._KEEP, allocator._GIVE_BACK] if wanted else [])
    assert TrainingArguments(str(tmp_path)).keep_freed_memory
