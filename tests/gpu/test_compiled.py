"""torch.compile on a CUDA device."""

import pytest

from tests.contract.trainers import TRAINERS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["causal-lm", "sft-packed", "sft-lora", "dpo", "classifier"])
def test_compiled_layers_give_the_losses_of_uncompiled_ones(name, tmp_path):
    found = []
    for compiled in (False, True):
        options = {"torch_compile": compiled, "use_cpu": False, "bf16": False, "max_steps": 3}
        trainer = TRAINERS[name](tmp_path / str(compiled), **options)
        trainer.train()
        found.append([record["loss"] for record in trainer.state.log_history if "loss" in record])
    assert found[1] == pytest.approx(found[0], rel=1e-3)
