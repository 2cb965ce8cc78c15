"""Packing changes no loss (Krell et al. 2021, https://arxiv.org/abs/2107.02027).

python examples/claims/packing.py

A model of 0.9 million parameters reads the same GSM8K problems padded and packed: their losses, then the weights after
updates from the same rows. Documents that saw each other in a packed row would change both.
"""

from __future__ import annotations

import copy
import random
import tempfile
from typing import Any

import arms
import dpo
import torch
from datasets import Dataset

from posttrain.sft import SFTConfig, SFTTrainer

SETTINGS = {"supervised_steps": 20, "rows": 96, "updates": 4, "learning_rate": 1e-3}
SMOKE = {"supervised_steps": 1, "rows": 8, "updates": 1}


def train(model: Any, tokenizer: Any, rows: Dataset, packing: bool, updates: int, learning_rate: float) -> Any:
    """(loss on the rows before, weights after updates from all rows, loss after)."""
    with tempfile.TemporaryDirectory() as out:
        args = SFTConfig(
            out, max_steps=updates, per_device_train_batch_size=len(rows), per_device_eval_batch_size=len(rows),
            learning_rate=learning_rate, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0, max_length=512,
            completion_only_loss=False, packing=packing, eval_packing=packing, **dpo.USUAL,
        )  # fmt: skip
        trainer = SFTTrainer(
            copy.deepcopy(model), args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        return before, weights, trainer.evaluate()["eval_loss"]


def measure(arm: str, seed: int, supervised_steps: int, rows: int, updates: int, learning_rate: float) -> arms.Figures:
    """Losses in nats a token; the largest difference of a weight, and the largest change of one by training."""
    model, tokenizer = dpo.supervised(supervised_steps)
    texts = random.Random(seed).sample(dpo.read("gsm8k/train.jsonl"), rows)
    data = Dataset.from_list([{"prompt": f"{row['question']}\n", "completion": row["answer"]} for row in texts])
    before, padded, after = train(model, tokenizer, data, False, updates, learning_rate)
    packed_before, packed, packed_after = train(model, tokenizer, data, True, updates, learning_rate)
    began = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {
        "loss": before,
        "loss_difference": abs(packed_before - before),
        "loss_difference_after": abs(packed_after - after),
        "loss_change": after - before,
        "weight_difference": (packed - padded).abs().max().item(),
        "weight_change": (padded - began).abs().max().item(),
    }


def verdict(figures: dict[str, list[arms.Figures]]) -> str:
    gap = max(max(f["loss_difference"], f["loss_difference_after"]) for f in figures["packed and padded"])
    weights = max(f["weight_difference"] / f["weight_change"] for f in figures["packed and padded"])
    holds = gap < 1e-5 and weights < 1e-3
    return (
        f"{'Holds' if holds else 'Does not hold'}: losses differ by at most {gap:.1e} nats a token, weights by at most "
        f"{weights:.1e} of what training changed."
    )


if __name__ == "__main__":
    arms.run(
        "Packing changes no loss", "https://arxiv.org/abs/2107.02027", ["packed and padded"], measure, verdict,
        SETTINGS, SMOKE,
    )  # fmt: skip
