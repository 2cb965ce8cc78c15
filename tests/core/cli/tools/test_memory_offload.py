"""What a memory plan counts on the device and on the host, where a run moves something from one to the other."""

import pytest
import torch
from datasets import Dataset

from posttrain.cli.tools import memory_mesh, memory_plan
from posttrain.lm.attention.activation_offloading import OffloadActivations
from posttrain.lm.loading.loading import load_causal_lm
from posttrain.sft import SFTTrainer
from tests import tiny
from tests.core.cli.tools.test_memory_plan import LENGTH, ROWS, WIDTH, a_run, saved_model, workload


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return saved_model(tmp_path_factory.mktemp("model"))


def planned(folder, processes=1, **changes):
    with memory_mesh.imagined(processes):
        run = a_run(folder, **changes)
        return memory_plan.measure(run, workload(run))


def test_inputs_of_recomputed_layers_are_on_the_host(folder):
    kept = planned(folder, optim="sgd")
    moved = planned(folder, optim="sgd", activation_checkpointing_kwargs={"offload": True})
    inputs = WIDTH["num_hidden_layers"] * ROWS * LENGTH * WIDTH["hidden_size"] * 4
    assert (kept.host, moved.host) == (0, pytest.approx(inputs, rel=0.02))
    assert kept.activations - moved.activations == pytest.approx(inputs, rel=0.02)
    assert moved.weights == kept.weights and moved.peak <= kept.peak


def test_activations_on_the_host_are_those_that_a_run_moves(folder, tmp_path):
    changes = {"activation_checkpointing": False, "activation_offloading": True}
    kept, plan = planned(folder, activation_checkpointing=False), planned(folder, **changes)
    run = a_run(folder, tmp_path, **changes)
    ids = [[(3 * i + j) % 380 + 4 for j in range(LENGTH)] for i in range(2 * ROWS)]
    trainer = SFTTrainer(
        model=load_causal_lm(folder, run.model.model_init_kwargs()),
        args=run.config,
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        processing_class=tiny.tokenizer(),
    )
    # On the CPU nothing is moved unless it is asked for by hand.
    trainer._offload = OffloadActivations(trainer.model, torch.device("cpu"), stays=[trainer.model.lm_head])
    trainer.train()
    assert trainer.state.global_step == 2
    assert plan.host == pytest.approx(trainer._offload.moved / 2, rel=0.05)
    assert kept.activations - plan.activations == pytest.approx(plan.host, rel=0.1)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "sgd"])
def test_offloaded_shards_leave_the_device(optim, folder):
    kept = planned(folder, 2, fsdp="full_shard", optim=optim)
    moved = planned(folder, 2, fsdp=["full_shard", "offload"], optim=optim)
    buffers = sum(buffer.nbytes for buffer in tiny.causal_lm(**WIDTH).buffers())
    assert (moved.weights, moved.gradients, moved.optimizer) == (buffers, 0, 0)
    share = kept.weights - buffers + kept.gradients + kept.optimizer
    assert share <= moved.host <= 1.2 * share  # the optimizer's own passing tensors are there too
    assert moved.activations == pytest.approx(kept.activations, rel=0.01)
    assert moved.peak <= kept.peak - kept.weights - kept.optimizer + buffers + kept.gradients
    assert kept.host == 0
