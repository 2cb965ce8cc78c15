"""The memory plan: what it counts is what a real run of the same config holds, and what it proposes is measured too."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from posttrain.core import TrainerCallback, footprint, registry
from posttrain.core.cli import main
from posttrain.core.models import ModelConfig, load_causal_lm
from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny

ROWS, LENGTH = 4, 96
WIDTH = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=3, head_dim=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    tiny.causal_lm(**WIDTH).save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


def a_run(folder: str, output_dir: Path | str = "out", **given) -> registry.Run:
    of_model = {name: given.pop(name) for name in list(given) if name in ModelConfig.__dataclass_fields__}
    options = dict(max_length=LENGTH, per_device_train_batch_size=ROWS, use_cpu=True, report_to="none", max_steps=2)
    config = SFTConfig(output_dir=str(output_dir), save_strategy="no", disable_tqdm=True, **(options | given))
    return registry.Run(config, ModelConfig(model_name_or_path=folder, **of_model), None)


def workload(run: registry.Run) -> footprint.Workload:
    return registry.method("sft").workload(run, None)


class Watched(SFTTrainer):
    """Notes the bytes that autograd keeps of the first forward."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
        kept: dict[int, int] = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.kept = sum(kept.values())
        return loss


class Second(TrainerCallback):
    """Profiles what the second step allocates, and adds up gradients."""

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **_):
        if state.global_step == 1:
            self.before = held(model) + state_bytes(optimizer)
            self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
            self.profile.__enter__()

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)

    def on_step_end(self, args, state, control, model=None, optimizer=None, **_):
        if state.global_step == 2:
            self.profile.__exit__(None, None, None)
            events = [e for e in self.profile.profiler.kineto_results.events() if e.name() == "[memory]"]
            now = most = 0
            for event in sorted(events, key=lambda event: event.start_ns()):
                now += event.nbytes()
                most = max(most, now)
            self.peak = self.before + most
            self.weights, self.optimizer = held(model), state_bytes(optimizer)


def held(model) -> int:
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])


def state_bytes(optimizer) -> int:
    optimizer = getattr(optimizer, "optimizer", optimizer)
    return sum(v.nbytes for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor))


def really(run: registry.Run) -> SimpleNamespace:
    """What two updates of `run` hold."""
    ids = [[(3 * i + j) % 380 + 4 for j in range(LENGTH)] for i in range(32)]
    second = Second()
    trainer = Watched(
        model=load_causal_lm(run.model.model_name_or_path, run.model.model_init_kwargs()),
        args=run.config,
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        processing_class=tiny.tokenizer(),
        peft_config=run.model.peft_config(),
        callbacks=[second],
    )
    trainer.train()
    found = {name: getattr(second, name) for name in ("weights", "gradients", "optimizer", "peak")}
    return SimpleNamespace(**found, kept=trainer.kept)


CASES = {
    "checkpointed": {},
    "plain": dict(activation_checkpointing=False),
    "accumulating": dict(activation_checkpointing=False, gradient_accumulation_steps=2),
    "bfloat16 weights": dict(dtype="bfloat16", activation_checkpointing=False),
    "autocast": dict(bf16=True, activation_checkpointing=False),
    "sgd": dict(optim="sgd"),
    "momentum": dict(optim="sgd", optim_args="momentum=0.9", dtype="bfloat16"),
    "adafactor": dict(optim="adafactor", activation_checkpointing=False),
    "slow adamw": dict(optim="adamw_torch"),
    "lora": dict(use_peft=True, lora_r=4, activation_checkpointing=False),
    "lora, checkpointed": dict(use_peft=True, lora_r=4, lora_target_modules=["all-linear"], dtype="bfloat16"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_plan_is_what_the_real_run_holds(case, folder, tmp_path):
    run = a_run(folder, tmp_path, **CASES[case])
    plan, real = footprint.measure(run, workload(run)), really(run)
    print(case, plan, real, round(plan.peak / real.peak, 3), round(plan.activations / max(real.kept, 1), 3))
    assert (plan.weights, plan.gradients, plan.optimizer) == (real.weights, real.gradients, real.optimizer)
    assert plan.peak == pytest.approx(real.peak, rel=0.05)
    if not run.config.activation_checkpointing:  # whose own hooks hide what is kept
        assert plan.activations == pytest.approx(real.kept, rel=0.05)
    assert sum(plan.parts.values()) == plan.peak
