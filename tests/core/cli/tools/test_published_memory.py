"""Plans beside the peaks that torchtune's README gives for Llama 3.1: two rows of 2,048 tokens, compiled.

Layers are recomputed, and the loss goes over the head in chunks, as in its recipe for 70B (``llama3_1/70B_lora``). That
those for 8B have the same parts, rank 8 and nested quantization is assumed. Left out are the 30.3 GiB of the 8B model
with LoRA on an A6000, whose flags are not given: the plan says 17.5 with recomputed layers, and 41.2 without.
"""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from posttrain.cli.tools import memory_mesh, memory_plan
from tests.core.cli.tools.test_memory_plan import a_run, workload

HEADS = dict(num_key_value_heads=8, vocab_size=128_256, tie_word_embeddings=False, dtype="bfloat16")
SHAPES = {
    "8B": dict(hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32),
    "70B": dict(hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64),
}
LORA = {
    "use_peft": True, "lora_dropout": 0.0, "dtype": "bfloat16", "bf16": True, "gradient_checkpointing": True,
    "per_device_train_batch_size": 2, "max_length": 2048,
    "lora_target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}  # fmt: skip
PEAKS = {
    "8B, LoRA, an RTX 4090": (16.2, "8B", 1, {"lora_r": 8, "lora_alpha": 16}),
    "8B, QLoRA, an RTX 4090": (7.4, "8B", 1, {"lora_r": 8, "load_in_4bit": True, "use_bnb_nested_quant": True}),
    "70B, LoRA, 8 A100": (27.6, "70B", 8, {"lora_r": 16, "lora_alpha": 32, "fsdp": "full_shard"}),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name.startswith("70B") else ()) for name in PEAKS]
)
def test_a_plan_is_within_a_tenth_of_a_published_peak(name, tmp_path):
    gib, shape, processes, more = PEAKS[name]
    LlamaConfig(**SHAPES[shape], **HEADS).save_pretrained(tmp_path)
    with memory_mesh.imagined(processes):
        run = a_run(str(tmp_path), tmp_path, **LORA, **more)
        found = memory_plan.measure(run, workload(run))
    assert found.peak / 2**30 == pytest.approx(gib, rel=0.1)
