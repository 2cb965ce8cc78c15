"""LoRA learns what full fine-tuning learns, at about ten times its learning rate (Schulman et al. 2025,
https://thinkingmachines.ai/blog/lora/).

python examples/claims/lora.py

A model of half a million parameters has learned calculator steps of GSM8K (arithmetic.py), and learns to write the
results backwards: all its weights, or LoRA of rank 16 with alpha 32 on all linear layers, at learning rates
that are a factor of about 3 apart. The best is the one with the lowest held-out loss.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import arithmetic
import arms
from datasets import Dataset
from peft import LoraConfig

from posttrain.sft import SFTConfig, SFTTrainer

RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
SETTINGS = {"steps": 60, "batch": 64}
SMOKE = {"epochs": 0.1, "steps": 1, "rates": 1}


def backwards(rows: Dataset) -> Dataset:
    return Dataset.from_list([{"prompt": row["prompt"], "completion": row["result"][::-1]} for row in rows])


def sweep(
    rates: Sequence[float],
    rank: int,
    make: Callable[[], Any],
    train: Dataset,
    held_out: Dataset,
    tokenizer: Any = None,
    **options: Any,
) -> arms.Figures:
    """The best of these learning rates (log10), its held-out loss in nats a token, and the loss at each.

    Args:
        rank: of LoRA; 0: all weights are trained. make: the model, or its name, for each of them.
        options: of `SFTConfig`.
    """
    losses = {}
    for rate in rates:
        with tempfile.TemporaryDirectory() as out:
            args = SFTConfig(
                out, logging_strategy="no", learning_rate=rate, warmup_steps=5, report_to="none", disable_tqdm=True,
                lr_scheduler_type="constant_with_warmup", gradient_checkpointing=False, save_strategy="no", **options,
            )  # fmt: skip
            trainer = SFTTrainer(
                make(), args, train_dataset=train, eval_dataset=held_out, processing_class=tokenizer,
                peft_config=LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear") if rank else None,
            )  # fmt: skip
            trainer.train()
            losses[rate] = trainer.evaluate()["eval_loss"]
    best = min(losses, key=losses.__getitem__)
    return {"best_rate": math.log10(best), "loss": losses[best]} | {f"loss at {r:g}": v for r, v in losses.items()}


def measure(
    arm: str, seed: int, steps: int, batch: int, epochs: float = 30.0, rates: int | None = None
) -> arms.Figures:
    known, tokenizer, train, held_out = arithmetic.fine_tuned(seed, epochs)
    return sweep(
        RATES[:rates], 16 if arm == "lora" else 0, lambda: copy.deepcopy(known), backwards(train), backwards(held_out),
        tokenizer, max_steps=steps, per_device_train_batch_size=batch, per_device_eval_batch_size=400, seed=seed,
    )  # fmt: skip


def beside_full(figures: dict[str, list[arms.Figures]], arm: str) -> tuple[bool, str, str]:
    """Whether the claim holds of `arm`; its best learning rate, and its loss there, beside full fine-tuning."""
    mean, low, high = arms.bounds(arms.differences(figures, arm, "full", "best_rate"))
    gap, gap_low, gap_high = arms.bounds(arms.differences(figures, arm, "full", "loss"))
    return (
        gap_low <= 0 <= gap_high and low <= 1 <= high,
        f"{10**mean:.1f} times that of full fine-tuning [{10**low:.1f}, {10**high:.1f}]",
        f"{gap:+.4f} nats a token [{gap_low:+.4f}, {gap_high:+.4f}]",
    )


def verdict(figures: dict[str, list[arms.Figures]]) -> str:
    holds, rate, gap = beside_full(figures, "lora")
    found = f"the best learning rate of LoRA is {rate}; its loss there differs by {gap}"
    return f"{'Holds' if holds else 'Does not hold'}: {found}."


if __name__ == "__main__":
    arms.run(
        "LoRA equals full fine-tuning at about ten times the learning rate", "https://thinkingmachines.ai/blog/lora/",
        ["full", "lora"], measure, verdict, SETTINGS, SMOKE,
    )  # fmt: skip
