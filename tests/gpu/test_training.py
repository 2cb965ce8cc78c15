"""On a CUDA device: the losses of the CPU, bf16, fp16, resuming, and a non-finite step that is skipped without
waiting.
"""

import pytest
import torch

from tests.contract.trainers import TRAINERS, weights
from tests.core.training.test_nonfinite import stops_at_the_third_update

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["causal-lm", "classifier", "sft", "sft-packed", "sft-lora"])
def test_the_losses_of_the_cpu(name, tmp_path):
    def losses(**changes):
        trainer = TRAINERS[name](tmp_path / str(len(changes)), **changes)
        trainer.train()
        return [record["loss"] for record in trainer.state.log_history if "loss" in record]

    assert losses(use_cpu=False, report_to="none") == pytest.approx(losses(use_cpu=True), rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns(precision, tmp_path):
    trainer = TRAINERS["causal-lm"](
        tmp_path, use_cpu=False, optim="adamw_torch_fused", learning_rate=1e-2, num_train_epochs=8, **{precision: True}
    )
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert losses[-1] < losses[0] - 0.5


def test_resuming_goes_on_from_the_same_weights(tmp_path):
    changes = {"use_cpu": False, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch_fused"}
    straight = TRAINERS["causal-lm"](tmp_path, **changes)
    straight.train()
    resumed = TRAINERS["causal-lm"](tmp_path, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    expected = weights(straight)
    for name, value in weights(resumed).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_a_fused_optimizer_skips_what_is_not_finite(tmp_path):
    stops_at_the_third_update(tmp_path, use_cpu=False)


# finding_B21
def test_a_ballot_between_gpus_takes_their_own_group(tmp_path):
    from posttrain.core.training import preemption

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        watch = preemption.Watch(world_size=2, device="cuda")
        assert [watch.due() for _ in range(5)] == [0] * 5
        watch._number = 15
        assert 15 in [watch.due() for _ in range(200)]
        assert len(torch.distributed.distributed_c10d._world.pg_map) == 1
    finally:
        torch.distributed.destroy_process_group()


# finding_B21
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
