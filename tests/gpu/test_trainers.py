"""Every trainer on a CUDA device: the run of the CPU, in float32, and in training no wait for the device."""

import warnings

import pytest
import torch

from posttrain.core import TrainerCallback
from posttrain.rl.generation.local import LocalGenerator
from tests.contract.trainers import EXACT, TRAINERS, weights
from tests.gpu_rehearsal.test_trainers import SIZES, WAITS, assert_trained_alike

EMULATED = ("sft-mixture", "orpo", "rloo")
"""Those that also run without a GPU; of the other kinds tests/gpu_rehearsal has one each."""


def losses(trainer):
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EMULATED else pytest.mark.gpu) for name in EXACT]
)
def test_a_run_is_that_of_the_cpu(name, tmp_path, cuda):
    runs = []
    for use_cpu in (True, False):
        trainer = TRAINERS[name](tmp_path / str(use_cpu), use_cpu=use_cpu, bf16=False)
        trainer.train()
        assert trainer.model.device.type == ("cpu" if use_cpu else "cuda")
        runs.append(trainer)
    expected, found = runs
    assert losses(found) == pytest.approx(losses(expected), rel=1e-3, abs=1e-4)
    wanted = weights(expected)
    for key, value in weights(found).items():
        assert_trained_alike(value.cpu(), wanted[key], key)


@pytest.mark.parametrize("name", ["sft-packed", "dpo", "grpo"])
def test_segments_are_what_attention_goes_over(name, tmp_path, cuda):
    trainer = TRAINERS[name](tmp_path, use_cpu=False, bf16=False, max_steps=1)
    assert trainer.model.config._attn_implementation.startswith("segments_")


class DebugSecondWindow(TrainerCallback):
    """torch's `mode` for waits of the host, from the end of the first optimizer step to that of the second."""

    def __init__(self, mode):
        self.mode = mode

    def on_step_end(self, args, state, control, **kwargs):
        torch.cuda.set_sync_debug_mode(self.mode if state.global_step == 1 else "default")


@pytest.mark.gpu
@pytest.mark.parametrize("name", WAITS)
def test_a_window_does_not_wait_for_the_device(name, tmp_path, monkeypatch):
    allowed = WAITS[name][0]
    generate = LocalGenerator.generate

    def generate_unwatched(self, *args, **kwargs):  # tests/gpu/test_generation.py counts these
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            return generate(self, *args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    monkeypatch.setattr(LocalGenerator, "generate", generate_unwatched)
    callback = DebugSecondWindow("warn" if allowed else "error")
    trainer = TRAINERS[name](tmp_path, callbacks=[callback], use_cpu=False, **SIZES)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [f"{warning.filename}:{warning.lineno}" for warning in caught if "a synchronizing" in str(warning.message)]
    assert len(waits) <= allowed, waits
