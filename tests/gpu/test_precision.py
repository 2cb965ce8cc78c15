"""Mixed precision on a CUDA device: bf16, fp16 with its scaler, and what becomes of a step that overflows."""

import pytest
import torch

from tests.contract.trainers import TRAINERS, weights
from tests.core.training.test_nonfinite import stops_at_the_third_update


def losses(trainer):
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns(precision, tmp_path, cuda):
    trainer = TRAINERS["causal-lm"](
        tmp_path, use_cpu=False, optim="adamw_torch_fused", learning_rate=1e-2, num_train_epochs=5, **{precision: True}
    )
    trainer.train()
    found = losses(trainer)
    assert found[-1] < found[0] - 0.3
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())


@pytest.mark.parametrize("name", ["sft-packed", "dpo"])
def test_losses_in_bfloat16_are_close_to_those_in_float32(name, tmp_path, cuda):
    found = []
    for bf16 in (False, True):
        trainer = TRAINERS[name](tmp_path / str(bf16), use_cpu=False, bf16=bf16, max_steps=2)
        trainer.train()
        found.append(losses(trainer))
    assert found[1] == pytest.approx(found[0], rel=0.02, abs=0.02) and found[1] != found[0]


def test_grpo_trains_on_what_it_generates_in_bfloat16(tmp_path, cuda):
    trainer = TRAINERS["grpo"](tmp_path, use_cpu=False, bf16=True, max_steps=1)
    before = weights(trainer)
    trainer.train()
    assert torch.isfinite(torch.tensor(losses(trainer))).all()
    assert any(not torch.equal(before[name].cpu(), value.cpu()) for name, value in weights(trainer).items())


def test_an_overflow_in_float16_skips_the_step_and_halves_the_scale(tmp_path, cuda):
    trainer = TRAINERS["causal-lm"](tmp_path, use_cpu=False, fp16=True, max_steps=3, learning_rate=1e-3)
    stock, kept, scales = trainer.compute_loss, {}, {}

    def compute_loss(*args, **kwargs):
        step = trainer.state.global_step
        kept[step], scales[step] = weights(trainer), trainer.dist.scaler.get_scale()
        return stock(*args, **kwargs) * (1e30 if step == 1 else 1.0)

    trainer.compute_loss = compute_loss
    trainer.train()
    assert scales[0] == scales[1] == 2 * scales[2]
    for name, value in kept[1].items():
        assert torch.equal(kept[2][name].cpu(), value.cpu()), name
    assert any(not torch.equal(kept[1][name].cpu(), value.cpu()) for name, value in kept[0].items())


def test_a_fused_optimizer_skips_what_is_not_finite(tmp_path, cuda):
    stops_at_the_third_update(tmp_path, use_cpu=False)
