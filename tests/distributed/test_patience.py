"""Work that one process does while the others wait may take longer than `ddp_timeout`."""

import time

import pytest

from tests.programs import ROOT, together

PATIENT = str(ROOT / "tests" / "distributed" / "patient.py")


def is_done(out, kind, where, timeout, seconds):
    done = together(2, [PATIENT, str(out), kind, where, str(timeout), str(seconds)])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "busy" in done.stdout
    assert all((out / f"done-{rank}").exists() for rank in (0, 1))


def test_preparation_may_take_longer_than_a_collective(tmp_path):
    began = time.monotonic()
    is_done(tmp_path, "sft", "preparation", 4, 7)
    assert time.monotonic() - began > 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("sft", "preparation"), ("dpo", "preparation"), ("kto", "preparation"), ("grpo", "loader"),
        ("sft", "callbacks"), ("causal-lm", "saving"), ("causal-lm", "own work"),
    ],
)  # fmt: skip
def test_whatever_the_main_process_does_alone_may_take_long(kind, where, tmp_path):
    is_done(tmp_path, kind, where, 4, 14)
