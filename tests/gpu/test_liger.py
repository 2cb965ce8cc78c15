"""Liger's kernels on a CUDA device: the losses of a run without them."""

import pytest

from tests.contract.trainers import TRAINERS

pytest.importorskip("liger_kernel", reason="Liger is not installed: pip install liger-kernel")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["causal-lm", "sft", "sft-packed", "sft-lora", "dpo", "reward", "grpo"])
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_ligers_kernels_give_the_losses_of_the_models_own_layers(name, bf16, tmp_path):
    if bf16 and name == "grpo":
        pytest.skip("another rounding samples other tokens")
    found = []
    for liger in (False, True):
        trainer = TRAINERS[name](tmp_path / str(liger), use_cpu=False, bf16=bf16, max_steps=2, use_liger_kernel=liger)
        trainer.train()
        found.append([record["loss"] for record in trainer.state.log_history if "loss" in record])
        changed = [m for m in trainer.model.modules() if "liger" in (m.forward.__module__ or "")]
        assert bool(changed) == liger
    assert found[1] == pytest.approx(found[0], rel=0.02 if bf16 else 1e-3, abs=0.01 if bf16 else 1e-4)
