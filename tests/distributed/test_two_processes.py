"""Two gloo processes lead to the weights of one, also where the last batch is uneven."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.contract.trainers import EXACT, weights

ROOT = Path(__file__).parents[2]
SPLIT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 2}


def launch(processes, *arguments, timeout=300):
    """torchrun on this machine, with a free port; returns the finished process."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )


@pytest.mark.parametrize("name", EXACT)
def test_two_processes_give_the_weights_of_one(name, tmp_path):
    alone = EXACT[name](tmp_path / "alone")
    alone.train()
    expected, metrics = weights(alone), alone.evaluate()
    (tmp_path / "pair").mkdir()
    done = launch(2, str(ROOT / "tests/distributed/worker.py"), name, str(tmp_path / "pair"), json.dumps(SPLIT))
    assert done.returncode == 0, done.stderr[-4000:]
    for key, value in torch.load(tmp_path / "pair" / "weights.pt").items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=1e-6, msg=key)
    pair = json.loads((tmp_path / "pair" / "log.json").read_text())
    losses, norms = ([r[k] for r in alone.state.log_history if k in r] for k in ("loss", "grad_norm"))
    assert [r["loss"] for r in pair["log"] if "loss" in r] == pytest.approx(losses, rel=1e-5, abs=1e-6)
    assert [r["grad_norm"] for r in pair["log"] if "grad_norm" in r] == pytest.approx(norms, rel=1e-4)
    assert pair["eval"]["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-6, abs=1e-6)
