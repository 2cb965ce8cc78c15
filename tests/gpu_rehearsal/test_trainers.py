"""Every trainer on an emulated GPU: a run as on the CPU, and no more waits than the table allows."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from posttrain.core import Trainer, TrainerCallback, TrainingArguments
from posttrain.core.data import accelerator
from posttrain.core.distributed.watchdog import Watchdog
from posttrain.rl.generation.local import LocalGenerator
from tests import tiny, versions
from tests.contract.trainers import TRAINERS, pad
from tests.gpu_rehearsal.emulated_cuda import CudaTensor, EmulatedCuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: tests/gpu")

WINDOW, LOGGED, EVALUATION, AGAIN, SAVE = PHASES = (
    "a window", "a window and its log record", "the first evaluation", "a later evaluation", "a save",
)  # fmt: skip
# Waits of the host, by `PHASES`. A window has two micro-batches, an evaluation two batches. These numbers only fall.
# Generation by `LocalGenerator` is left out: it has its own budget in test_generation.py.
# A log record reads whether each of the three steps since the last was finite, the metrics (once for each type of
# number), the norm of the gradient, and the clock. A save synchronizes before and after its copies of the tensors.
WAITS = {
    "causal-lm": (0, 7, 1, 1, 2),
    "classifier": (0, 7, 1, 1, 2),
    "sft": (0, 7, 2, 2, 2),
    "sft-packed": (0, 7, 2, 2, 2),
    "sft-lora": (0, 7, 2, 2, 17),  # 16 copies of the 8 matrices of the adapter: checked, and written by safetensors
    # A look at which rows have ended every 16 tokens and at the end, and a copy of the tokens: 3 a batch of 20 tokens.
    # The first evaluation compares 12 tokens with transformers' generate, which waits for each of them.
    "seq2seq": (0, 7, 35, 7, 2),
    "dpo": (0, 7, 2, 2, 2),
    "kto": (0, 7, 2, 2, 2),
    "reward": (0, 7, 2, 2, 2),
    # A copy of the reference's log-probabilities for each rollout; 25 of its weights, which move, for each save.
    "grpo-sync": (1, 8, 3, 3, 27),
}
SIZES = {
    "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 3,
    "logging_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3,
    "check_saved_model": False,  # which copies the weights of the first checkpoint to the host
    "optim": "adamw_torch_fused", "learning_rate": 1e-2, "bf16": False,
}  # fmt: skip


class Phases(TrainerCallback):
    """Tells the device what runs: the second window, the third with its record, an evaluation, a save."""

    def __init__(self, gpu):
        self.gpu = gpu

    def on_step_end(self, args, state, control, **kwargs):
        self.gpu.phase = {1: WINDOW, 2: LOGGED}.get(state.global_step, self.gpu.phase)

    def on_log(self, args, state, control, **kwargs):
        self.gpu.phase = EVALUATION if self.gpu.phase == LOGGED else self.gpu.phase

    def on_evaluate(self, args, state, control, **kwargs):
        self.gpu.phase = SAVE if self.gpu.phase == EVALUATION else ""

    def on_save(self, args, state, control, **kwargs):
        self.gpu.phase = ""


def run(name, folder, gpu=None):
    callbacks = [] if gpu is None else [Phases(gpu)]
    trainer = TRAINERS[name](folder, callbacks=callbacks, use_cpu=gpu is None, **SIZES)
    trainer.train()
    return trainer


def assert_trained_alike(found, expected, name):
    """Adam divides by the root of the mean square: of a gradient that is all rounding it takes a whole step."""
    gap = (found.double() - expected.double()).abs().masked_fill(found == expected, 0)  # inf too
    assert found.shape == expected.shape and (gap <= 0.02).all(), f"{name}: {gap.max()}"
    beyond = int((gap > 1e-4 + 1e-3 * expected.double().abs()).sum())
    assert beyond <= 1 + gap.numel() // 1000, f"{name}: {beyond} of {gap.numel()}"


def figures(trainer):
    """What the run logged, without what hangs on the clock."""
    kept = [name for record in trainer.state.log_history for name in record if "runtime" not in name]
    return {
        name: value for record in trainer.state.log_history for name, value in record.items()
        if name in kept and "per_second" not in name and "/seconds" not in name
    }  # fmt: skip


@pytest.mark.rotated
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
        # Norms are one kernel, those of a reference too: its log-probabilities begin as those of the policy.
        assert bool(gpu.operations["rms_norm_backward"]) == (name != "classifier")
        assert not gpu.operations["aten::rsqrt"]
        logged = figures(found)
        gpu.phase = AGAIN
        found.evaluate()
    assert logged == pytest.approx(figures(expected), rel=1e-4, abs=1e-5)
    for path in (tmp_path / "cpu/checkpoint-3").glob("*.safetensors"):
        saved, wanted = load_file(tmp_path / "cuda/checkpoint-3" / path.name), load_file(path)
        assert {key for key in saved if not key.startswith("rng.cuda")} == wanted.keys()
        for key, value in ((key, value) for key, value in wanted.items() if not key.startswith("rng.")):
            assert_trained_alike(saved[key], value, f"{path.name}: {key}")
    counted = Counter(wait.phase for wait in gpu.waits)
    waits = tuple(counted[phase] for phase in PHASES)
    if waits != WAITS[name] and versions.IS_CURRENT:
        places = Counter((wait.phase, wait.kind, wait.stack[:2]) for wait in gpu.waits if wait.phase in PHASES)
        listed = "\n".join(f"{count} x {' | '.join(map(str, place))}" for place, count in places.most_common())
        pytest.fail(f"{waits} waits, and {WAITS[name]} are on record:\n{listed}")


@pytest.mark.mission("S150")
def test_a_model_that_a_script_has_moved_is_trained_where_it_is(tmp_path):
    tiny.causal_lm().save_pretrained(tmp_path / "base")
    records = []
    for place in ("cpu", 0):
        with EmulatedCuda() if place == 0 else contextlib.nullcontext():
            model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", low_cpu_mem_usage=True).to(place)
            args = TrainingArguments(str(tmp_path), use_cpu=place == "cpu", **SIZES)
            trainer = Trainer(model, args, pad, tiny.token_rows(12), tiny.token_rows(6, seed=1))
            trainer.train()
            assert trainer.model is model and model.device.type == ("cpu" if place == "cpu" else "cuda")
        records.append(figures(trainer))
    assert records[1] == pytest.approx(records[0], rel=1e-4, abs=1e-5)


@pytest.fixture
def products():
    """What tf32 is set for: products of matrices, and convolutions."""
    kinds = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [kind.allow_tf32 for kind in kinds]
    yield kinds
    for kind, now in zip(kinds, before, strict=True):
        kind.allow_tf32 = now


@pytest.mark.parametrize("tf32", [None, True, False])
def test_products_are_in_tf32_as_asked_for(tf32, products, tmp_path):
    class Reads(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append([kind.allow_tf32 for kind in products])

    before, seen = [kind.allow_tf32 for kind in products], []
    with EmulatedCuda():
        changes = SIZES | {"max_steps": 1, "tf32": tf32}
        TRAINERS["causal-lm"](tmp_path, callbacks=[Reads()], use_cpu=False, **changes).train()
    assert seen == [before if tf32 is None else [tf32, tf32]]


def test_a_trainer_on_the_cpu_and_one_on_the_gpu_follow_each_other_in_a_process(tmp_path):
    with EmulatedCuda():
        for number, use_cpu in enumerate((True, False, True, False)):
            trainer = TRAINERS["causal-lm"](tmp_path / str(number), use_cpu=use_cpu, **SIZES | {"max_steps": 1})
            trainer.train()
            kind = "cpu" if use_cpu else "cuda"
            assert trainer.dist.device.type == trainer.accelerator.device.type == trainer.model.device.type == kind


@pytest.mark.rotated
@pytest.mark.parametrize("name", ["causal-lm", "sft-packed", "sft-lora", "dpo", "grpo-sync", "seq2seq"])
def test_a_run_on_a_device_that_is_no_cuda_is_that_of_the_cpu(name, tmp_path):
    expected = figures(run(name, tmp_path / "cpu"))
    with EmulatedCuda("xpu"):
        assert not torch.cuda.is_available()
        trainer = TRAINERS[name](tmp_path / "xpu", use_cpu=False, **SIZES)
        trainer.train()
        assert trainer.dist.device.type == "xpu" and trainer.model.device.type == "xpu"
        assert figures(trainer) == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.rotated
@pytest.mark.parametrize("name", ["causal-lm", "sft-packed", "dpo", "grpo-sync"])
def test_the_watchdog_sees_all_waits_for_the_device(name, tmp_path, monkeypatch):
    """A collective of NCCL returns at once: the host waits for the other processes where it next waits for its own
    device. Such a wait is one for them, for the report of a hang and for that of a straggler. Generation is left out:
    it is a process's own work, of which most is such waits.
    """
    unseen, watchdog = Counter(), Watchdog(None, 0, 2, 60, tmp_path)  # it is not started, and ends nothing
    monkeypatch.setattr(accelerator, "waiting", functools.partial(watchdog, "the device"))
    with EmulatedCuda() as gpu:
        trainer = TRAINERS[name](tmp_path, callbacks=[Phases(gpu)], use_cpu=False, **SIZES)
        trainer.dist._waiting = watchdog

        def wait(kind):
            EmulatedCuda.wait(gpu, kind)
            is_own = any(" generate" in line for line in gpu.waits[-1].stack)
            if watchdog._waits is None and gpu.phase in (WINDOW, LOGGED, EVALUATION) and not is_own:
                unseen[gpu.waits[-1].kind, *gpu.waits[-1].stack[:4]] += 1

        monkeypatch.setattr(gpu, "wait", wait)
        monkeypatch.setattr(gpu.order, "waited", wait)
        trainer.train()
    assert watchdog.waits and not unseen, "\n".join(f"{count} x {place}" for place, count in unseen.items())
