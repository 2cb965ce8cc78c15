"""Every trainer on an emulated GPU: a run as on the CPU, and no more waits than the table allows."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

from posttrain.core import TrainerCallback
from posttrain.rl.generation.local import LocalGenerator
from tests.contract.trainers import TRAINERS
from tests.gpu_rehearsal.emulated_cuda import CudaTensor, EmulatedCuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: tests/gpu")

# Waits of the host: in a window of two micro-batches without a log record, and in an evaluation of two batches. These
# numbers only fall. What log records and checkpoints read is not counted; generation is in test_generation.py.
WAITS = {
    "causal-lm": (4, 4),
    "classifier": (2, 2),
    "sft": (0, 0),
    "sft-packed": (0, 0),
    "sft-lora": (0, 0),
    "seq2seq": (20, 139),
    "dpo": (0, 0),
    "kto": (0, 0),
    "reward": (4, 4),
    "grpo-sync": (1, 2),
}
WINDOW, EVALUATION = "a window", "an evaluation"
SIZES = {
    "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 3,
    "logging_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3,
    "optim": "adamw_torch_fused", "learning_rate": 1e-2, "bf16": False,
}  # fmt: skip


class Phases(TrainerCallback):
    """Tells the device when the second window runs."""

    def __init__(self, gpu):
        self.gpu = gpu

    def on_step_end(self, args, state, control, **kwargs):
        self.gpu.phase = WINDOW if state.global_step == 1 else ""


def run(name, folder, gpu=None):
    callbacks = [] if gpu is None else [Phases(gpu)]
    trainer = TRAINERS[name](folder, callbacks=callbacks, use_cpu=gpu is None, **SIZES)
    if gpu is not None:
        loop = trainer.evaluation_loop

        def evaluation_loop(*args, **kwargs):
            gpu.phase = EVALUATION
            try:
                return loop(*args, **kwargs)
            finally:
                gpu.phase = ""

        trainer.evaluation_loop = evaluation_loop
    trainer.train()
    return trainer


def figures(trainer):
    """What the run logged, without what hangs on the clock."""
    kept = [name for record in trainer.state.log_history for name in record if "runtime" not in name]
    return {
        name: value for record in trainer.state.log_history for name, value in record.items()
        if name in kept and "per_second" not in name and "/seconds" not in name
    }  # fmt: skip


@pytest.mark.parametrize("name", WAITS)
def test_a_run_on_the_emulated_gpu_is_that_of_the_cpu(name, tmp_path, monkeypatch):
    expected = run(name, tmp_path / "cpu")
    generate = LocalGenerator.generate

    def quietly(self, *args, **kwargs):
        gpu.phase, before = "generation", gpu.phase
        try:
            return generate(self, *args, **kwargs)
        finally:
            gpu.phase = before

    monkeypatch.setattr(LocalGenerator, "generate", quietly)
    with EmulatedCuda() as gpu:
        found = run(name, tmp_path / "cuda", gpu)
        assert all(isinstance(parameter, CudaTensor) for parameter in found.model.parameters())
    assert figures(found) == pytest.approx(figures(expected), rel=1e-4, abs=1e-5)
    for path in (tmp_path / "cpu/checkpoint-3").glob("*.safetensors"):
        saved, wanted = load_file(tmp_path / "cuda/checkpoint-3" / path.name), load_file(path)
        assert {key for key in saved if not key.startswith("rng.cuda")} == wanted.keys()
        for key, value in ((key, value) for key, value in wanted.items() if not key.startswith("rng.")):
            torch.testing.assert_close(saved[key], value, rtol=1e-3, atol=1e-4, msg=f"{path.name}: {key}")
    waits = [wait for wait in gpu.waits if "core/logging/metrics.py" not in wait.place]
    counted = Counter(wait.phase for wait in waits)
    if (counted[WINDOW], counted[EVALUATION]) != WAITS[name]:
        places = Counter(
            (wait.phase, wait.kind, wait.stack[:2]) for wait in waits if wait.phase in (WINDOW, EVALUATION)
        )
        listed = "\n".join(f"{count} x {' | '.join(map(str, place))}" for place, count in places.most_common())
        pytest.fail(f"{(counted[WINDOW], counted[EVALUATION])} waits, and {WAITS[name]} are on record:\n{listed}")


def test_a_trainer_on_the_cpu_and_one_on_the_gpu_follow_each_other_in_a_process(tmp_path):
    with EmulatedCuda():
        for number, use_cpu in enumerate((True, False, True, False)):
            trainer = TRAINERS["causal-lm"](tmp_path / str(number), use_cpu=use_cpu, **SIZES | {"max_steps": 1})
            trainer.train()
            kind = "cpu" if use_cpu else "cuda"
            assert trainer.dist.device.type == trainer.accelerator.device.type == trainer.model.device.type == kind
