"""A run on a CUDA device: resuming, memory that runs out, activations in host memory, optimizers in 8 bits."""

import gc

import pytest
import torch

from tests import tiny
from tests.contract.trainers import TRAINERS, causal_lm, weights


def losses(trainer):
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def test_resuming_goes_on_from_the_same_weights(tmp_path, cuda):
    changes = {"use_cpu": False, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch_fused"}
    straight = TRAINERS["causal-lm"](tmp_path, **changes)
    straight.train()
    resumed = TRAINERS["causal-lm"](tmp_path, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    expected = weights(straight)
    for name, value in weights(resumed).items():
        torch.testing.assert_close(value.cpu(), expected[name].cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_dropout_goes_on_with_the_random_numbers_of_the_device(tmp_path):
    changes = {"use_cpu": False, "save_strategy": "steps", "save_steps": 2}
    straight = TRAINERS["dropout"](tmp_path, **changes)
    straight.train()
    resumed = TRAINERS["dropout"](tmp_path, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(resumed) == pytest.approx(losses(straight), rel=1e-5)


@pytest.mark.gpu
def test_a_ballot_between_gpus_takes_their_own_group(tmp_path):
    from posttrain.core.training import preemption

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        watch = preemption.Watch(world_size=2, device="cuda")
        assert [watch.due() for _ in range(5)] == [0] * 5
        watch._reason = 143
        assert 143 in [watch.due() for _ in range(200)]
        assert len(torch.distributed.distributed_c10d._world.pg_map) == 1
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.gpu
def test_counting_a_window_does_not_wait_for_the_device(tmp_path):
    trainer = TRAINERS["causal-lm"](tmp_path, use_cpu=False)
    batch = trainer.data_collator(trainer.train_dataset[:4])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        items = trainer.count_window([batch, batch])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert items.is_cuda and items == 2 * trainer.count_items(batch)


WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16}


def wide_run(folder, **changes):
    """16 rows of 512 tokens a step; the run, and the bytes it took above its model."""
    trainer = causal_lm(**WIDE)(folder, use_cpu=False, max_steps=2, **{"per_device_train_batch_size": 16} | changes)
    trainer.train_dataset = tiny.token_rows(32, min_length=512, max_length=512)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    return trainer, torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
def test_a_step_that_does_not_fit_goes_on_in_smaller_micro_batches(tmp_path):
    whole, needed = wide_run(tmp_path / "whole")
    expected = losses(whole)
    del whole
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    allowed = torch.cuda.memory_allocated() + 0.75 * needed + 2**28  # weights and gradients are part of it
    torch.cuda.set_per_process_memory_fraction(min(allowed / total, 1.0))
    try:
        split, _ = wide_run(tmp_path / "split", auto_find_batch_size=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert losses(split) == pytest.approx(expected, rel=1e-4)


@pytest.mark.gpu
def test_recomputed_layers_take_less_memory_and_give_the_same_losses(tmp_path):
    kept, peak = wide_run(tmp_path / "kept")
    recomputed, less = wide_run(tmp_path / "recomputed", gradient_checkpointing=True)
    assert losses(recomputed) == pytest.approx(losses(kept), rel=1e-4)
    assert less < 0.6 * peak


@pytest.mark.gpu
def test_activations_in_host_memory_take_less_and_give_the_same_losses(tmp_path):
    found = []
    for offloading in (False, True):
        trainer = TRAINERS["sft"](
            tmp_path / str(offloading), use_cpu=False, bf16=False, max_steps=3, activation_offloading=offloading
        )
        trainer.train()
        found.append(losses(trainer))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("optim", ["adamw_8bit", "adamw_torch_fused"])
def test_optimizers_for_gpus_learn(optim, tmp_path):
    if "8bit" in optim:
        pytest.importorskip("bitsandbytes")
    trainer = TRAINERS["causal-lm"](tmp_path, use_cpu=False, optim=optim, learning_rate=1e-2, num_train_epochs=6)
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0] - 0.3
