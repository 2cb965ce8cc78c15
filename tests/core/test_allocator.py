import platform
import subprocess
import sys

import pytest

from posttrain.core import TrainingArguments

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")

FAULTS = """
import logging, resource, sys, torch
logging.basicConfig(level="DEBUG")
from posttrain.core import allocator
if sys.argv[1] == "kept":
    assert allocator.keep_freed_memory() and allocator.keep_freed_memory()
def step():
    x = torch.ones(2**24)  # 64 MiB, which are 16,384 pages
    for _ in range(2):
        y = x * 2
        x = y + x
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@glibc
def test_memory_that_is_kept_is_not_faulted_in_again():
    def run(how):
        done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
        return int(done.stdout), done.stderr

    (kept, said), (given_back, silence) = run("kept"), run("given back")
    assert given_back > 100_000 and kept < given_back / 4
    assert said.count("Freed memory is kept for the next step") == 1 and "Freed" not in silence


@pytest.mark.parametrize(("wanted", "calls"), [(True, 1), (False, 0)])
def test_training_on_the_cpu_keeps_memory_unless_told_not_to(wanted, calls, tmp_path, monkeypatch):
    from tests.contract.trainers import TRAINERS

    called = []
    monkeypatch.setattr("posttrain.core.allocator.keep_freed_memory", lambda: called.append(1))
    trainer = TRAINERS["causal-lm"](tmp_path, max_steps=1, keep_freed_memory=wanted)
    trainer.train()
    assert len(called) == calls
    assert TrainingArguments(str(tmp_path)).keep_freed_memory
