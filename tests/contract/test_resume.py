"""A run that was stopped anywhere goes on to the same bits: weights, optimizer, schedule, log."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from posttrain.core import TrainerCallback
from posttrain.core.checkpoint import codec
from posttrain.core.metrics import is_timing
from tests.contract.trainers import TRAINERS, weights

ARGS = dict(
    optim="adamw_torch", learning_rate=1e-2, per_device_train_batch_size=3, gradient_accumulation_steps=2, save_steps=1,
    save_strategy="steps", logging_steps=3, eval_strategy="steps", eval_steps=4,
)  # fmt: skip


class Stop(TrainerCallback):
    """Ends the run like a power cut, at the beginning of a step."""

    def __init__(self, step, how):
        self.step, self.how = step, how

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.how()


class PowerCut(Exception):
    pass


def cut():
    raise PowerCut


def tree_equal(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return np.array_equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(tree_equal(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(tree_equal, left, right))
    return left == right


def log_of(trainer):
    return [{k: v for k, v in record.items() if not is_timing(k)} for record in trainer.state.log_history]


def assert_same_run(resumed, straight):
    assert resumed.state.global_step == straight.state.global_step
    expected = weights(straight)
    assert [k for k, v in weights(resumed).items() if not torch.equal(v, expected[k])] == []
    assert tree_equal(resumed.optimizer.state_dict(), straight.optimizer.state_dict())
    assert resumed.lr_scheduler.state_dict() == straight.lr_scheduler.state_dict()
    assert log_of(resumed) == log_of(straight)


@pytest.mark.parametrize("name", TRAINERS)
def test_resuming_at_any_step_is_bit_exact(name, tmp_path):
    straight = TRAINERS[name](tmp_path / "straight", **ARGS)
    straight.train()
    total = straight.state.global_step
    assert total >= 4 and any(not torch.equal(a, b) for a, b in zip(
        weights(TRAINERS[name](tmp_path / "fresh", **ARGS)).values(), weights(straight).values(), strict=True))  # fmt: skip
    for step in sorted({1, total // 2, total // 2 + 1, total - 1}):
        out = tmp_path / f"cut-at-{step}"
        with pytest.raises(PowerCut):
            TRAINERS[name](out, callbacks=[Stop(step, cut)], **ARGS).train()
        resumed = TRAINERS[name](out, **ARGS)
        torch.rand(7)  # whatever happened before must not matter
        resumed.train(resume_from_checkpoint=True)
        assert_same_run(resumed, straight)


@pytest.mark.parametrize("save", ["steps", "epoch"])
def test_resuming_at_the_edge_of_an_epoch_repeats_nothing_and_skips_nothing(save, tmp_path):
    changes = ARGS | dict(save_strategy=save, eval_strategy="epoch", logging_strategy="epoch", num_train_epochs=3)
    straight = TRAINERS["causal-lm"](tmp_path / "straight", **changes)
    straight.train()
    edge = straight.state.global_step // 3
    with pytest.raises(PowerCut):
        TRAINERS["causal-lm"](tmp_path / "cut", callbacks=[Stop(edge, cut)], **changes).train()
    resumed = TRAINERS["causal-lm"](tmp_path / "cut", **changes)
    resumed.train(resume_from_checkpoint=True)
    assert_same_run(resumed, straight)


def test_a_finished_run_is_not_trained_further(tmp_path):
    first = TRAINERS["causal-lm"](tmp_path, **(ARGS | dict(max_steps=5)))
    first.train()
    again = TRAINERS["causal-lm"](tmp_path, **(ARGS | dict(max_steps=5)))
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 5
    expected = weights(first)
    assert all(torch.equal(value, expected[key]) for key, value in weights(again).items())


CHILD = """
import os, signal, sys
from tests.contract.test_resume import ARGS, Stop
from tests.contract.trainers import TRAINERS
name, out, step = sys.argv[1:]
stop = [Stop(int(step), lambda: os.kill(os.getpid(), signal.SIGKILL))] if step != "never" else None
trainer = TRAINERS[name](out, callbacks=stop, **ARGS)
trainer.train(resume_from_checkpoint=step == "never")
"""


@pytest.mark.parametrize(("name", "step"), [("causal-lm", 3), ("sft-lora", 2)])
def test_a_killed_process_is_continued_by_a_new_one(name, step, tmp_path):
    straight = TRAINERS[name](tmp_path / "straight", **ARGS)
    straight.train()
    root = Path(__file__).parents[2]

    def child(until):
        command = [sys.executable, "-c", CHILD, name, str(tmp_path / "killed"), until]
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)

    assert child(str(step)).returncode == -signal.SIGKILL
    finished = child("never")
    assert finished.returncode == 0, finished.stderr
    last = f"checkpoint-{straight.state.global_step}"
    theirs, ours = tmp_path / "killed" / last, tmp_path / "straight" / last
    assert tree_equal(codec.load_tree(theirs / "optimizer"), codec.load_tree(ours / "optimizer"))
    assert tree_equal(codec.load_tree(theirs / "rank-0"), codec.load_tree(ours / "rank-0"))
    for file in ours.glob("*.safetensors"):
        assert file.read_bytes() == (theirs / file.name).read_bytes()
