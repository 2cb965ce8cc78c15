"""The page about long rows says what `posttrain plan` does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import Qwen3Config

from posttrain.cli.tools import memory_mesh, memory_plan
from posttrain.cli.tools.communication import Links
from posttrain.core import registry
from posttrain.lm.loading.arguments import ModelConfig
from posttrain.sft import SFTConfig

PAGE = Path(__file__).resolve().parents[4] / "docs" / "long-context.md"
SHAPE = dict(
    vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960, tie_word_embeddings=False,
)  # fmt: skip
LORA = {"use_peft": True, "lora_target_modules": ["all-linear"], "lora_dropout": 0.0}


def rows() -> list[list[str]]:
    """The cells of the table of plans: tokens, GPUs, trained, set, then the plan."""
    lines = re.findall(r"^\| [\d,]+ \|.*\|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def planned(tokens: int, cards: int, trained: str, options: str, folder: Path) -> list[str]:
    """The last cells of such a row."""
    how = ({"mlp_tile": 4096} if "mlp_tile" in options else {}) | ({"offload": True} if "offload" in options else {})
    split = {"fsdp": "full_shard", "parallelism_config": {"cp_size": cards}} if cards > 1 else {}
    method = registry.method("sft")
    assert method.workload is not None
    with memory_mesh.imagined(cards):
        config = SFTConfig(
            str(folder / "out"), max_length=tokens, per_device_train_batch_size=1, bf16=True, use_cpu=True,
            report_to="none", activation_checkpointing_kwargs=how or None, **split,
        )  # fmt: skip
        model = ModelConfig(str(folder), dtype="bfloat16", **(LORA if trained == "LoRA" else {}))
        run = registry.Run(config, model, None)
        plan = memory_plan.measure(run, method.workload(run, None))
    sizes = plan.weights + plan.gradients + plan.optimizer, plan.peak, plan.host
    return [*(f"{size / 2**30:.1f}" for size in sizes), f"{plan.operations / Links().operations:,.0f}"]


def test_the_table_has_both_lengths():
    assert {row[0] for row in rows()} == {"131,072", "1,000,000"} and len(rows()) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("row", rows(), ids=lambda row: "-".join(row[:4]).replace(",", ""))
def test_the_page_has_the_numbers_of_the_plan(row, tmp_path):
    Qwen3Config(**SHAPE).save_pretrained(tmp_path)
    tokens, cards, trained, options, *said = row
    assert planned(int(tokens.replace(",", "")), int(cards), trained, options, tmp_path) == said
