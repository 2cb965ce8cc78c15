"""QLoRA on a CUDA device with bitsandbytes: adapters learn on weights in 4 and 8 bits, and a run resumes."""

import pytest
import torch

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

from tests import tiny
from tests.sft.test_quantized import EIGHT, FOUR, kinds, losses, make, state

pytestmark = pytest.mark.gpu


@pytest.fixture
def base(tmp_path):
    tiny.causal_lm(hidden_size=64, head_dim=16, intermediate_size=128).save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.mark.parametrize("changes", [{}, {"packing": True}], ids=["rows", "packed"])
@pytest.mark.parametrize("bits", [FOUR, EIGHT], ids=["4 bits", "8 bits"])
def test_adapters_learn_and_a_run_goes_on(bits, changes, base, tmp_path):
    straight = make(base, tmp_path / "out", bits, use_cpu=False, **changes)
    assert kinds(straight) == {"Linear4bit" if bits is FOUR else "Linear8bitLt"}
    assert {parameter.device.type for parameter in straight.model.parameters()} == {"cuda"}
    straight.train()
    assert losses(straight)[-1] < losses(straight)[0] - 0.02
    resumed = make(base, tmp_path / "out", bits, use_cpu=False, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert losses(resumed) == pytest.approx(losses(straight), rel=1e-2)
    adapters = {name for name, p in straight.model.named_parameters() if p.requires_grad}
    for name, value in state(resumed).items():
        if name in adapters:
            torch.testing.assert_close(value, state(straight)[name], rtol=0.05, atol=0.01, msg=name)
