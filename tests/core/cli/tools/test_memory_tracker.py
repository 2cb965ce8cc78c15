"""The memory plan beside torch's own tracker of FSDP's memory, in the same step without numbers."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker

from posttrain.cli.tools import memory_mesh, memory_plan
from posttrain.cli.tools.memory_count import LiveBytes
from posttrain.core.optim import builder
from tests import tiny
from tests.core.cli.tools.test_memory_plan import a_run, workload

pytestmark = pytest.mark.long

LARGE = dict(hidden_size=256, intermediate_size=768, num_hidden_layers=4, head_dim=32, vocab_size=2048)
CASES = {
    "whole weights": (8, {"fsdp": "full_shard auto_wrap"}),
    "recomputed layers": (8, {"fsdp": "full_shard auto_wrap", "activation_checkpointing": True}),
    "bf16": (8, {"fsdp": "full_shard auto_wrap", "bf16": True}),
    "gradients alone": (8, {"fsdp": "shard_grad_op auto_wrap"}),
    "64 processes": (64, {"fsdp": "full_shard auto_wrap", "bf16": True, "activation_checkpointing": True}),
    "LoRA": (8, {"fsdp": "full_shard auto_wrap", "use_peft": True, "lora_r": 8, "dtype": "bfloat16"}),
    "one process": (1, {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny.causal_lm(**LARGE).save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return str(path)


def tracked(run) -> int:
    """The most bytes at a time in two steps, by torch's tracker."""
    found = {}

    def by_torch(run, work, model, quantized, mesh):
        optimizer = builder.build(model, run.config)
        live = LiveBytes()  # which knows operations whose size hangs on numbers
        if memory_mesh.processes() > 1:
            tracker = FSDPMemTracker(model, optimizer)
        else:
            tracker = MemTracker()
            tracker.track_external(model, optimizer)
        with tracker, live:
            for _ in range(2):
                memory_plan._pass(model, run.config, work, live)
                memory_mesh.step(optimizer, mesh)
                optimizer.zero_grad()
                tracker.reset_mod_stats()
        found.update(tracker.get_tracker_snapshot("peak"))

    with mock.patch.object(memory_plan, "_measure", by_torch):
        memory_plan.measure(run, workload(run))
    return max(kinds["Total"] for kinds in found.values())


@pytest.mark.parametrize("case", CASES)
def test_a_plan_is_what_torchs_tracker_counts(case, folder):
    processes, options = CASES[case]
    if options.get("activation_checkpointing") and torch.__version__.startswith("2.11."):
        pytest.skip("the tracker of torch 2.11 finds half as much again as a step there holds (tests/distributed)")
    options = {"activation_checkpointing": False, "max_length": 256} | options
    with memory_mesh.imagined(processes):
        run = a_run(folder, **options)
        plan = memory_plan.measure(run, workload(run))
        assert plan.peak == pytest.approx(tracked(run), rel=0.05)
