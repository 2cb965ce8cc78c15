"""What training takes of the process it gives back: nothing is different after `train()`, whichever trainer it is."""

import logging
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

from posttrain.core import TrainerCallback
from tests.contract.trainers import TRAINERS

FLAGS = {
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "precision of products": torch.get_float32_matmul_precision,
    "tf32": lambda: (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
    "cudnn": lambda: (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
    "attention": lambda: (
        torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
    ),
    "mkldnn": lambda: torch.backends.mkldnn.enabled,
    "threads of torch": lambda: (torch.get_num_threads(), torch.get_num_interop_threads()),
    "type": torch.get_default_dtype,
    "gradients": torch.is_grad_enabled,
    "inference": torch.is_inference_mode_enabled,
    "autocast": lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    "process group": torch.distributed.is_initialized,
}  # fmt: skip


def of_process():
    """Everything of this process that a library could change."""
    found = {name: read() for name, read in FLAGS.items()}
    found["signals"] = {number: signal.getsignal(number) for number in signal.valid_signals() if number < 32}
    found |= {"environment": dict(os.environ), "folder": os.getcwd(), "hook": sys.excepthook}
    found |= {"warnings": list(warnings.filters), "threads": {thread.name for thread in threading.enumerate()}}
    loggers = ["", "posttrain", "transformers", "datasets", "torch", "accelerate", "py.warnings"]
    found["logging"] = {name: (log.level, log.disabled) for name in loggers for log in [logging.getLogger(name)]}
    found["children"] = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()
    return found


class Fail(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise RuntimeError("broken")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes below /proc")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", ["causal-lm", "sft-packed", "dpo", "grpo", "seq2seq"])
def test_a_process_is_after_training_what_it_was_before(name, fails, tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr("posttrain.core.training.allocator._can_be_set", lambda: True)
    monkeypatch.setattr("posttrain.core.training.allocator._set", taken.append)
    changes = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "save_async": True}
    changes |= {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    TRAINERS[name](tmp_path / "first", **changes).train()  # what libraries set when they are first used
    trainer = TRAINERS[name](tmp_path / "run", callbacks=[Fail()] if fails else None, **changes)
    taken.clear()
    before = of_process()
    if fails:
        with pytest.raises(RuntimeError, match="broken"):
            trainer.train()
    else:
        trainer.train()
    until = time.monotonic() + 10
    while of_process()["threads"] != before["threads"] and time.monotonic() < until:
        time.sleep(0.01)  # those of queues that were closed end by themselves
    assert of_process() == before
    assert len(taken) == 2 and taken[0] != taken[1]


def test_a_trainer_sets_nothing_of_torch_that_was_not_asked_for(tmp_path):
    before = {name: read() for name, read in FLAGS.items()}
    TRAINERS["causal-lm"](tmp_path, max_steps=1).train()
    assert {name: read() for name, read in FLAGS.items()} == before
