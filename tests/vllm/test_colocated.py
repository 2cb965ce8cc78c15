"""Colocated mode against vLLM itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.vllm import servers


def test_vllm_in_the_trainers_process_writes_with_the_weights_of_each_step(tmp_path):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.vllm.colocated", str(tmp_path)]
    done = subprocess.run(command, cwd=root, env=os.environ | servers.ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found = json.loads((tmp_path / "found.json").read_text())
    for kind in ("full", "adapter"):
        assert len(found[kind]["gaps"]) == 3 and max(found[kind]["gaps"]) < 1e-5
        assert min(found[kind]["grad_norms"]) > 0 and 0 < found[kind]["eval_reward"] < 1
    assert "the vLLM in this process differ from the trainer's" in found["not sent"]
