"""Every trainer with a model to compile, by real inductor on the CPU: some minutes."""

import pytest
import torch
from safetensors.torch import load_file

from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny
from tests.contract.trainers import TRAINERS, arguments, weights
from tests.core.models.test_compiling import counters, losses  # noqa: F401

pytestmark = pytest.mark.slow


def assistant_only(output_dir, **changes):
    """Conversations of which the answers alone are trained on, a fifth of the tokens."""
    words = " ".join(tiny.CORPUS).split()
    rows = [
        {"messages": [
            {"role": "user", "content": " ".join(words[i : i + 6])},
            {"role": "assistant", "content": " ".join(words[i + 6 : i + 8 + i % 3])},
        ]}
        for i in range(16)
    ]  # fmt: skip
    changes = {"assistant_only_loss": True, "max_length": 96, "gradient_checkpointing": False} | changes
    args = arguments(SFTConfig, output_dir, **changes)
    return SFTTrainer(tiny.causal_lm(), args, train_dataset=rows, processing_class=tiny.tokenizer())


MAKERS = TRAINERS | {"sft-assistant": assistant_only}
NAMES = {
    "causal-lm": {}, "dropout": {}, "sft": {}, "sft-packed": {}, "sft-lora": {}, "sft-assistant": {}, "seq2seq": {},
    "dpo": {}, "reward": {}, "grpo": {}, "kto": {},
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_run_is_the_uncompiled_one_and_resumes_bit_for_bit(name, counters, tmp_path):  # noqa: F811
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    options |= {"per_device_train_batch_size": 4} | NAMES[name]
    plain = MAKERS[name](tmp_path / "plain", **options)
    torch.manual_seed(3)
    plain.train()
    fast = MAKERS[name](tmp_path / "fast", torch_compile=True, **options)
    torch.manual_seed(3)
    fast.train()
    assert counters["stats"]["unique_graphs"] >= 1 and not counters["graph_break"]
    assert losses(fast) == pytest.approx(losses(plain), rel=1e-5, abs=1e-6)
    for path in (tmp_path / "fast" / "checkpoint-4").glob("*.safetensors"):
        assert not any("_orig_mod" in key for key in load_file(path)), path
    torch._dynamo.reset()  # as in another process
    again = MAKERS[name](tmp_path / "fast", torch_compile=True, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "fast" / "checkpoint-2"))
    for key, value in weights(fast).items():
        assert torch.equal(value, weights(again)[key]), key
