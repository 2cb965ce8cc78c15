"""Liger's kernels with our trainers, run by Triton's interpreter: the losses and weights of a run without them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("liger_kernel", reason="Liger is not installed: pip install liger-kernel triton")
pytest.importorskip("triton")
pytest.importorskip("peft")

ROOT = Path(__file__).parents[3]
MODULE = "tests.core.models.interpreted_liger"


def found_by(*command: str) -> dict:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, cwd=ROOT, env=environment)
    line = next((text for text in done.stdout.splitlines() if text.startswith("FOUND ")), None)
    assert line is not None, done.stderr[-3000:]
    return json.loads(line.removeprefix("FOUND "))


def check(found: dict) -> None:
    for name, run in found.items():
        assert run["losses"] == pytest.approx(run["expected"], rel=1e-5), name
        assert run["gap"] < 1e-5 and run["kernels"][0] == 0 < run["kernels"][1], name


@pytest.mark.slow
@pytest.mark.mission("S048")
@pytest.mark.parametrize("name", ["causal-lm", "sft", "dpo", "llama", "gemma", "mistral"])
def test_a_run_with_ligers_kernels_is_that_without_them(name):
    check(found_by(MODULE, name))


@pytest.mark.mission("S049")
@pytest.mark.slow
def test_so_it_is_with_weights_that_two_processes_share():
    check(found_by("torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", MODULE, "sft", "--fsdp"))
